"""A comparison in TensorBoard: a run per line whose curves are over tokens kept, figures as images, tables as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from learnkv.evaluation import report
from learnkv.evaluation.document import Grid, Section
from learnkv.evaluation.report import Summary
from learnkv.evaluation.view import View

OLD = "**/events.out.tfevents.*"


def write(folder: Path, view: View, sections: Sequence[Section], images: Sequence[Path]) -> None:
    """Takes the place of what an earlier report left in the folder."""
    for events in folder.glob(OLD):
        events.unlink()
    for line in dict.fromkeys(s.line for s in view.summaries):
        write_line(folder / run_name(line), line, view.topics)
    write_whole(folder / "report", sections, images)


def run_name(line: str) -> str:
    """The line as a folder's name."""
    return re.sub(r"[^\w.+=()-]+", "_", line)


def write_line(folder: Path, line: str, topics: Mapping[str, Sequence[Summary]]) -> None:
    """Its figures at each budget; the step is the tokens kept."""
    from torch.utils.tensorboard import SummaryWriter  # half a second to import, for this alone

    with SummaryWriter(str(folder)) as writer:
        for topic, summaries in topics.items():
            for s in sorted((s for s in summaries if s.line == line), key=lambda s: s.kept_mean):
                figures = {"accuracy": s.accuracy.value, "nll": s.nll.value, "bytes_held": s.bytes_held, "extra_seconds": s.extra_seconds}
                for name, value in figures.items():
                    writer.add_scalar(f"{name}/{topic}", value, round(s.kept_mean))


def write_whole(folder: Path, sections: Sequence[Section], images: Sequence[Path]) -> None:
    from matplotlib.image import imread
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for path in images:
            writer.add_image(path.stem, np.asarray(imread(path))[..., :3], dataformats="HWC")
        for block in (block for section in sections for block in section.blocks):
            if isinstance(block, Grid) and any(block.cells[0]):
                writer.add_text(block.title, report.markdown(block.cells))
