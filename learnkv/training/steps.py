"""Which traces a step trains on, and where they are cut: functions of (seed, step, trace id), never of rank or call order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from learnkv.gates.base import Batch
from learnkv.traces.dataset import TraceDataset
from learnkv.traces.format import Trace
from learnkv.traces.targets import PER_TOKEN
from learnkv.training.settings import Cut, TrainSettings


class Steps:
    """One Batch per step: the share of one process of that step's traces.

    Resumes where it stopped: `state_dict` holds the next step.
    """

    def __init__(self, traces: TraceDataset, settings: TrainSettings, rank: int, world_size: int) -> None:
        if settings.batch % world_size:
            raise ValueError(f"train.batch={settings.batch} traces can't be shared equally by {world_size} processes; give a multiple")
        self.traces, self.settings = traces, settings
        self.rank, self.world_size = rank, world_size
        self.next_step = 0

    def __len__(self) -> int:
        return self.settings.steps

    def __iter__(self) -> Iterator[Batch]:
        while self.next_step < self.settings.steps:
            self.next_step += 1
            yield self.batch(self.next_step - 1)

    def batch(self, step: int) -> Batch:
        """The traces of a step, cut and dealt out as the settings say."""
        drawn = self.traces.draw(self.settings.seed, step, self.settings.batch)
        whole = Batch([self.traces[i] for i in drawn[self.rank :: self.world_size]], self.settings.seed, step, self.settings.shuffled)
        cut = CUTS[self.settings.cut]
        traces = [cut(trace, self.settings.min_cut, whole.generator(trace, "cut")) for trace in whole.traces]
        return taught(replace(whole, traces=traces))

    def state_dict(self) -> dict[str, int]:
        return {"next_step": self.next_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_step = state["next_step"]


def no_cut(trace: Trace, least: int, generator: torch.Generator) -> Trace:
    """The trace as it is."""
    return trace


def uniform_cut(trace: Trace, least: int, generator: torch.Generator) -> Trace:
    """The first n tokens, n uniform from `least` to the whole (arXiv:2602.10238, Alg. 1).

    Differs: utility stays that of the recorded questions; the attention of the context after the cut is in `recorded_cut` only.
    """
    length = len(trace.ids)
    return shortened(trace, int(torch.randint(min(least, length), length + 1, (), generator=generator)))


def recorded_cut(trace: Trace, least: int, generator: torch.Generator) -> Trace:
    """One of the recorded cuts or the whole, each as likely; the context after the cut counts as its future (arXiv:2602.10238, Alg. 1)."""
    if "utility_cuts" not in trace.targets:
        raise ValueError(f"trace {trace.id} was recorded without cuts, which train.cut=recorded needs; record with record.cuts=4")
    ends = [int(n) for n in trace.targets["cut_positions"] if n >= least]
    chosen = int(torch.randint(len(ends) + 1, (), generator=generator))
    if chosen == len(ends):
        return trace
    index = trace.targets["cut_positions"].tolist().index(ends[chosen])
    return shortened(replace(trace, targets={"utility": trace.targets["utility_cuts"][index]}), ends[chosen])


def shortened(trace: Trace, n: int) -> Trace:
    """What a gate trains on, of the first n tokens; the window of last queries belongs to the whole and is left out."""
    columns = {name: getattr(trace, name) for name in ("keys", "values", "hidden", "block_input", "queries", "queries_pre_rope")}
    cut = {name: t[..., :n, :] for name, t in columns.items() if t is not None}
    return replace(
        trace,
        ids=trace.ids[:n],
        window=None,
        mass=None,
        targets={name: t[..., :n] for name, t in trace.targets.items() if name in PER_TOKEN},
        **cut,
    )


def taught(batch: Batch) -> Batch:
    """The batch with its targets as they are to be learned: dealt out anew where it is a control's."""
    if not batch.shuffled:
        return batch
    return replace(batch, traces=[dealt(trace, batch.order(trace, len(trace.ids))) for trace in batch.traces])


def dealt(trace: Trace, order: Tensor) -> Trace:
    """The trace whose i-th token has the targets of its order[i]-th, alike in all layers and heads."""
    return replace(trace, targets={name: t[..., order] if name in PER_TOKEN else t for name, t in trace.targets.items()})


CUTS: dict[Cut, Callable[[Trace, int, torch.Generator], Trace]] = {"none": no_cut, "uniform": uniform_cut, "recorded": recorded_cut}
