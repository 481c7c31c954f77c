"""A recommendation in words: the least lossy policy among those that do what is asked, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learnkv.serving.cells import Cell
from learnkv.serving.figures import Figures
from learnkv.serving.settings import Goal, PlanSettings

NEAR = 0.10  # of the best figure: within it, the policy that loses less is taken
NOTE = "note: quality is not simulated; what a policy loses on your model and prompts is what python -m learnkv.evaluate measures"


@dataclass(frozen=True)
class Advice:
    """What is recommended, "" where nothing does what is asked; a line of reasons, and one for each of the others."""

    policy: str
    lines: list[str]


def advise(cells: Sequence[Cell], settings: PlanSettings) -> Advice:
    """Of the cells of one model and rate."""
    asked = describe(settings)
    able = [cell for cell in cells if not failing(cell, settings)]
    if not able:
        failures = [f"rejected: {name_of(cell)}: {failing(cell, settings)}" for cell in cells]
        nothing = f"recommended: nothing here does what is asked ({asked}); take more memory, more cards, or a lower rate"
        return Advice("", [nothing, *failures, NOTE])
    best = min(able, key=lambda cell: cost(cell, settings.goal))
    near = [cell for cell in able if cost(cell, settings.goal) <= cost(best, settings.goal) * (1 + NEAR)]
    chosen = min(near, key=lambda cell: (cell.loss, cost(cell, settings.goal)))
    others = [f"rejected: {name_of(cell)}: {why_not(cell, chosen, settings)}" for cell in cells if cell is not chosen]
    return Advice(chosen.policy, [f"recommended: {name_of(chosen)} ({asked}): {why(chosen, best, settings)}", *others, NOTE])


def describe(settings: PlanSettings) -> str:
    parts: list[str] = [settings.goal]
    if settings.ttft_s is not None:
        parts.append(f"95% of first tokens within {settings.ttft_s:g} s")
    if settings.tpot_s is not None:
        parts.append(f"95% of answers within {settings.tpot_s * 1000:g} ms a token")
    return ", ".join(parts)


def name_of(cell: Cell) -> str:
    if cell.policy != "evict":
        return cell.policy
    return f"evict to {100 * cell.budget:g}%" if cell.budget < 1 else f"evict to {cell.budget:g} tokens"


def failing(cell: Cell, settings: PlanSettings) -> str:
    """Why a cell cannot be taken at all; "" where it can."""
    if cell.impossible or cell.figures is None:
        return cell.impossible
    found = cell.figures
    if found.refused:
        return f"{found.refused} of {found.refused + found.served} requests do not fit the pool"
    if settings.ttft_s is not None and found.ttft_p95 > settings.ttft_s:
        return f"95% of first tokens come within {found.ttft_p95:.2f} s only, {settings.ttft_s:g} s are asked for"
    if settings.tpot_s is not None and found.tpot_p95 > settings.tpot_s:
        return f"95% of answers take up to {found.tpot_p95 * 1000:.1f} ms a token, {settings.tpot_s * 1000:g} ms are asked for"
    return ""


def cost(cell: Cell, goal: Goal) -> float:
    """What is to be small."""
    assert cell.figures
    costs = {
        "throughput": 1 / cell.figures.tokens_s,
        "latency": cell.figures.latency_s,
        "memory": cell.figures.peak,
        "accuracy": 1.0 + cell.loss,
    }
    return costs[goal]


def why(chosen: Cell, best: Cell, settings: PlanSettings) -> str:
    assert chosen.figures and best.figures
    told = f"it {chosen.keeps}, at {in_figures(chosen.figures, settings.goal)}"
    if chosen is best:
        return f"{told}, the best here" if settings.goal != "accuracy" else f"{told}; nothing that loses less does what is asked"
    return f"{told}; {name_of(best)} has {in_figures(best.figures, settings.goal)}, not {NEAR:.0%} better, and {best.keeps}"


def why_not(cell: Cell, chosen: Cell, settings: PlanSettings) -> str:
    if told := failing(cell, settings):
        return told
    assert cell.figures and chosen.figures
    mine, theirs = cost(cell, settings.goal), cost(chosen, settings.goal)
    figures = in_figures(cell.figures, settings.goal)
    if cell.loss > chosen.loss and mine <= theirs * (1 + NEAR):
        return f"{figures}: {chosen.policy} is as good within {NEAR:.0%} and loses less, for this one {cell.keeps}"
    if settings.goal == "accuracy":
        return f"{figures}, and it {cell.keeps}"
    return f"{figures}, {mine / theirs:.2f} x the cost, {'and' if cell.loss > chosen.loss else 'though'} it {cell.keeps}"


def in_figures(found: Figures, goal: Goal) -> str:
    told = {
        "throughput": f"{found.tokens_s:,.0f} tokens/s",
        "latency": f"{found.latency_s:.2f} s an answer",
        "memory": f"{found.peak / 2**30:.2f} GiB of pages",
        "accuracy": f"{found.tokens_s:,.0f} tokens/s and {found.latency_s:.2f} s an answer",
    }
    return told[goal]
