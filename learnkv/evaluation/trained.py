"""What the gates of a comparison cost, how far their training seeds lie apart, and whether they beat their twins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from learnkv.checkpoint import Card
from learnkv.evaluation import report
from learnkv.evaluation.report import FULL, Summary
from learnkv.evaluation.rows import Row
from learnkv.gates.base import Gate

TWIN = ", shuffled targets"  # how the line of a twin ends


@dataclass(frozen=True)
class Trained:
    """What is known of a gate's training.

    parameters  weights that were trained
    seconds     what its steps took; None where its checkpoint does not say
    shuffled    whether its targets were dealt out anew among the tokens: the twin of a gate trained on real ones
    kinds       kinds of prompts it was trained on
    """

    parameters: int
    seconds: float | None
    shuffled: bool
    kinds: tuple[str, ...]


def trained_of(gate: Gate, card: Card) -> Trained:
    """The gate's size beside what its card says."""
    shuffled = section(card, "train").get("shuffled") is True
    return Trained(sum(p.numel() for p in gate.parameters()), card.train_seconds, shuffled, kinds_of(card))


def kinds_of(card: Card) -> tuple[str, ...]:
    """The kinds of prompts that a recipe names, or the file of the user's own."""
    if own := card.recipe.get("prompts"):
        return (f"own prompts ({Path(str(own)).name})",)
    named = section(card, "record").get("kinds")
    return tuple(dict.fromkeys(str(kind) for kind in named)) if isinstance(named, list) else ()


def section(card: Card, name: str) -> dict[str, object]:
    """A part of the card's recipe; whoever wrote the card may have left it out."""
    found = card.recipe.get(name)
    return found if isinstance(found, dict) else {}


Lines = Mapping[str, Sequence[Trained]]  # the gates of each line, one per training run


def costs(summaries: Sequence[Summary], gates: Lines) -> list[list[str]]:
    """Rows of cells: weights, training and overhead of every line but the full cache's; the first two of gates alone."""
    header = ["method", "weights", "training", "extra time of a prefill", "trained on"]
    lines = dict.fromkeys(s.line for s in summaries if s.line != FULL)
    own = {line: [s for s in summaries if s.line == line] for line in lines}
    return [header, *([report.name_of(own[line][0]), *cost(own[line], gates.get(line, ()))] for line in lines)]


def cost(own: Sequence[Summary], runs: Sequence[Trained]) -> list[str]:
    """The cells of one line; training is the mean over its runs."""
    seconds = [run.seconds for run in runs if run.seconds is not None]
    weights = ", ".join(f"{count:,}" for count in dict.fromkeys(run.parameters for run in runs))
    kinds = ", ".join(dict.fromkeys(kind for run in runs for kind in run.kinds))
    return [weights, duration(float(np.mean(seconds))) if seconds else "", report.show_extra(own), kinds]


def brief(groups: Mapping[str, Sequence[Summary]], gates: Lines) -> list[list[str]]:
    """Rows of cells, all that decides in one table: accuracy / NLL, share of the full cache's accuracy, by group and budget; costs.

    groups  name -> its summaries; every one has the same lines and budgets
    """
    first = next(iter(groups.values()))
    budgets = sorted({s.budget for s in first if s.line != FULL}, reverse=True)
    columns = [f"{name}, {report.show_budget(b)}" for name in groups for b in budgets]
    found = {(name, s.line, s.budget): s for name, summaries in groups.items() for s in summaries}
    rows = []
    for line in dict.fromkeys(s.line for s in first):
        own = [s for s in first if s.line == line]
        at = [own[0].budget] * len(budgets) if line == FULL else budgets
        shown = [kept(found.get((name, line, b))) for name in groups for b in at]
        rows.append([short_name(own[0]), *shown, *cost(own, gates.get(line, ()))[:3]])
    return [["method", *columns, "weights", "training", "extra time of a prefill"], *rows]


def short_name(first: Summary) -> str:
    """The line without its gates' folder."""
    method = first.line.removesuffix(TWIN).split(":", 1)[0]
    twin = TWIN if first.line.endswith(TWIN) else ""
    return f"{method}{twin}" + (f", {first.runs} seeds" if first.runs > 1 else "")


