"""Traces of a folder as a torch Dataset, memory-mapped, in an order that depends on (seed, step) only."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import cast

import torch
from torch.utils.data import Dataset

from learnkv.models import BaseModel, PreTrainedModel
from learnkv.traces.format import Trace, check_model, read_config, read_manifest, read_trace
from learnkv.traces.measure import measure
from learnkv.traces.targets import Future, OverQuestions


class TraceDataset(Dataset[Trace]):
    """The traces of one folder: those of `ids` in that order, else all in the manifest's order.

    model       recomputes what was not stored, for traces recorded with mode=ids
    base_model  whose traces the folder must hold, if given
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        ids: Iterable[str] | None = None,
        base_model: BaseModel | None = None,
        model: PreTrainedModel | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self.model = model
        self.also = frozenset(cast(list[str], self.config.settings.get("also", [])))
        self.rows = read_manifest(self.folder)
        self.verified: set[str] = set()
        if base_model is not None:
            check_model(self.folder, self.config.base_model, base_model)
        if self.config.settings["mode"] == "ids" and model is None:
            raise ValueError(
                f"{self.folder} holds token ids only (record.mode=ids); give the model to recompute the rest, or record mode=targets"
            )
        if ids is not None:
            self.rows = self.rows_of(list(ids))

    def rows_of(self, ids: list[str]) -> list[dict]:
        by_id = {row["id"]: row for row in self.rows}
        missing = [i for i in ids if i not in by_id]
        if missing:
            raise ValueError(
                f"{self.folder} lacks {len(missing)} of {len(ids)} traces, the first is {missing[0]}; run record again, it resumes"
            )
        return [by_id[i] for i in ids]

    @property
    def base_model(self) -> BaseModel:
        return self.config.base_model

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Trace:
        row = self.rows[index]
        trace = read_trace(self.folder, row, verify=row["id"] not in self.verified)
        self.verified.add(row["id"])
        return recompute(trace, self.model, self.config.settings, self.also) if trace.keys is None and self.model is not None else trace

    def reading(self, also: Iterable[str]) -> TraceDataset:
        """The same traces for who reads, beside what every trace holds, the names `also` of `learnkv.traces.measure.ALSO` alone.

        It is what traces of mode=ids recompute, whether it was in record.also or not; what was stored stays.
        """
        narrow = copy.copy(self)
        narrow.also = frozenset(also)
        return narrow

    def ids_only(self) -> TraceDataset:
        """The same traces for who reads token ids alone: those of mode=ids are not recomputed."""
        bare = copy.copy(self)
        bare.model = None
        return bare

    def split(self, name: str) -> TraceDataset:
        """The traces of one split, "train" or "heldout"."""
        part = copy.copy(self)
        part.rows = [row for row in self.rows if row["split"] == name]
        if not part.rows:
            known = ", ".join(sorted({row["split"] for row in self.rows})) or "none"
            raise ValueError(f"{self.folder} holds no traces of split {name!r}, only of: {known}; record some")
        return part

    def draw(self, seed: int, step: int, count: int) -> list[int]:
        """Indices of the `count` traces of a step: every epoch is a permutation of its own, and no state is kept between steps."""
        drawn = range(step * count, (step + 1) * count)
        orders = {epoch: self.order(seed, epoch) for epoch in {i // len(self) for i in drawn}}
        return [orders[i // len(self)][i % len(self)] for i in drawn]

    def order(self, seed: int, epoch: int) -> list[int]:
        """The permutation of one epoch."""
        return torch.randperm(len(self), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()


def recompute(trace: Trace, model: PreTrainedModel, settings: dict[str, object], also: Collection[str]) -> Trace:
    """What mode=ids left out, as mode=targets would have stored it; `settings` are the folder's, `also` names more."""
    # every response was recorded, so none is generated
    return measure(
        model,
        trace,
        future=cast(Future, settings["future"]),
        over_questions=cast(OverQuestions, settings["over_questions"]),
        max_new_tokens=0,
        cuts=cast(int, settings["cuts"]),
        also=also,
    )
