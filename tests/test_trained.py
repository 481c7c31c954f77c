"""What a comparison says of its gates: cost, training seeds, and whether they beat twins whose targets were dealt out anew."""

from dataclasses import replace

import pytest

from learnkv.checkpoint import Card
from learnkv.evaluation import report, trained
from learnkv.evaluation.claims import Primary
from learnkv.evaluation.tables import tables
from learnkv.evaluation.trained import TWIN, Trained
from tests.comparison_parts import full_row, row
from tests.training_parts import made_gate

REAL = Trained(1000, 60.0, False, ("codes", "people"))
DEALT = replace(REAL, shuffled=True)
GATES = {"kvp": [REAL, replace(REAL, seconds=120.0)], f"kvp{TWIN}": [DEALT], "locret": [replace(REAL, seconds=None)]}
PROMPTS = [f"p{i}" for i in range(20)]


def gate_rows(line, gates, nll, **changes):
    method = line.removesuffix(TWIN)
    return [
        row(line=line, method=method, scorer=method, prompt=p, gate=g, run=g, budget=b, nll=nll + i / 10 + b, **changes)
        for i, p in enumerate(PROMPTS)
        for g in gates
        for b in (0.2, 0.1)
    ]


def compared(nll=1.0):
    """Two seeds of kvp with this NLL, its twin with 2, another gate without a twin, and the full cache."""
    rows = [full_row(prompt=p) for p in PROMPTS]
    rows += gate_rows("kvp", "ab", nll) + gate_rows(f"kvp{TWIN}", "c", 2.0, accuracy=0.0)
    return rows + gate_rows("locret", "d", 1.5)


# ---- twins


def test_a_gate_is_reproduced_where_its_nll_lies_below_its_twins():
    found = {v.line: v for v in trained.verdicts(compared(), GATES)}
    assert (found["kvp"].twin, found["kvp"].reproduced) == (f"kvp{TWIN}", True)
    assert found["kvp"].cells == ("1.00 [1.00, 1.00]", "-1.00 [-1.00, -1.00]")
    assert found["locret"].reproduced is None and f"kvp{TWIN}" not in found


@pytest.mark.parametrize("nll", [2.0, 3.0])
def test_a_gate_no_better_than_its_twin_is_listed_as_not_reproduced(nll):
    verdicts = trained.verdicts(compared(nll), GATES)
    assert trained.said(verdicts) == ["not reproduced (no better than their twins): kvp", "without a twin here: locret"]
    assert trained.twins(verdicts)[1][-1] == "not reproduced"


def test_a_twin_of_another_budget_rule_is_no_twin():
    rows = [replace(r, method="kvp+adaptive") if r.line == "kvp" else r for r in compared()]
    assert [v.reproduced for v in trained.verdicts(rows, GATES)] == [None, None]


# ---- costs and seeds


def test_costs_hold_weights_training_and_overhead():
    header, *lines = trained.costs(report.summarise(compared()), GATES)
    found = {line[0]: line[1:] for line in lines}
    assert len(header) == 5 and "full cache" not in found
    assert found["kvp (2 runs)"] == ["1,000", "2 min", "0.25 s (50%)", "codes, people"]
    assert found["locret"][:2] == ["1,000", ""]


def test_a_heuristic_costs_its_overhead_alone():
    (_, line) = trained.costs(report.summarise([row()]), {})
    assert line == ["snapkv", "", "", "0.25 s (50%)", ""]


def test_what_a_gates_card_says():
    gate = made_gate()
    recipe = {"train": {"shuffled": True}, "record": {"kinds": ["codes", "people", "codes"]}}
    card = Card(gate.METHOD, gate.knobs(), gate.base, recipe, "", train_seconds=3.5)
    size = sum(p.numel() for p in gate.parameters())
    assert trained.trained_of(gate, card) == Trained(size, 3.5, True, ("codes", "people"))
    assert trained.trained_of(gate, replace(card, recipe={}, train_seconds=None)) == Trained(size, None, False, ())


@pytest.mark.parametrize(("seconds", "said"), [(38.2, "38 s"), (89.9, "90 s"), (720, "12 min"), (6480, "1.8 h")])
def test_durations_read_well(seconds, said):
    assert trained.duration(seconds) == said


@pytest.mark.parametrize(
    ("recipe", "kinds"),
    [
        ({"prompts": "some/mine.jsonl", "record": {"kinds": ["codes"]}}, ("own prompts (mine.jsonl)",)),
        ({"record": {"kinds": 5}}, ()),
        ({"record": None, "train": []}, ()),
        ({}, ()),
    ],
)
def test_a_gate_was_trained_on_what_its_card_names(recipe, kinds):
    gate = made_gate()
    found = trained.trained_of(gate, Card("kvp", {}, gate.base, recipe, ""))
    assert (found.kinds, found.shuffled) == (kinds, False)


