"""What a comparison may claim: which methods are no worse than the full cache, and which differ from the best heuristic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from learnkv.evaluation import report, statistics
from learnkv.evaluation.choice import BEST, CONTROLS, standing
from learnkv.evaluation.report import FULL, Marks
from learnkv.evaluation.rows import Row
from learnkv.evaluation.statistics import ROUNDING, Interval
from learnkv.evaluation.trained import TWIN
from learnkv.gates import GATES

Metric = Literal["accuracy", "nll"]
Cell = tuple[str, float]  # line, budget
MARGIN = 0.03  # of accuracy: a method whose interval ends no lower beside the full cache is no worse
LEVEL = 0.05  # of p-values


@dataclass(frozen=True)
class Primary:
    """The one claim that a comparison is run for: declared in its recipe, and the only one that is not corrected for the others.

    Of several methods each must hold, so that there is nothing to correct.
    """

    methods: list[str] = field(default_factory=list)  # lines that must all hold; [] declares no endpoint
    budget: float = 0.1  # as in evaluate.budgets
    metric: Metric = "accuracy"
    group: str = ""  # a name in evaluate.groups, "" for all prompts


@dataclass(frozen=True)
class Claim:
    """One line beside another at one budget, paired over prompts, and over training seeds where there are several.

    gain                what it gains in the metric, above 0 for the better of the two, with its 95% interval
    wins, ties, losses  prompts, each the mean over its questions and the line's runs
    p                   that there is no difference, two-sided; NaN of controls, which claim nothing
    p_worse             that it lies more than MARGIN below
    """

    line: str
    other: str
    budget: float
    metric: Metric
    gain: Interval
    wins: int
    ties: int
    losses: int
    p: float
    p_worse: float

    @property
    def no_worse(self) -> bool:
        """The interval ends at -MARGIN or above it; said of accuracy only."""
        return self.metric == "accuracy" and self.gain.low >= -MARGIN - ROUNDING

    @property
    def differs(self) -> bool:
        return self.p < LEVEL


@dataclass(frozen=True)
class Claims:
    """All claims on the same prompts; p-values are corrected (Holm) over the methods and budgets beside the same other line.

    full, best  by (line, budget): beside the full cache, beside the best heuristic; `primary`'s cells are not corrected
    heuristics  budget -> the line that is the best heuristic there
    """

    full: Mapping[Cell, Claim]
    best: Mapping[Cell, Claim]
    heuristics: Mapping[float, str]


def claims_of(rows: Sequence[Row], *, metric: Metric = "accuracy", uncorrected: Iterable[Cell] = ()) -> Claims:
    """The claims that FEWEST prompts or more allow: of each line at each budget, the best heuristic itself included.

    uncorrected  cells that are a declared endpoint: left as they are, and out of the others' correction
    Raises ValueError for fewer prompts.
    """
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    if len(prompts) < statistics.FEWEST:
        raise ValueError(f"nothing can be claimed of {statistics.too_few(len(prompts))}; run more prompts")
    cells = cells_of(rows)
    heuristics = best_heuristics(cells)
    whole = next((cell for cell in cells if cell[0] == FULL), None)

    def beside(cell: Cell, other: Cell) -> Claim:
        return claim(cells[cell], cells[other], prompts, metric)

    full = {cell: beside(cell, whole) for cell in cells if whole and cell != whole}
    full |= {cell: replace(c, p=math.nan, p_worse=math.nan) for cell, c in full.items() if is_control(cells[cell])}
    rivals = {cell: (heuristics[cell[1]], cell[1]) for cell in cells if cell[1] in heuristics and not is_control(cells[cell])}
    best = {cell: beside(cell, other) for cell, other in rivals.items() if cell != other}
    spared = set(uncorrected)
    return Claims(corrected(full, spared), corrected(best, spared), heuristics)


def cells_of(rows: Sequence[Row]) -> dict[Cell, list[Row]]:
    """The rows of every line at every budget."""
    cells: dict[Cell, list[Row]] = {}
    for row in rows:
        cells.setdefault((row.line, row.budget), []).append(row)
    return cells


def is_control(rows: Sequence[Row]) -> bool:
    """Full cache, random, oracle, and gates trained on shuffled targets."""
    return rows[0].scorer in CONTROLS or rows[0].line.endswith(TWIN)


def best_heuristics(cells: Mapping[Cell, Sequence[Row]]) -> dict[float, str]:
    """Budget -> what a development run chose, or else the heuristic that is best on these very prompts: then it has had its pick of them,
    which makes "ahead of it" the harder claim."""
    found: dict[float, str] = {}
    for budget in dict.fromkeys(budget for _, budget in cells):
        own = {line: rows for (line, b), rows in cells.items() if b == budget and not is_control(rows) and rows[0].scorer not in GATES}
        if own:
            found[budget] = BEST if BEST in own else min(own, key=lambda line: (standing(own[line]), line))
    return found


def claim(rows: Sequence[Row], others: Sequence[Row], prompts: Sequence[str], metric: Metric) -> Claim:
    """One line's rows beside another's, on prompts that both have."""
    sign = 1 if metric == "accuracy" else -1
    mine, theirs = (sign * report.by_prompt(side, prompts, metric) for side in (rows, others))
    test = statistics.tested(mine, theirs, margin=MARGIN)
    gap = mine.mean(0) - theirs.mean(0)
    wins, losses = int(np.sum(gap > ROUNDING)), int(np.sum(gap < -ROUNDING))
    counts = (wins, len(prompts) - wins - losses, losses)
    return Claim(rows[0].line, others[0].line, rows[0].budget, metric, test.gain, *counts, test.p, test.p_margin)


def corrected(claims: Mapping[Cell, Claim], spared: set[Cell]) -> dict[Cell, Claim]:
    """Holm's correction over a family: all but the spared, which keep their own p-values, and controls, which have none."""
    family = [cell for cell, c in claims.items() if cell not in spared and not math.isnan(c.p)]
    equal, worse = (statistics.holm(p) for p in ([claims[cell].p for cell in family], [claims[cell].p_worse for cell in family]))
    changed = {cell: replace(claims[cell], p=p, p_worse=q) for cell, p, q in zip(family, equal, worse, strict=True)}
    return {**claims, **changed}


