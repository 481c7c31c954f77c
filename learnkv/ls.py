"""List what is there, a line each: recipes, methods, tasks, gates, runs and traces.

python -m learnkv.ls                 all of it
python -m learnkv.ls recipes         shipped recipes, with what they say of themselves
python -m learnkv.ls methods         every method with its paper, and whether it is trained
python -m learnkv.ls tasks           every task with its benchmark's paper, its metric and the tokens that it generates
python -m learnkv.ls checkpoints     gates: method, base model, size, held-out reward where a run recorded it (the oracle's is -1)
python -m learnkv.ls runs            steps done of all, and whether a run can be resumed
python -m learnkv.ls traces          prompts and bytes
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from learnkv import config, inventory, sources
from learnkv.inventory import Cells
from learnkv.places import GATES_FOLDER, RUNS_FOLDER, TRACES_FOLDER
from learnkv.tasks import registry


@dataclass
class LsCommand:
    """What `python -m learnkv.ls` reads."""

    what: Literal["all", "recipes", "methods", "tasks", "checkpoints", "runs", "traces"] = "all"
    checkpoints: str = GATES_FOLDER  # folder of gates
    runs: str = RUNS_FOLDER  # folder of runs
    traces: str = TRACES_FOLDER  # folder of folders of traces


def run(command: LsCommand) -> None:
    folders = {name: Path(getattr(command, name)) for name in ("checkpoints", "runs", "traces")}
    kinds: dict[str, Callable[[], Sequence[Cells]]] = {
        "recipes": inventory.recipes,
        "methods": methods,
        "tasks": registry.table,
        "checkpoints": lambda: inventory.gates(folders["checkpoints"], folders["runs"]),
        "runs": lambda: inventory.runs(folders["runs"]),
        "traces": lambda: inventory.traces(folders["traces"]),
    }
    chosen = kinds if command.what == "all" else {command.what: kinds[command.what]}
    blocks = {name: lines(rows()) or [f"none in {folders[name]}"] for name, rows in chosen.items()}
    if command.what == "all":
        blocks = {name: [f"{name}:", *(f"  {line}" for line in block)] for name, block in blocks.items()}
    config.tell("\n\n".join("\n".join(block) for block in blocks.values()))


def methods() -> list[Cells]:
    return [(one.name, f"arXiv:{one.paper}" if one.paper else "", "trained" if one.trained else "no weights") for one in sources.methods()]


def lines(rows: Sequence[Cells]) -> list[str]:
    """Cells under one another."""
    widths = [max(len(row[i]) for row in rows if i < len(row) - 1) for i in range(max(map(len, rows), default=1) - 1)]
    return ["  ".join([*(f"{cell:<{width}}" for cell, width in zip(row[:-1], widths, strict=False)), row[-1]]).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(config.main(run, LsCommand, words=("what",)))