def test_seeds_stand_side_by_side():
    header, *lines = trained.seeds([replace(r, accuracy=0.0) if r.run == "b" else r for r in compared()])
    assert header == ["each training run", "20% accuracy", "20% NLL", "10% accuracy", "10% NLL"]
    assert lines == [["kvp", "1.00 / 0.00", "2.15 / 2.15", "1.00 / 0.00", "2.05 / 2.05"]]


# ---- all in short


def test_in_short_a_method_has_its_figures_in_every_group_beside_its_costs():
    rows = [replace(r, accuracy=float(r.prompt != "p0")) if r.line == "kvp" else r for r in compared()]
    parts = {"trained": report.summarise(rows), "unseen": report.summarise([r for r in rows if r.prompt != "p0"])}
    header, full, kvp, twin, locret = trained.brief(parts, GATES)
    assert header == ["method", *(f"{g}, {b}" for g in parts for b in ("20%", "10%")), "weights", "training", "extra time of a prefill"]
    assert full[0] == "full cache" and full[1] == full[2] and "%" not in full[1] and full[-3:] == ["", "", ""]
    assert kvp[0] == "kvp, 2 seeds" and kvp[1].startswith("0.95 / 2.15, 95% [") and kvp[3] == "1.00 / 2.20, 100% [100, 100]"
    assert kvp[5:] == ["1,000", "2 min", "0.25 s (50%)"] and twin[0] == f"kvp{TWIN}" and locret[6] == ""


def test_in_short_a_line_has_no_folder():
    (summary,) = report.summarise([replace(row(), line=f"kvp+adaptive:checkpoints/runs/kvp-shuffled{TWIN}")])
    assert trained.short_name(summary) == f"kvp+adaptive{TWIN}"


# ---- all tables


def test_groups_of_kinds_have_tables_of_their_own_and_unknown_groups_none():
    rows = [replace(r, kind="codes" if int(r.prompt[1:]) % 2 else "cities") for r in compared()]
    groups = {"trained": ["codes", "people"], "unseen": ["cities"], "other": ["rooms"]}
    made = list(tables(rows, groups, GATES, trained.verdicts(rows, GATES)))
    printed = [table.title for table in made if table.printed]
    assert printed == ["all kinds", "trained: codes", "unseen: cities", "costs", "training seeds", "twins trained on shuffled targets"]
    assert "in short: accuracy / NLL, share of the full cache's accuracy" in {t.title for t in made}
    assert {"codes", "cities", "kvp against the others, unseen: cities", "locret against the others, all kinds"} <= {t.title for t in made}
    assert all(len({len(cells) for cells in table.cells}) == 1 for table in made)
    against = next(table for table in made if table.title == "kvp against the others, all kinds")
    assert [cells[0] for cells in against.cells] == ["kvp minus", "locret"], "twins stand in a table of their own"


def test_without_gates_there_is_one_table():
    made = list(tables([full_row(), row()], {}, {}, []))
    assert [table.title for table in made] == ["codes (no intervals: 1 prompt, fewer than the 10 that an interval needs)"]


def test_claims_stand_in_the_tables_and_in_figures_in_the_file():
    rows = compared() + [row(line="snapkv", prompt=p, budget=b, accuracy=0.0, nll=3.0) for p in PROMPTS for b in (0.2, 0.1)]
    made = {table.title: table for table in tables(rows, {}, GATES, [])}
    header, *lines = made["codes"].cells
    said = {cells[0]: cells[header.index("10% claim")] for cells in lines}
    assert said["kvp (2 runs)"] == "no worse, ahead" and said["snapkv"] == "worse, best heuristic" and said[f"kvp{TWIN}"] == ""
    assert not made["claims, codes"].printed and len(made["claims, codes"].cells) == 1 + 4 * 2


def test_a_declared_endpoint_comes_first_and_of_its_methods_alone():
    rows = compared() + [row(line="snapkv", prompt=p, budget=b, accuracy=0.0, nll=3.0) for p in PROMPTS for b in (0.2, 0.1)]
    first = next(tables(rows, {"own": ["codes"]}, GATES, [], Primary(["kvp"], 0.2, "nll", "own")))
    assert first.title == "primary endpoint: nll, 20%, own" and first.printed
    assert [cells[:2] for cells in first.cells] == [["method", "budget"], ["kvp", "20%"]] and first.cells[1][-1] == "worse, ahead"


def test_few_prompts_leave_a_twin_undecided():
    verdicts = trained.verdicts([r for r in compared() if int(r.prompt[1:]) < 9], GATES)
    assert trained.said(verdicts) == ["too few prompts to tell from their twins: kvp", "without a twin here: locret"]
    assert trained.twins(verdicts)[1][2:] == ["1.00", "-1.00", "too few prompts"]
