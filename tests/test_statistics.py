"""Intervals of a comparison: hand-computed values, coverage on data whose truth is known, refusals in words."""

import numpy as np
import pytest
import scipy.stats

from learnkv.evaluation import statistics


def test_point_estimates_are_the_plain_means():
    values, full = [1, 0, 1, 0] * 3, [1, 1, 1, 0] * 3
    assert statistics.mean(values).value == 0.5
    assert statistics.ratio(values, full).value == pytest.approx(2 / 3)
    assert statistics.difference(values, full).value == -0.25


def test_interval_equals_the_enumerated_bootstrap():
    values, full = np.array([[1.0, 0.0]]), np.array([[1.0, 1.0]])
    # four equally likely resamples: means 0, 1/2, 1/2, 1
    interval = statistics.bootstrap(np.positive, values, level=0.4, resamples=20000, seed=0)
    assert (interval.low, interval.high) == (0.5, 0.5)
    interval = statistics.bootstrap(statistics.divide, values, full, level=0.6, resamples=20000, seed=0)
    assert (interval.low, interval.high) == (0.0, 1.0)


def test_intervals_of_one_run_are_scipys():
    rng = np.random.default_rng(0)
    full = rng.random(60) < 0.7
    values = full & (rng.random(60) < 0.8)
    more = dict(paired=True, vectorized=False, method="percentile", n_resamples=20000, rng=rng)
    for ours, what in ((statistics.difference, np.subtract), (statistics.ratio, np.divide)):
        wanted = scipy.stats.bootstrap((values, full), lambda a, b, what=what: what(a.mean(), b.mean()), **more).confidence_interval
        found = ours(values, full, resamples=20000)
        assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=0.01)


def test_intervals_are_those_that_were_published():
    """README and cards hold figures of this very stream of random numbers."""
    rng = np.random.default_rng(5)
    full = rng.random(203) < 0.64
    found = statistics.ratio([full & (rng.random(203) < 0.9) for _ in range(3)], full)
    assert (found.low, found.high) == pytest.approx((0.8292682926829269, 0.9323308270676691), abs=1e-12)


# ---- p-values


def test_p_values_are_the_shares_of_resamples_on_the_wrong_side(monkeypatch):
    monkeypatch.setattr(statistics, "draws", lambda *sides, **more: np.array([-0.05, -0.03, 0.0, 0.1, 0.2, 0.3, 0.4]))
    found = statistics.tested([1.0] * 10, [0.0] * 10, margin=0.03, resamples=7)
    assert found.p == 2 * (1 + 3) / 8, "three resamples at 0 or below, five at 0 or above"
    assert found.p_margin == 2 * (1 + 1) / 8, "one resample below the margin; the one at it is within"


def test_equal_sides_differ_in_nothing_and_a_constant_gap_is_as_sure_as_resamples_can_be():
    values = np.random.default_rng(0).random(20)
    assert statistics.tested(values, values).p == 1.0
    worse = statistics.tested(values - 1, values, margin=0.03)
    assert (worse.gain.value, worse.p, worse.p_margin) == (pytest.approx(-1.0), 2 / 5001, 1.0)


def test_p_values_agree_with_the_interval():
    """But for the one resample that the sample itself counts as, which moves them by 2 in 5,001."""
    rng = np.random.default_rng(0)
    for shift in np.linspace(-0.3, 0.3, 25):
        test = statistics.tested(rng.normal(shift, 1, 80), np.zeros(80), margin=0.1)
        inside = test.gain.low <= 0 <= test.gain.high
        assert test.p > 0.049 if inside else test.p < 0.051
        assert test.p_margin < 0.051 if test.gain.low > -0.1 else test.p_margin > 0.049


def test_a_difference_that_is_not_there_is_found_about_as_often_as_the_level_says():
    rng, hits, trials = np.random.default_rng(1), 0, 400
    for _ in range(trials):
        hits += statistics.tested(rng.random(100) < 0.5, rng.random(100) < 0.5, resamples=300).p < 0.05
    assert 0.02 <= hits / trials <= 0.09


def test_holm_multiplies_the_least_by_all_the_next_by_one_less_and_never_goes_down():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.5, 0.9]) == [1.0, 1.0] and statistics.holm([0.02]) == [0.02] and statistics.holm([]) == []


