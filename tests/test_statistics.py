"""Intervals of a comparison: hand-computed values, coverage on data whose truth is known, refusals in words."""

import numpy as np
import pytest

from learnkv.evaluation import statistics


def test_point_estimates_are_the_plain_means():
    values, full = [1, 0, 1, 0], [1, 1, 1, 0]
    assert statistics.mean(values).value == 0.5
    assert statistics.ratio(values, full).value == pytest.approx(2 / 3)
    assert statistics.difference(values, full).value == -0.25


def test_interval_equals_the_enumerated_bootstrap():
    values, full = np.array([1.0, 0.0]), np.array([1.0, 1.0])
    # four equally likely resamples: means 0, 1/2, 1/2, 1
    interval = statistics.mean(values, level=0.4, resamples=20000)
    assert (interval.low, interval.high) == (0.5, 0.5)
    interval = statistics.ratio(values, full, level=0.6, resamples=20000)
    assert (interval.low, interval.high) == (0.0, 1.0)


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


@pytest.mark.parametrize("bad", [[1.0, float("nan")], [1.0, float("inf")]])
def test_nan_is_refused_in_words(bad):
    with pytest.raises(ValueError, match="1 of 2 figures are NaN or infinite"):
        statistics.mean(bad)
    with pytest.raises(ValueError, match="NaN or infinite"):
        statistics.difference([0.0, 1.0], bad)


@pytest.mark.parametrize("few", [[], [1.0], [[1.0], [0.0]]])
def test_fewer_than_two_prompts_are_refused(few):
    with pytest.raises(ValueError, match="at least 2 prompts"):
        statistics.mean(few)


def test_unpaired_sides_are_refused_with_both_counts():
    with pytest.raises(ValueError, match="got 3 and 2"):
        statistics.ratio([1, 0, 1], [1, 0])


def test_ratio_to_a_full_cache_that_answers_nothing_is_refused():
    with pytest.raises(ValueError, match="answered none of 3 prompts"):
        statistics.ratio([1, 0, 1], [0, 0, 0])


@pytest.mark.parametrize("knob", [{"level": 1.0}, {"resamples": 0}])
def test_impossible_settings_are_refused(knob):
    with pytest.raises(ValueError, match=next(iter(knob))):
        statistics.mean([0, 1], **knob)