def kept(found: Summary | None) -> str:
    """0.60 / 0.79, 104% [98, 110]"""
    if found is None:
        return ""
    share = f", {report.show(found.ratio, 100, 0, '%')}" if found.ratio and found.line != FULL else ""
    return f"{found.accuracy.value:.2f} / {found.nll.value:.2f}{share}"


def duration(seconds: float) -> str:
    """38 s, 12 min, 1.8 h"""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def seeds(rows: Sequence[Row]) -> list[list[str]]:
    """Rows of cells: accuracy and NLL of each training run, for the lines that have several; a header alone where none has."""
    budgets = sorted({row.budget for row in rows if row.gate}, reverse=True)
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    lines = [
        [line, *(cell for b in budgets for cell in each_run(own, prompts, b))] for line, own in report.by_line(rows).items() if several(own)
    ]
    return [["each training run", *(f"{report.show_budget(b)} {name}" for b in budgets for name in ("accuracy", "NLL"))], *lines]


def several(rows: Sequence[Row]) -> bool:
    return len({row.run for row in rows if row.gate}) > 1


def each_run(rows: Sequence[Row], prompts: Sequence[str], budget: float) -> list[str]:
    """0.61 / 0.64 / 0.70, of accuracy and of NLL."""
    here = [row for row in rows if row.budget == budget]
    return (
        [" / ".join(f"{x:.2f}" for x in report.by_prompt(here, prompts, name).mean(1)) for name in ("accuracy", "nll")]
        if here
        else ["", ""]
    )


# ---- twins


@dataclass(frozen=True)
class Verdict:
    """A line of gates beside its twin, whose targets were shuffled; `cells` are the differences as they are shown."""

    line: str
    twin: str
    reproduced: bool | None
    cells: tuple[str, ...]


def verdicts(rows: Sequence[Row], gates: Lines) -> list[Verdict]:
    """Every line of gates trained on real targets beside each twin of its method, paired over prompts, over all budgets.

    reproduced  the interval of the NLL's difference lies below 0; None where there is none, for want of a twin or of prompts
    """
    lines = report.by_line(rows)
    method = {line: own[0].method for line, own in lines.items()}
    twins = [line for line in lines if line in gates and all(run.shuffled for run in gates[line])]
    found = []
    for line in (line for line in lines if line in gates and line not in twins):
        own = [twin for twin in twins if method[twin] == method[line]]
        found += [beside([*lines[line], *lines[twin]], line, twin) for twin in own] or [Verdict(line, "", None, ("", ""))]
    return found


def beside(rows: Sequence[Row], line: str, twin: str) -> Verdict:
    accuracy, nll = (report.difference(rows, line, twin, figure=name) for name in ("accuracy", "nll"))
    return Verdict(line, twin, None if math.isnan(nll.high) else nll.high < 0, (report.show(accuracy), report.show(nll)))


def word(found: Verdict) -> str:
    """What follows from the differences, in the words that `said` explains."""
    if found.reproduced is None:
        return "too few prompts" if found.twin else "no twin"
    return "reproduced" if found.reproduced else "not reproduced"


def twins(found: Sequence[Verdict]) -> list[list[str]]:
    """Rows of cells: the differences and what follows from them."""
    header = ["method minus its twin trained on shuffled targets", "twin", "accuracy, all budgets", "NLL, all budgets", ""]
    return [header, *([v.line, v.twin, *v.cells, word(v)] for v in found)]


def said(found: Sequence[Verdict]) -> list[str]:
    """One line each: what beats its twin, what does not, what cannot be said, what has none."""
    notes = {
        "reproduced": "better than their twins trained on shuffled targets",
        "not reproduced": "not reproduced (no better than their twins)",
        "too few prompts": "too few prompts to tell from their twins",
        "no twin": "without a twin here",
    }
    names = {key: ", ".join(dict.fromkeys(v.line for v in found if word(v) == key)) for key in notes}
    return [f"{notes[key]}: {lines}" for key, lines in names.items() if lines]
