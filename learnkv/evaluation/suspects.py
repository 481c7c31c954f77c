"""Suspects: what in a comparison's rows looks like a mistake rather than a result, said in one line each."""

from __future__ import annotations

from collections.abc import Sequence

from learnkv.evaluation import report, statistics
from learnkv.evaluation.claims import LEVEL, Cell, cells_of, is_control
from learnkv.evaluation.rows import Row

RANDOM = "random"


def suspects(rows: Sequence[Row]) -> list[str]:
    """Lines that evict nothing, hold more than their budget, or lie below random."""
    cells = {cell: own for cell, own in cells_of(rows).items() if own[0].scorer != "full"}
    return [*never_evicting(cells), *over_budget(cells), *below_random(cells)]


def never_evicting(cells: dict[Cell, list[Row]]) -> list[str]:
    idle = [cell for cell, own in cells.items() if all(row.kept_mean >= row.num_tokens for row in own)]
    return [f"{where(idle)}: every token was kept, so nothing was evicted: its figures are the full cache's"] if idle else []


def over_budget(cells: dict[Cell, list[Row]]) -> list[str]:
    """Lines that hold more than was asked, those that hold everything aside."""
    held = {cell: own for cell, own in cells.items() if any(row.kept_mean < row.num_tokens for row in own)}
    more = [cell for cell, own in held.items() if sum(map(excess, own)) / len(own) > 1]
    return [f"{where(more)}: more tokens were kept than the budget holds (pins, or a budget that is not respected)"] if more else []


def excess(row: Row) -> float:
    """Tokens per head beyond what the budget and the protected ones explain."""
    return row.kept_mean - min(row.num_tokens, row.free + row.num_sinks + row.num_recent)


def below_random(cells: dict[Cell, list[Row]]) -> list[str]:
    """Lines whose accuracy is significantly below random's, or their NLL above it, corrected over all of them."""
    budgets = {budget for line, budget in cells if line == RANDOM}
    rivals = [cell for cell, own in cells.items() if cell[1] in budgets and not is_control(own)]
    prompts = list(dict.fromkeys(row.prompt for own in cells.values() for row in own))
    if len(prompts) < statistics.FEWEST or not rivals:
        return []
    tests = [
        (cell, figure, *worse(cells[cell], cells[RANDOM, cell[1]], prompts, figure)) for cell in rivals for figure in ("accuracy", "nll")
    ]
    sure = statistics.holm([p for *_, p in tests])
    below = dict.fromkeys(cell for (cell, _, gap, _), p in zip(tests, sure, strict=True) if p < LEVEL and gap < 0)
    return (
        [f"{where(list(below))}: below random: scores may be reversed (p < {LEVEL:g} in accuracy or NLL, Holm over all)"] if below else []
    )


def worse(rows: Sequence[Row], others: Sequence[Row], prompts: Sequence[str], figure: str) -> tuple[float, float]:
    """What the rows gain on the others (below 0: they are worse), and the p-value that there is no difference."""
    sign = 1 if figure == "accuracy" else -1
    found = statistics.tested(*(sign * report.by_prompt(side, prompts, figure) for side in (rows, others)))
    return found.gain.value, found.p


def where(cells: Sequence[Cell]) -> str:
    """snapkv at 10%, 5%; h2o at 5%"""
    lines = dict.fromkeys(line for line, _ in cells)
    return "; ".join(f"{line} at {', '.join(report.show_budget(b) for name, b in cells if name == line)}" for line in lines)
