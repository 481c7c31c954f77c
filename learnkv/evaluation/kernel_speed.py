"""`bench kernels`: right first, then how fast, every op beside its floor, then a whole model; and `dry`, which foretells without a GPU."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from learnkv.evaluation.op_cases import cases
from learnkv.evaluation.roofline import H200, Case, Ceilings, Line, ceilings_of, draw, measure, relative_error, span
from learnkv.evaluation.speed import Figure
from learnkv.evaluation.whole_model import GPU, LAPTOP, whole_model
from learnkv.files import write_atomically

if TYPE_CHECKING:
    from learnkv.ops import Build

ERROR = {torch.float32: 2e-3, torch.bfloat16: 2e-2}  # of a GPU, whose float32 products are tf32
GATHERED = ("torch", "triton", "numpy")


@dataclass(frozen=True)
class Measured:
    """A run: the machine, its ceilings, the lines, the names of what time left out, and the figures of a whole model."""

    machine: dict[str, str]
    ceilings: Ceilings
    lines: list[Line]
    left_out: list[str]
    whole: list[Figure]


WHOLE_S = {"cuda": 90.0, "cpu": 15.0}  # seconds that the whole model is given
Progress = Callable[[Sequence[Case]], Iterable[Case]]


def measured(device: torch.device, dtype: torch.dtype, budget_s: float, progress: Progress) -> Measured:
    """All cases: every op checked at a small size, then timed at the sizes of the device, then a whole model, while the budget lasts."""
    begin = time.perf_counter()
    if device.type == "cuda":
        prime(dtype)
    refuse_wrong(device, dtype)
    found = list(cases("gpu" if device.type == "cuda" else "laptop"))
    ceilings, lines, left_out = ceilings_of(device, dtype), [], []
    for case in progress(found):
        if time.perf_counter() - begin < budget_s - WHOLE_S[device.type]:
            torch.manual_seed(0)
            lines.append(measure(case, device, dtype, ceilings))
        else:
            left_out.append(case.name)
    if time.perf_counter() - begin + WHOLE_S[device.type] > budget_s:
        return Measured(machine(device, dtype), ceilings, lines, [*left_out, "a whole model"], [])
    whole = list(whole_model(device, dtype, GPU if device.type == "cuda" else LAPTOP))
    return Measured(machine(device, dtype), ceilings, lines, left_out, whole)


def prime(dtype: torch.dtype) -> None:
    """Compiles what `refuse_wrong` runs, in several processes: they leave it in Triton's cache on disk."""
    found = len(list(cases("tiny")))
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), get_context("spawn")) as pool:
        list(pool.map(prime_one, range(found), repeat(dtype)))


def prime_one(index: int, dtype: torch.dtype) -> None:
    next(islice(cases("tiny"), index, None)).prepare(torch.device("cuda"), dtype).run()


def refuse_wrong(device: torch.device, dtype: torch.dtype) -> None:
    """Raises a RuntimeError where an op differs from plain torch in float32 at a small odd size, or from itself when run again."""
    for case in cases("tiny"):
        ready = case.prepare(device, dtype)
        got = ready.run().clone()
        error = relative_error(got, ready.want())
        if not error <= ERROR[dtype]:
            raise RuntimeError(f"{case.name}: error {error:.1e} in {dtype}, more than {ERROR[dtype]:.0e}; nothing was timed")
        if not torch.equal(got.nan_to_num(), ready.run().nan_to_num()) and case.op != "compact":
            raise RuntimeError(f"{case.name}: two runs over the same tensors differ; nothing was timed")


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What a reader of the figures asks about the machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {"device": name, "dtype": str(dtype).removeprefix("torch."), "python": platform.python_version(), **versions()}


def versions() -> dict[str, str]:
    found = {}
    for package in GATHERED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def write(result: Measured, out: Path) -> None:
    """`out`.json and `out`.png."""
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**asdict(result), "lines": [asdict(line) for line in result.lines]}, indent=1)
    write_atomically(out.with_suffix(".json"), lambda to: to.write_text(text))
    write_atomically(out.with_suffix(".png"), lambda to: draw(result.lines, result.ceilings, to))


def compiled(builds: Mapping[str, Build]) -> list[list[str]]:
    """What the compiler made of every kernel."""
    head = ["kernel", "registers", "spilled bytes", "shared KiB", "matrix instructions", "16-byte loads"]
    return [head, *([name, *map(str, figures(build))] for name, build in builds.items())]


def figures(build: Build) -> list[object]:
    matrix = " ".join(f"{count} {name}" for name, count in build.matrix.items())
    return [build.registers, build.spill_bytes, build.shared_bytes // 1024, matrix, build.wide_loads]


def planned() -> list[list[str]]:
    """Every case of the CUDA run with its floor and the time that is foretold, by an H200's ceilings; nothing is run."""
    rows = []
    for case in cases("gpu"):
        work = case.work(torch.bfloat16)
        floor = H200.floor(work)
        rows.append([case.name, H200.bound(work), span(floor), span(floor * case.slack)])
    return [["case", "bound", "floor", "predicted"], *rows]
