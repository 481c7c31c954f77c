"""What a comparison claims, on rows whose answer can be counted by hand."""

import math

import pytest

from learnkv.evaluation import claims
from learnkv.evaluation.choice import BEST
from learnkv.evaluation.claims import claims_of
from learnkv.evaluation.trained import TWIN
from tests.comparison_parts import full_row, row

N = 100


def rows_of(line, right, budget=0.1, **changes):
    """A line that answers the first `right` of N prompts."""
    scorer = changes.pop("scorer", line)
    values = [float(i < right) for i in range(N)]
    return [row(line=line, method=line, scorer=scorer, budget=budget, prompt=f"p{i}", accuracy=a, **changes) for i, a in enumerate(values)]


def full(right=80):
    return [full_row(prompt=f"p{i}", accuracy=float(i < right), nll=0.5) for i in range(N)]


def test_wins_ties_and_losses_are_counted_over_prompts():
    found = claims_of([*full(80), *rows_of("snapkv", 70)]).full["snapkv", 0.1]
    assert (found.wins, found.ties, found.losses) == (0, 90, 10)
    assert found.gain.value == pytest.approx(-0.1) and found.gain.low < -0.1 < found.gain.high < 0


def test_a_prompts_questions_and_training_runs_are_averaged_before_they_are_counted():
    runs = rows_of("kvp", 80, gate="a") + rows_of("kvp", 40, gate="b")
    found = claims_of([*full(60), *runs]).full["kvp", 0.1]
    assert (found.wins, found.ties, found.losses) == (20, 60, 20), "40 both right, 20 half right of either kind, 20 both wrong"
    assert found.gain.value == pytest.approx(0.0)


@pytest.mark.parametrize(("right", "word"), [(80, "no worse"), (90, "no worse"), (79, "no worse"), (77, "unclear"), (60, "worse")])
def test_no_worse_is_an_interval_that_ends_at_three_points_below_or_above(right, word):
    """One prompt of a hundred lost: 97.5% of resamples draw it at most three times.  Three lost: the mean itself lies on the margin."""
    found = claims_of([*full(80), *rows_of("snapkv", right)])
    assert claims.of_full(found.full["snapkv", 0.1]) == word


def test_the_best_heuristic_is_the_most_accurate_then_of_the_lowest_nll_at_each_budget():
    rows = [*full(), *rows_of("snapkv", 50), *rows_of("h2o", 50, nll=0.4), *rows_of("kvp", 90, gate="g"), *rows_of("oracle", 95)]
    rows += [*rows_of("snapkv", 50, 0.2), *rows_of("h2o", 40, 0.2), *rows_of("random", 99, 0.2)]
    assert claims_of(rows).heuristics == {0.1: "h2o", 0.2: "snapkv"}


def test_a_gate_is_no_heuristic_and_filters_do_not_make_one_of_a_heuristic():
    rows = [*full(), *rows_of("qfilter(filters=f)", 50, scorer="qfilter", gate="hash of a file"), *rows_of("kvp", 90, gate="g")]
    assert claims_of(rows).heuristics == {0.1: "qfilter(filters=f)"}


def test_what_a_development_run_chose_is_the_best_heuristic_whatever_is_better_here():
    rows = [*full(), *rows_of(BEST, 40, scorer="snapkv"), *rows_of("h2o", 60)]
    found = claims_of(rows)
    assert found.heuristics == {0.1: BEST} and claims.marks(found)["h2o", 0.1] == "worse, ahead"


def test_marks_say_ahead_behind_and_nothing_where_two_cannot_be_told_apart():
    rows = [*full(), *rows_of("kvzip", 50), *rows_of("kvp", 80, gate="g"), *rows_of("h2o", 20), *rows_of("tova", 49)]
    assert claims.marks(claims_of(rows)) == {
        ("kvzip", 0.1): "worse, best heuristic",
        ("kvp", 0.1): "no worse, ahead",
        ("h2o", 0.1): "worse, behind",
        ("tova", 0.1): "worse",
    }


