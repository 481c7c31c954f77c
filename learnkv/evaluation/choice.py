"""Settings by a development split: of all rows there, the best method per scorer and budget, or over all heuristics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from learnkv.evaluation.rows import Row

CONTROLS = ("full", "random", "oracle")
BEST = "best heuristic (chosen)"  # the line of what a development run says is best of all heuristics


def choose_best(rows: Sequence[Row], budget: float) -> dict[str, str]:
    """scorer -> the method (settings and allocator) with the highest accuracy, then the lowest NLL, at `budget`; the best scorer first.

    Methods with weights and the controls (full cache, random, oracle) are left out.  Methods must have been run on the same prompts.
    """
    figures = {method: standing(found) for method, found in candidates(rows, budget).items()}
    scorer = {row.method: row.scorer for row in rows}
    best: dict[str, str] = {}
    for method in sorted(figures, key=lambda m: (figures[m], m)):
        best.setdefault(scorer[method], method)
    return best


def candidates(rows: Sequence[Row], budget: float) -> dict[str, list[Row]]:
    """The rows of every heuristic at a budget; refuses held-out rows, an empty choice and methods that saw different prompts."""
    if any(row.split == "heldout" for row in rows):
        raise ValueError("the rows to choose by are of the heldout split, which must choose nothing; run evaluate.split=dev for them")
    by_method: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.budget == budget and not row.gate and row.scorer not in CONTROLS:
            by_method[row.method].append(row)
    if not by_method:
        there = ", ".join(f"{b:g}" for b in sorted({row.budget for row in rows}))
        raise ValueError(f"no heuristic was run at budget {budget:g} on the development split (budgets there: {there}); run it there first")
    asked = {method: {(row.prompt, row.question) for row in found} for method, found in by_method.items()}
    first = next(iter(asked))
    for method, prompts in asked.items():
        if prompts != asked[first]:
            raise ValueError(
                f"at budget {budget:g} {method} was run on {len(prompts)} questions and {first} on {len(asked[first])}, or on others; "
                "finish the development run first"
            )
    return by_method


def standing(rows: Sequence[Row]) -> tuple[float, float]:
    """Sorts better methods first: (-accuracy, NLL)."""
    return -float(np.mean([row.accuracy for row in rows])), float(np.mean([row.nll for row in rows]))
