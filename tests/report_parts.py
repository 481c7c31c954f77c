"""What the tests of reports share: rows of a small comparison, of needles and of tasks with answers, and a folder that holds them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from learnkv.evaluation.example import Example, Kept
from learnkv.evaluation.rows import Row, line_of
from learnkv.places import ROWS
from learnkv.prompts import Prompt, Question
from tests.comparison_parts import full_row, row

GATE = "kvp+adaptive:checkpoints/runs/kvp-seed*"
LINES = {"random": (0.0, "random"), "snapkv": (0.6, "snapkv"), "h2o": (0.3, "h2o"), GATE: (0.9, "kvp")}


def compared(prompts: int = 12, kinds: tuple[str, ...] = ("codes", "people"), budgets: tuple[float, ...] = (0.1, 0.5)) -> list[Row]:
    """The full cache and four lines: the gate is right nine times of ten, random never."""
    rows = []
    for i in range(prompts):
        shared = {"prompt": f"p{i}", "kind": kinds[i % len(kinds)]}
        rows.append(full_row(**shared, nll=0.1, bytes_held=10_000))
        rows += [line_row(line, budget, i, **shared) for line in LINES for budget in budgets]
    return rows


def line_row(line: str, budget: float, i: int, **shared) -> Row:
    right, scorer = LINES[line]
    gate = {"run": "checkpoints/runs/kvp-seed0", "gate": "f" * 16, "allocator": "adaptive"} if scorer == "kvp" else {}
    accuracy = float((7 * i + 3) % 10 < 10 * right)
    figures = {"kept_mean": 100 * budget, "kept_max": int(120 * budget), "bytes_held": int(10_000 * budget), "accuracy": accuracy}
    return row(line=line, method=line.partition(":")[0], scorer=scorer, budget=budget, nll=3 - 2 * accuracy, **figures, **gate, **shared)


def needles() -> list[Row]:
    """Two lengths, three depths, two prompts of each, with generated answers."""
    rows = []
    for i in range(12):
        prompt, tokens = asked(i), (500, 1000)[i % 2]
        shared = {"prompt": prompt.id, "kind": prompt.kind, "task": "needle", "num_tokens": tokens}
        rows.append(full_row(**shared, kept_mean=float(tokens), prediction=f" {1000 + i}."))
        found = float(i % 4 < 2)
        rows.append(row(**shared, kept_mean=tokens / 10, accuracy=found, prediction=f" {1000 + i}." if found else f" {i}, I think."))
        rows.append(row(**shared, line="random", method="random", scorer="random", kept_mean=tokens / 10, accuracy=0.0, prediction=" No."))
    return rows


def asked(i: int) -> Prompt:
    question = Question("Which <number>?", "It is", f" {1000 + i}", references=(f"{1000 + i}",))
    return Prompt(f"needle_{50 * (i % 3):03d}", "heldout", f"Text number {i}.", (question,), task="needle")


def laid(folder: Path, rows: Iterable[Row]) -> Path:
    """A folder with a file of the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ROWS).write_text("".join(line_of(each) + "\n" for each in rows))
    return folder


def example() -> Example:
    """Five tokens that two lines kept differently; the third and fourth hold the answer."""
    kept = [
        Kept("snapkv", [[0.4, 0.4], [0.4, 0.4], [0.4, 0.4]], [1.0, 0.5, 0.0, 0.25, 0.25]),
        Kept(GATE, [[0.2, 0.6], [0.4, 0.4], [0.1, 0.7]], [1.0, 0.0, 0.75, 0.25, 0.0]),
    ]
    tokens = ["The", " code", " is", " <7>", ".\n"]
    return Example("p0", "codes", "What is the code?", "7", tokens, [2, 4], "tiny", "0" * 16, False, 0.1, 4, 16, kept)
