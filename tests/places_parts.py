"""What the tests of `learnkv ls` and `learnkv inspect` share: a folder with a gate, runs, traces and the rows of a comparison."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from pathlib import Path

from learnkv.checkpoint import save_gate
from learnkv.evaluation.rows import RowFile
from learnkv.export import export_press
from tests.comparison_parts import row
from tests.training_parts import made_folder, train

RECIPE = "# resolved from recipe=kvp\nmethod: kvp\nmodel: tiny\ntrain: {steps: %d}\n"


def furnish(root: Path) -> None:
    """Gate and shard, a run that ended, one that was stopped at 12 of 20 steps, one that has just begun, rows, an exported press."""
    traces = made_folder(root / "data" / "traces" / "tiny-targets-0a1b2c3d")
    runs = root / "checkpoints" / "runs"
    gate = train(str(traces.folder), str(runs / "ended"))
    recipe = {"method": "kvp", "record": {"question": "outside"}}
    for folder in (runs / "ended", root / "checkpoints" / "kvp-tiny"):
        save_gate(gate, folder, recipe, 95.0)
    for name, steps in (("ended", 12), ("stopped", 20), ("begun", 20)):
        (runs / name).mkdir(exist_ok=True)
        (runs / name / "recipe.yaml").write_text(RECIPE % steps)
    shutil.copy(runs / "ended" / "last.ckpt", runs / "stopped" / "last.ckpt")
    rows = RowFile(root / "data" / "comparisons" / "compare" / "rows.jsonl")
    for prompt in ("p0", "p1"):
        rows.append(row(prompt=prompt, method="snapkv", line="snapkv"))
    export_press(gate, root / "kvp_press.py")


class Trap:
    """An object that would leave a file behind if its pickle were run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


def set_trap(checkpoint: Path, sprung: Path) -> None:
    """A checkpoint as torch.save writes it, with a step and a trap in it."""
    with zipfile.ZipFile(checkpoint, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"global_step": 7, "state_dict": Trap(sprung)}, protocol=2))