# ---- in words


def marks(claims: Claims) -> Marks:
    """(line, budget) -> what a table says at a glance: "no worse, ahead"."""
    return {cell: ", ".join(filter(None, (of_full(claims.full.get(cell)), of_best(claims, cell)))) for cell in claims.full}


def of_full(claim: Claim | None) -> str:
    """Beside the full cache; "unclear" where nothing can be said, of what claims anything."""
    if claim is None:
        return ""
    if claim.no_worse:
        return "no worse"
    return direction(claim, "better", "worse") or ("" if math.isnan(claim.p) else "unclear")


def of_best(claims: Claims, cell: Cell) -> str:
    """Beside the best heuristic; "" where the two can't be told apart."""
    if claims.heuristics.get(cell[1]) == cell[0]:
        return "best heuristic"
    return direction(claims.best.get(cell), "ahead", "behind")


def direction(claim: Claim | None, better: str, worse: str) -> str:
    if claim is None or not claim.differs:
        return ""
    return better if claim.gain.value > 0 else worse


def table(claims: Claims, cells: Iterable[Cell] | None = None) -> list[list[str]]:
    """Rows of cells: every claim in figures, or those of `cells` alone."""
    sides = ("full cache", "best heuristic")
    header = [
        "method",
        "budget",
        *(f"{name} {side}" for side in sides for name in ("minus", "win / tie / loss", "p")),
        "p (worse)",
        "claim",
    ]
    said = marks(claims)
    wanted = list(claims.full if cells is None else cells)
    return [header, *([line, report.show_budget(b), *figures(claims, (line, b)), said.get((line, b), "")] for line, b in wanted)]


def figures(claims: Claims, cell: Cell) -> list[str]:
    """Gain, counts and p beside either, then the p of being worse than the full cache by more than the margin."""
    full, best = claims.full.get(cell), claims.best.get(cell)
    return [*shown(full), *shown(best), show_p(full.p_worse) if full and full.metric == "accuracy" else ""]


def shown(claim: Claim | None) -> list[str]:
    if claim is None:
        return ["", "", ""]
    return [report.show(claim.gain), f"{claim.wins} / {claim.ties} / {claim.losses}", show_p(claim.p)]


def show_p(p: float) -> str:
    """0.012, or <0.001; nothing of a control."""
    return "" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def said(rows: Sequence[Row]) -> list[str]:
    """What the words in the tables claim of these rows, or why they claim nothing."""
    prompts = len({row.prompt for row in rows})
    if prompts < statistics.FEWEST:
        return [f"nothing is claimed: {statistics.too_few(prompts)}"]
    return notes(best_heuristics(cells_of(rows)))


def notes(heuristics: Mapping[float, str]) -> list[str]:
    """What the marks mean, and which line is the best heuristic of each budget."""
    said = [
        f"claim: no worse = the 95% interval of the paired difference in accuracy to the full cache ends at -{100 * MARGIN:g} points or "
        f"above; worse, better (than the full cache), ahead, behind (of the best heuristic) = p < {LEVEL:g} after Holm's correction over "
        "the methods and budgets of a table; unclear = neither"
    ]
    named = ", ".join(f"{line} at {report.show_budget(budget)}" for budget, line in heuristics.items())
    return [*said, *([f"best heuristic over all these prompts: {named}"] if named else [])]
