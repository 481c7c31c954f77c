"""Measure speed and memory: every figure beside what it is compared with, in one run.

python -m learnkv.bench runtime        decoding, bytes held, selection, chunked prefill, batches
python -m learnkv.bench overhead       what each of bench.methods adds to a plain prefill of 2,048 tokens
python -m learnkv.bench kernels        every op beside its floor and what else computes it; dry=true foretells it without a GPU
python -m learnkv.bench record         recording traces beside a plain forward
python -m learnkv.bench train          training all heads at once beside one agent after another, or beside a plain forward
python -m learnkv.bench stream         perplexity of 32,768 tokens in a cache of 1,024, on a model of 8,192 positions
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from learnkv import config, ops
from learnkv.evaluation import kernel_speed, pipeline_speed, report, roofline, speed
from learnkv.evaluation.overhead import overhead, refuse_untimed
from learnkv.evaluation.pipeline_speed import PipelineSettings
from learnkv.evaluation.speed import BenchSettings, Figure
from learnkv.evaluation.stream import StreamSettings, perplexities
from learnkv.gates import GATES
from learnkv.models import DTYPES, PreTrainedModel, PreTrainedTokenizerBase, load_model
from learnkv.names import unknown
from learnkv.training import TrainSettings


@dataclass
class BenchCommand:
    """What `python -m learnkv.bench` reads."""

    recipe: str = ""  # a shipped recipe or .yaml file; of kvp.yaml and its kin part=train takes gate and train
    part: Literal["runtime", "overhead", "stream", "kernels", "record", "train"] = (
        "runtime"  # what is measured; `bench stream` is short for part=stream
    )
    model: str = "smollm2-135m"  # bundled name, hub id or folder
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the model, and of the ops' keys and values
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where it runs; auto takes a GPU where there is one
    budget_s: float = 240.0  # of part=kernels: seconds; what does not fit is said and left out
    dry: bool = False  # of part=kernels: compile every kernel for `arch`, list the plan with predicted times, run nothing
    arch: str = "90"  # of dry=true: 80, 89, 90, 100 or gfx942
    out: str = "benchmarks/runs/kernels"  # of part=kernels: .json with every figure, .png with the roofline
    method: str = "kvp"  # of part=train: which gate
    gate: dict[str, Any] = field(default_factory=dict)  # of part=train: its knobs
    train: TrainSettings = field(default_factory=TrainSettings)  # of part=train
    bench: BenchSettings = field(default_factory=BenchSettings)  # of part=runtime and part=overhead
    stream: StreamSettings = field(default_factory=StreamSettings)  # of part=stream
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)  # of part=record and part=train

    def __post_init__(self) -> None:
        if self.budget_s <= 0:
            raise ValueError(f"budget_s={self.budget_s} are seconds; give more than 0")
        archs = [str(arch) for arch in ops.ARCHS]
        if self.arch not in archs:
            raise unknown("arch", self.arch, archs)
        if self.method not in GATES:
            raise unknown("method", self.method, GATES)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda, and torch sees no CUDA device; take device=cpu, or dry=true to compile and foretell without one")
        if self.dry and self.part != "kernels":
            raise ValueError(f"dry=true foretells part=kernels, not part={self.part}")


def run(command: BenchCommand) -> None:
    if command.part == "kernels":
        kernels(command)
        return
    gate_config: object = config.build(GATES[command.method].Config, command.gate, "gate")  # a mistake should not wait for the model
    if command.part == "overhead":
        refuse_untimed(command.bench.methods)
    device = device_of(command)
    model, tokenizer = load_model(command.model, DTYPES[command.dtype])
    model.to(device)  # type: ignore[arg-type]
    print(f"model: {command.model}, {command.dtype}, {device}, {torch.get_num_threads()} threads", flush=True)
    parts = {
        "runtime": lambda: speed.runtime(model, command.bench),
        "overhead": lambda: overhead(model, tokenizer, command.bench),
        "stream": lambda: streamed(model, tokenizer, command.stream),
        "record": lambda: pipeline_speed.recording(model, tokenizer, command.pipeline),
        "train": lambda: pipeline_speed.training(model, tokenizer, command.method, gate_config, command.train, command.pipeline),
    }
    measured = []
    for figure in parts[command.part]():
        measured.append(figure)
        print(f"measured: {figure.what}: {figure.value}", file=sys.stderr, flush=True)
    print(report.markdown([["what", "measured", "bound"], *([f.what, f.value, f.bound] for f in measured)]))
    print("next: python -m learnkv.evaluate recipe=compare")


def device_of(command: BenchCommand) -> torch.device:
    return torch.device(command.device if command.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def streamed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: StreamSettings) -> Iterator[Figure]:
    """The perplexities, with a bar over the chunks of each contender."""
    return perplexities(model, tokenizer, settings, lambda chunks: tqdm(chunks, desc="stream", unit="chunk"))


def kernels(command: BenchCommand) -> None:
    """Measures every op, or compiles all and foretells."""
    if command.dry:
        foretell(command)
        return
    device, dtype, out = device_of(command), DTYPES[command.dtype], Path(command.out)
    print(f"ops: {command.dtype}, {device}, {torch.get_num_threads()} threads, {command.budget_s:.0f} s at most", flush=True)
    found = kernel_speed.measured(device, dtype, command.budget_s, lambda cases: tqdm(cases, desc="ops", unit="op"))
    roof = found.ceilings
    print(f"ceilings: {roof.bytes / 1e9:.1f} GB/s copied, {roof.flops / 1e9:.0f} GFLOP/s, {roof.exps / 1e9:.2f} G exp/s")
    print(report.markdown(roofline.cells(found.lines)))
    for line in found.lines:
        for baseline, why in line.failed.items():
            print(f"not beside {line.op}, {line.at}: {baseline}, which failed here: {why}")
    for name in found.left_out:
        print(f"not measured, the time was used up: {name}")
    if found.whole:
        print(report.markdown([["a model of random weights", "measured"], *([f.what, f.value] for f in found.whole)]))
    kernel_speed.write(found, out)
    print(f"result: {out.with_suffix('.json')}, {out.with_suffix('.png')}")
    print("next: python -m learnkv.bench runtime")


def foretell(command: BenchCommand) -> None:
    """Every kernel compiled for one architecture, and the plan of the CUDA run with the times that are foretold."""
    arch = next(known for known in ops.ARCHS if str(known) == command.arch)
    builds = dict(tqdm(ops.builds(arch), desc="compiling", unit=" kernels"))
    print(report.markdown(kernel_speed.compiled(builds)))
    print(report.markdown(kernel_speed.planned()))
    bad = [name for name, build in builds.items() if build.spill_bytes or build.shared_bytes > build.shared_limit]
    print(f"compiled: {len(builds)} kernels for {command.arch}; that spill or take too much shared memory: {', '.join(bad) or 'none'}")
    print(f"next: python -m learnkv.bench kernels device=cuda dtype=bfloat16 budget_s=400 out={command.out}")


if __name__ == "__main__":
    sys.exit(config.main(run, BenchCommand, words=("part",)))
