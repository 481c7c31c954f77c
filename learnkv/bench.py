"""Measure speed and memory: every figure beside what it is compared with, in one run.

python -m learnkv.bench runtime        decoding, bytes held, selection, chunked prefill, batches
python -m learnkv.bench stream         perplexity of 32,768 tokens in a cache of 1,024, on a model of 8,192 positions
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from tqdm import tqdm

from learnkv import config
from learnkv.evaluation import report, speed
from learnkv.evaluation.speed import BenchSettings, Figure
from learnkv.evaluation.stream import StreamSettings, perplexities
from learnkv.models import DTYPES, PreTrainedModel, PreTrainedTokenizerBase, load_model


@dataclass
class BenchCommand:
    """What `python -m learnkv.bench` reads."""

    recipe: str = ""  # a .yaml file with a bench section
    part: Literal["runtime", "stream"] = "runtime"  # what is measured; `bench stream` is short for part=stream
    model: str = "smollm2-135m"  # bundled name, hub id or folder
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the model
    bench: BenchSettings = field(default_factory=BenchSettings)  # of part=runtime
    stream: StreamSettings = field(default_factory=StreamSettings)  # of part=stream


def run(command: BenchCommand) -> None:
    model, tokenizer = load_model(command.model, DTYPES[command.dtype])
    print(f"model: {command.model}, {command.dtype}, {model.device}, {torch.get_num_threads()} threads", flush=True)
    measured = []
    for figure in speed.runtime(model, command.bench) if command.part == "runtime" else streamed(model, tokenizer, command.stream):
        measured.append(figure)
        print(f"measured: {figure.what}: {figure.value}", file=sys.stderr, flush=True)
    print(report.markdown([["what", "measured", "bound"], *([f.what, f.value, f.bound] for f in measured)]))
    print("next: python -m learnkv.evaluate recipe=compare")


def streamed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: StreamSettings) -> Iterator[Figure]:
    """The perplexities, with a bar over the chunks of each contender."""
    return perplexities(model, tokenizer, settings, lambda chunks: tqdm(chunks, desc="stream", unit="chunk"))


def arguments(argv: list[str]) -> list[str]:
    """`runtime` or `stream` first is part=..."""
    return [f"part={argv[0]}", *argv[1:]] if argv and "=" not in argv[0] and not argv[0].startswith("-") else argv


if __name__ == "__main__":
    sys.exit(config.main(run, BenchCommand, arguments(sys.argv[1:])))