def test_pairing_makes_a_constant_gap_certain():
    full = np.random.default_rng(0).normal(size=50)
    interval = statistics.difference(full - 0.25, full)
    assert interval.low == pytest.approx(-0.25) and interval.high == pytest.approx(-0.25)


def test_equal_sides_have_ratio_one_without_doubt():
    full = np.random.default_rng(0).integers(0, 2, 40)
    assert statistics.ratio(full, full) == statistics.Interval(1.0, 1.0, 1.0)


def test_same_seed_gives_the_same_interval():
    values = np.random.default_rng(1).random(30)
    assert statistics.mean(values, seed=3) == statistics.mean(values, seed=3)
    assert statistics.mean(values, seed=3) != statistics.mean(values, seed=4)


def test_blocks_do_not_change_what_is_covered(monkeypatch):
    values = np.random.default_rng(1).random(30)
    whole = statistics.mean(values)
    monkeypatch.setattr(statistics, "BLOCK_ELEMENTS", 301)
    blocked = statistics.mean(values)
    assert blocked.value == whole.value
    assert (blocked.low, blocked.high) == pytest.approx((whole.low, whole.high), abs=0.01)


def test_ratio_interval_covers_the_truth_about_as_often_as_it_says():
    rng, hits, trials = np.random.default_rng(0), 0, 300
    for _ in range(trials):
        full = rng.random(120) < 0.8
        values = full & (rng.random(120) < 0.75)  # true ratio 0.75
        interval = statistics.ratio(values, full, resamples=400)
        hits += interval.low <= 0.75 <= interval.high
    assert 0.9 <= hits / trials <= 0.99


def test_runs_widen_the_interval_when_seeds_differ():
    rng = np.random.default_rng(0)
    prompts = rng.random(200)
    alike = np.stack([prompts, prompts, prompts])
    apart = np.stack([prompts - 0.2, prompts, prompts + 0.2])
    narrow, wide = statistics.mean(alike), statistics.mean(apart)
    assert wide.value == pytest.approx(narrow.value)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_seeds_by_prompts_interval_covers_the_truth_over_seeds():
    rng, hits, trials = np.random.default_rng(0), 0, 200
    for _ in range(trials):
        values = 0.5 + rng.normal(0, 0.1, (8, 1)) + rng.normal(0, 0.3, 60) + rng.normal(0, 0.1, (8, 60))
        interval = statistics.mean(values, resamples=400)
        hits += interval.low <= 0.5 <= interval.high
    assert 0.85 <= hits / trials <= 0.99


def test_several_runs_equal_one_when_they_are_the_same():
    rng = np.random.default_rng(0)
    full, values = rng.random(80) < 0.9, rng.random(80) < 0.6
    assert statistics.ratio([values, values], full).value == statistics.ratio(values, full).value


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_is_refused_in_words(bad):
    values = [1.0] * 9 + [bad]
    with pytest.raises(ValueError, match="1 of 10 figures are NaN or infinite"):
        statistics.mean(values)
    with pytest.raises(ValueError, match="NaN or infinite"):
        statistics.difference([0.0] * 10, values)


@pytest.mark.parametrize(("few", "said"), [([], "0 prompts"), ([1.0], "1 prompt,"), ([[1.0] * 9] * 20, "9 prompts")])
def test_fewer_than_ten_prompts_are_refused_however_many_runs(few, said):
    with pytest.raises(ValueError, match=f"{said}.* fewer than the 10 that an interval needs"):
        statistics.mean(few)


def test_unpaired_sides_are_refused_with_both_counts():
    with pytest.raises(ValueError, match="got 12 and 11"):
        statistics.ratio([1] * 12, [1] * 11)


def test_ratio_to_a_full_cache_that_answers_nothing_is_refused():
    with pytest.raises(ValueError, match="answered none of 10 prompts"):
        statistics.ratio([1] * 10, [0] * 10)


@pytest.mark.parametrize("knob", [{"level": 1.0}, {"resamples": 0}])
def test_impossible_settings_are_refused(knob):
    with pytest.raises(ValueError, match=next(iter(knob))):
        statistics.mean([0, 1] * 5, **knob)
