"""Time of an op beside its floor: the most that this machine moves, multiplies and exponentiates, measured in the same run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Work:
    """What an op cannot do without: bytes read and written once, operations of matrix products, exponentials."""

    bytes: int
    flops: int = 0
    exps: int = 0


@dataclass(frozen=True)
class Ceilings:
    """Most bytes, operations and exponentials a second."""

    bytes: float
    flops: float
    exps: float

    def floor(self, work: Work) -> float:
        """Seconds that the work takes at least."""
        return max(work.bytes / self.bytes, work.flops / self.flops, work.exps / self.exps)

    def bound(self, work: Work) -> str:
        """Which of the three it hangs on."""
        parts = {"memory": work.bytes / self.bytes, "matrix": work.flops / self.flops, "exp": work.exps / self.exps}
        return max(parts, key=lambda name: parts[name])


H200 = Ceilings(4.3e12, 790e12, 4.18e12)  # of one card, bfloat16: copy and matrix rate as measured there, 16 exponentials a clock and SM


@dataclass(frozen=True)
class Prepared:
    """An op with its inputs at hand.

    run        the op, as the device's tensors are served
    want       the same in float32, by plain torch
    baselines  what else computes it, by name
    """

    run: Callable[[], Tensor]
    want: Callable[[], Tensor]
    baselines: Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """One op at one size.

    work   what it cannot do without, in a type of keys and values
    slack  predicted time over the floor on a GPU, said before it was measured
    """

    op: str
    at: str
    prepare: Callable[[torch.device, torch.dtype], Prepared]
    work: Callable[[torch.dtype], Work]
    slack: float

    @property
    def name(self) -> str:
        return f"{self.op}, {self.at}"


@dataclass(frozen=True)
class Line:
    """What was measured of a case; seconds are medians.

    baseline   the fastest of what else computes it, "" where nothing does
    error      relative to float32, in the norm
    predicted  seconds, by the ceilings of this run and the case's slack
    spread     quartiles of the seconds
    failed     baselines that could not run here, and why
    """

    op: str
    at: str
    seconds: float
    baseline: str
    baseline_seconds: float
    floor: float
    bound: str
    bytes: int
    flops: int
    error: float
    predicted: float
    spread: tuple[float, float]
    failed: dict[str, str]


def measure(case: Case, device: torch.device, dtype: torch.dtype, ceilings: Ceilings) -> Line:
    """One case: error first, then time, ours and the baselines' in turns."""
    ready, work = case.prepare(device, dtype), case.work(dtype)
    error = relative_error(ready.run(), ready.want())
    failed = {name: why for name, run in ready.baselines.items() if (why := complaint(run))}
    times = timed({"": ready.run, **{name: run for name, run in ready.baselines.items() if name not in failed}}, device)
    mine, others = times.pop(""), {name: statistics.median(found) for name, found in times.items()}
    best = min(others, key=lambda name: others[name]) if others else ""
    quartiles = statistics.quantiles(mine, n=4)
    return Line(
        op=case.op,
        at=case.at,
        seconds=statistics.median(mine),
        baseline=best,
        baseline_seconds=others.get(best, math.nan),
        floor=ceilings.floor(work),
        bound=ceilings.bound(work),
        bytes=work.bytes,
        flops=work.flops,
        error=error,
        predicted=ceilings.floor(work) * case.slack,
        spread=(quartiles[0], quartiles[-1]),
        failed=failed,
    )


def complaint(run: Callable[[], object]) -> str:
    """What keeps a baseline, which is not ours, from running on this machine; "" where nothing does."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return ""


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64; of masks the share that differs."""
    if got.dtype == torch.bool:
        return float((got != want).double().mean())
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=torch.finfo(torch.float32).tiny))


SECONDS_A_CASE = 1.5  # for the op and its baselines together


def timed(runs: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, list[float]]:
    """Seconds of each contender, in turns after one to warm up: five turns at least, then until the time is used up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    clock = cuda_clock if device.type == "cuda" else cpu_clock
    for run in runs.values():
        run()
    begin = time.perf_counter()
    while len(next(iter(seconds.values()))) < 5 or time.perf_counter() - begin < SECONDS_A_CASE:
        for name, run in runs.items():
            seconds[name].append(clock(run))
    return seconds


def cpu_clock(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def cuda_clock(run: Callable[[], object]) -> float:
    """One run between two events, behind a write that fills the L2 cache with other data and hides the launches."""
    torch.empty(1 << 28, dtype=torch.int8, device="cuda").zero_()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def ceilings_of(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The most that this device does: a copy, a matrix product, exponentials of what fits its cache; the fastest turn counts."""
    large, side, small = (1 << 31, 8192, 1 << 24) if device.type == "cuda" else (1 << 28, 1024, 1 << 17)
    source, target = torch.zeros(2, large, dtype=torch.int8, device=device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    logits = torch.zeros(small, device=device)
    runs = {"copy": lambda: target.copy_(source), "product": lambda: left @ right, "exp": lambda: torch.exp(logits)}
    fastest = {name: min(found) for name, found in timed(runs, device).items()}
    return Ceilings(2 * large / fastest["copy"], 2 * side**3 / fastest["product"], small / fastest["exp"])


def cells(lines: list[Line]) -> list[list[str]]:
    """The table: a head and one row per line."""
    head = ["op", "at", "time", "beside", "ratio", "of the floor", "bound", "bytes", "error", "predicted"]
    return [head, *(row(line) for line in lines)]


def row(line: Line) -> list[str]:
    beside = line.baseline or "nothing else at hand"
    ratio = f"{line.seconds / line.baseline_seconds:.2f} x" if line.baseline else ""
    times = f"{line.seconds / line.floor:.1f} x"
    moved = f"{line.bytes / 2**20:.1f} MiB"
    return [line.op, line.at, span(line.seconds), beside, ratio, times, line.bound, moved, f"{line.error:.0e}", span(line.predicted)]


def span(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def draw(lines: list[Line], ceilings: Ceilings, path: Path) -> None:
    """Roofline: operations a second over operations a byte, every op a point under the roof that this run measured."""
    from matplotlib.figure import Figure  # a second to import, for pictures only

    figure = Figure(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    shown = [line for line in lines if line.flops]
    places = [line.flops / line.bytes for line in shown] or [1.0]
    x = torch.logspace(math.log10(min(places)) - 0.5, math.log10(max(*places, ceilings.flops / ceilings.bytes)) + 0.5, 100)
    axis.loglog(x, torch.minimum(x * ceilings.bytes, torch.tensor(ceilings.flops)), color="black", label="roof: copy and matrix rate")
    for op in dict.fromkeys(line.op for line in shown):
        mine = [line for line in shown if line.op == op]
        axis.loglog([line.flops / line.bytes for line in mine], [line.flops / line.seconds for line in mine], "o", label=op)
    axis.set(xlabel="operations of matrix products per byte", ylabel="operations per second", title="Ops under the roof of this machine")
    axis.grid(True, which="both", alpha=0.2)
    axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")