def test_p_values_of_a_family_are_corrected_and_those_of_controls_are_none():
    """Holm: the least p of three is tripled; the controls do not count among them."""
    lines = {"snapkv": 73, "h2o": 20, "tova": 10}
    rows = [*full(), *rows_of("random", 5), *rows_of("oracle", 80), *(r for line, right in lines.items() for r in rows_of(line, right))]
    found, alone = claims_of(rows).full, claims_of([*full(), *rows_of("snapkv", 73)]).full
    assert found["h2o", 0.1].p == pytest.approx(3 * 2 / 5001) and found["tova", 0.1].p == pytest.approx(3 * 2 / 5001)
    assert found["snapkv", 0.1].p == pytest.approx(max(alone["snapkv", 0.1].p, 6 / 5001)), "the largest is left as it is"
    assert all(math.isnan(found[line, 0.1].p) for line in ("random", "oracle"))
    assert ("random", 0.1) not in claims_of(rows).best


def test_a_twin_is_a_control():
    rows = [*full(), *rows_of("snapkv", 50), *rows_of(f"kvp{TWIN}", 30, scorer="kvp", gate="t")]
    found = claims_of(rows)
    assert math.isnan(found.full[f"kvp{TWIN}", 0.1].p) and (f"kvp{TWIN}", 0.1) not in found.best


def test_a_declared_endpoint_is_not_corrected_and_not_counted_among_the_others():
    rows = [*full(), *rows_of("snapkv", 72), *rows_of("h2o", 72), *rows_of("kvp", 72, gate="g")]
    declared, undeclared = claims_of(rows, uncorrected=[("kvp", 0.1)]).full, claims_of(rows).full
    alone = claims_of([*full(), *rows_of("kvp", 72, gate="g")]).full["kvp", 0.1].p
    assert declared["kvp", 0.1].p == alone and undeclared["kvp", 0.1].p == pytest.approx(3 * alone)
    assert declared["snapkv", 0.1].p == pytest.approx(2 * alone)


def test_nll_gains_where_it_falls_and_has_no_margin():
    rows = [*full(), *rows_of("snapkv", 80, nll=1.5), *rows_of("kvp", 80, nll=0.4, gate="g")]
    found = claims_of(rows, metric="nll")
    assert found.full["snapkv", 0.1].gain.value == pytest.approx(-1.0) and found.full["snapkv", 0.1].losses == N
    assert claims.marks(found) == {("snapkv", 0.1): "worse, best heuristic", ("kvp", 0.1): "better, ahead"}


def test_few_prompts_claim_nothing_and_say_why():
    rows = [r for r in [*full(), *rows_of("snapkv", 50)] if int(r.prompt[1:]) < 9]
    with pytest.raises(ValueError, match="nothing can be claimed of 9 prompts, fewer than the 10"):
        claims_of(rows)


def test_without_a_full_cache_or_a_heuristic_there_is_nothing_to_stand_beside():
    assert claims_of(rows_of("kvp", 50, gate="g")) == claims.Claims({}, {}, {})


def test_the_table_holds_every_claim_in_figures():
    rows = [*full(), *rows_of("snapkv", 50), *rows_of("random", 5), *rows_of("kvp", 80, gate="g")]
    header, *lines = claims.table(claims_of(rows))
    assert {line[0] for line in lines} == {"snapkv", "random", "kvp"} and all(len(line) == len(header) for line in lines)
    kvp = dict(zip(header, next(line for line in lines if line[0] == "kvp"), strict=True))
    assert kvp["minus full cache"] == "0.00 [0.00, 0.00]" and kvp["win / tie / loss full cache"] == "0 / 100 / 0"
    assert kvp["p full cache"] == "1.000" and kvp["p best heuristic"] == "<0.001" and kvp["claim"] == "no worse, ahead"
    random = next(line for line in lines if line[0] == "random")
    assert random[4:] == ["", "", "", "", "", ""]


def test_notes_say_what_the_words_mean_and_which_heuristic_is_meant():
    meaning, named = claims.notes({0.1: "h2o", 0.2: "snapkv"})
    assert "-3 points" in meaning and "Holm" in meaning and named.endswith("h2o at 10%, snapkv at 20%")
    assert len(claims.notes({})) == 1
