"""Say what a folder or file of learnkv's is: made by which command, of which model, sizes, shapes, and what may be done with it next.

python -m learnkv.inspect checkpoints/kvp-smollm2-135m            a gate
python -m learnkv.inspect checkpoints/runs/kvp                    a run
python -m learnkv.inspect data/traces/smollm2-135m-targets-0a1b2c3d   a folder of traces, or a shard in it
python -m learnkv.inspect data/comparisons/compare/rows.jsonl     the rows of a comparison
python -m learnkv.inspect kvp_press.py                            an exported press, whose code is not run
Nothing is unpickled.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from learnkv import config
from learnkv.contents import facts


@dataclass
class InspectCommand:
    """What `python -m learnkv.inspect` reads."""

    path: str = ""  # a folder of traces, a shard, a gate, a run, a file of comparison rows, or an exported press


def run(command: InspectCommand) -> None:
    if not command.path:
        raise ValueError("path= is missing; give a folder or file, learnkv ls says what is there")
    config.tell(table(facts(Path(command.path))))


def table(found: dict[str, str]) -> str:
    """The facts under one another; those of several lines stay in their column."""
    width = max(map(len, found)) + 2
    return "\n".join(f"{name:<{width}}" + text.replace("\n", "\n" + " " * width) for name, text in found.items())


if __name__ == "__main__":
    sys.exit(config.main(run, InspectCommand, words=("path",)))
