"""Export a gate as a press of kvpress: one file of Python with the weights inside, for an environment without learnkv.

python -m learnkv.export gate=checkpoints/kvp-smollm2-135m to=kvp_press.py
An earlier export in the file's place is replaced; anything else there only with overwrite=true.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from learnkv import config
from learnkv.checkpoint import load_gate
from learnkv.gates.base import describe_geometry
from learnkv.presses.bundle import export_press

__all__ = ["ExportCommand", "export_press"]


@dataclass
class ExportCommand:
    """What `python -m learnkv.export` reads."""

    recipe: str = ""  # a .yaml file with these keys, or none
    gate: str = ""  # folder of a gate
    to: str = ""  # the file, kvp_press.py; "" for the method's name with _press.py, in the working folder
    overwrite: bool = False  # replace a file that is no export


def run(command: ExportCommand) -> None:
    if not command.gate:
        raise ValueError("gate= is missing; give the folder of a gate, gate=checkpoints/kvp-smollm2-135m")
    gate = load_gate(command.gate)
    base = gate.base
    print(f"gate: {command.gate}, {gate.METHOD} for {base.name} ({describe_geometry(base.num_layers, base.num_kv_heads, base.head_dim)})")
    path = export_press(gate, Path(command.to or f"{gate.METHOD}_press.py"), overwrite=command.overwrite)
    print(f"press: {path}, {path.stat().st_size / 2**20:.1f} MiB; needs torch, transformers and kvpress, not learnkv")
    print(f"use: from {path.stem} import Press; with Press(compression_ratio=0.5)(model): model.model(ids, past_key_values=cache)")
    print(f"next: read the first lines of {path}, which say how budgets can be split, then pip install kvpress==0.5.5 where it shall run")


if __name__ == "__main__":
    sys.exit(config.main(run, ExportCommand))
