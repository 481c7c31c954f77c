"""Say what this machine has, to be pasted into a bug report: versions, processor, memory, disk, GPU, and whether what was fetched is whole.

python -m learnkv.doctor
python -m learnkv.doctor json=true
Nothing is fetched.  It takes a while: every file of a fetched model is read, and Triton compiles a kernel.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from learnkv import config, machine
from learnkv.places import COMPARISONS_FOLDER, RUNS_FOLDER, TRACES_FOLDER


@dataclass
class DoctorCommand:
    """What `python -m learnkv.doctor` reads."""

    json: bool = False  # as JSON, for programs


def run(command: DoctorCommand) -> None:
    found = machine.facts([TRACES_FOLDER, RUNS_FOLDER, COMPARISONS_FOLDER])
    config.tell(json.dumps(found, indent=2) if command.json else report(found))


def report(found: dict[str, dict[str, str]]) -> str:
    """A block per section."""
    return "\n".join(f"{section}:\n{block(facts)}" for section, facts in found.items() if facts)


def block(facts: dict[str, str]) -> str:
    width = max(map(len, facts))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in facts.items())


if __name__ == "__main__":
    sys.exit(config.main(run, DoctorCommand))
