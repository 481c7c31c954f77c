"""Measure speed and memory: every figure beside what it is compared with, in one run.

python -m learnkv.bench runtime        decoding, bytes held, selection, chunked prefill, batches
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Literal

import torch

from learnkv import config
from learnkv.evaluation import report, speed
from learnkv.evaluation.speed import BenchSettings
from learnkv.models import DTYPES, load_model


@dataclass
class BenchCommand:
    """What `python -m learnkv.bench` reads."""

    recipe: str = ""  # a .yaml file with a bench section
    part: Literal["runtime"] = "runtime"  # what is measured; `bench runtime` is short for part=runtime
    model: str = "smollm2-135m"  # bundled name, hub id or folder
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the model
    bench: BenchSettings = field(default_factory=BenchSettings)


def run(command: BenchCommand) -> None:
    model, _ = load_model(command.model, DTYPES[command.dtype])
    print(f"model: {command.model}, {command.dtype}, {model.device}, {torch.get_num_threads()} threads", flush=True)
    figures = []
    for figure in speed.runtime(model, command.bench):
        figures.append(figure)
        print(f"measured: {figure.what}: {figure.value}", file=sys.stderr, flush=True)
    print(report.markdown([["what", "measured", "bound"], *([f.what, f.value, f.bound] for f in figures)]))
    print("next: python -m learnkv.evaluate recipe=compare")


def arguments(argv: list[str]) -> list[str]:
    """`runtime` first is part=runtime."""
    return [f"part={argv[0]}", *argv[1:]] if argv and "=" not in argv[0] and not argv[0].startswith("-") else argv


if __name__ == "__main__":
    sys.exit(config.main(run, BenchCommand, arguments(sys.argv[1:])))
