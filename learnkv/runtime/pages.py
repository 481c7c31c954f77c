"""Pages: where one layer's tokens lie, in runs of pages of 16 per KV head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from learnkv.observation import Slots

PAGE = 16


def pages_for(tokens: Tensor) -> Tensor:
    """Pages that hold so many tokens."""
    return (tokens + PAGE - 1) // PAGE


@dataclass
class Pages:
    """Keys, values, positions and memory of one layer; each head owns a run of pages, appended to and compacted in place.

    A head owns as many pages as it needs, whatever its neighbours hold.  Slots are ascending in position.

    keys, values  [N, P, D]
    positions     [N, P] int32 ordinal of the real token in its row, -1 where empty
    memory        [N, P, C] float32, 0 where empty
    table         [B, H, pages] int32, -1 past a head's last page
    lengths       [B, H] int64 slots held
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    memory: Tensor
    table: Tensor
    lengths: Tensor

    @classmethod
    def empty(cls, counts: Tensor, keys: Tensor, values: Tensor, memory_size: int) -> Pages:
        """`counts` [B, H] pages for each head, without tokens, typed as keys and values [..., D]."""
        N, device = int(counts.sum()), keys.device
        start = (counts.flatten().cumsum(0).view_as(counts) - counts)[..., None]
        column = torch.arange(max(1, int(counts.max())), device=device)
        return cls(
            keys=keys.new_zeros(N, PAGE, keys.shape[-1]),
            values=values.new_zeros(N, PAGE, values.shape[-1]),
            positions=torch.full((N, PAGE), -1, dtype=torch.int32, device=device),
            memory=torch.zeros(N, PAGE, memory_size, device=device),
            table=torch.where(column < counts[..., None], start + column, -1).int(),
            lengths=torch.zeros_like(counts),
        )

    @property
    def counts(self) -> Tensor:
        """[B, H] pages that each head owns."""
        return (self.table >= 0).sum(-1)

    def slots(self) -> Slots:
        """What scorers and ops take; shares the pages."""
        return Slots(self.keys, self.values, self.positions, self.memory, self.table, self.lengths)

    def row(self, b: int) -> Pages:
        """One sequence; shares the pages."""
        return replace(self, table=self.table[b : b + 1], lengths=self.lengths[b : b + 1])

    def equal_run(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values [B, H, L, D] as views where all heads hold equally many in equal runs, else None."""
        B, H, pages = self.table.shape
        L = int(self.lengths[0, 0])
        if B * H * pages != len(self.keys) or bool((self.lengths != L).any()):
            return None
        return self.keys.view(B, H, pages * PAGE, -1)[:, :, :L], self.values.view(B, H, pages * PAGE, -1)[:, :, :L]

    def places(self, slots: Tensor) -> Tensor:
        """slots [B, H, S] -> [B, H, S] int64 rows of the flattened pages; meaningless past a head's last page."""
        return self.table.long().gather(2, slots // PAGE) * PAGE + slots % PAGE

    def all_slots(self) -> tuple[Tensor, Tensor]:
        """Slot numbers [B, H, L] up to the longest head, and which of them are filled."""
        slots = torch.arange(int(self.lengths.max()), device=self.lengths.device).expand(*self.lengths.shape, -1)
        return slots, slots < self.lengths[..., None]

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """Writes keys, values [B, H, T, D] after what each head holds; positions [B, T] are -1 on padding, which is not stored.

        Returns [B, H, T] int64 slots written to, -1 on padding.
        """
        real = positions >= 0
        slots = self.lengths[..., None] + real.cumsum(-1)[:, None] - 1  # [B, H, T]
        self.reserve(self.lengths + real.sum(-1)[:, None])
        self.lengths = self.lengths + real.sum(-1)[:, None]
        written = real[:, None].expand_as(slots)
        places = self.places(slots.clamp(min=0))[written]
        self.keys.flatten(0, 1)[places] = keys[written]
        self.values.flatten(0, 1)[places] = values[written]
        self.positions.view(-1)[places] = positions.int()[:, None].expand_as(slots)[written]
        return slots.masked_fill(~written, -1)

    def reserve(self, lengths: Tensor) -> None:
        """Room for `lengths` [B, H] tokens; where it lacks, all heads move to runs a quarter longer than they need."""
        need = pages_for(lengths)
        if bool((need > self.counts).any()):
            self.__dict__.update(vars(self.moved(self.all_slots()[1], need + need // 4)))

    def moved(self, keep: Tensor, counts: Tensor, columns: slice = slice(None)) -> Pages:
        """A copy of the slots in `keep` [B, H, L], in fresh pages; `columns` of the memory come along."""
        new = Pages.empty(counts, self.keys, self.values, self.memory[..., columns].shape[-1])
        slots, _ = self.all_slots()
        source = self.places(slots)[keep]
        target = new.places((keep.cumsum(-1) - 1).clamp(min=0))[keep]
        for name in ("keys", "values", "positions"):
            getattr(new, name).flatten(0, 1)[target] = getattr(self, name).flatten(0, 1)[source]
        new.memory.flatten(0, 1)[target] = self.memory[..., columns].flatten(0, 1)[source]
        new.lengths = keep.sum(-1)
        return new

    def kept(self, keep: Tensor, spare: int, columns: slice = slice(None)) -> Pages:
        """A copy of the slots in `keep` [B, H, L], in pages for them and `spare` more tokens per head."""
        return self.moved(keep, pages_for(keep.sum(-1) + spare), columns)

    def compact(self, keep: Tensor, spare: int) -> None:
        """Drops all slots but `keep` [B, H, L], in place; gives pages back when over half of them hold nothing."""
        slots, filled = self.all_slots()
        target, lengths = keep.cumsum(-1) - 1, keep.sum(-1)
        if len(self.keys) > 2 * int(pages_for(lengths + spare).sum()):
            self.__dict__.update(vars(self.kept(keep, spare)))
            return
        moving = keep & (target < slots)
        source, place = self.places(slots)[moving], self.places(target.clamp(min=0))[moving]
        for pages in (self.keys, self.values, self.positions, self.memory):
            pages.flatten(0, 1)[place] = pages.flatten(0, 1)[source]
        stale = self.places(slots)[filled & (slots >= lengths[..., None])]
        self.positions.view(-1)[stale] = -1
        self.memory.flatten(0, 1)[stale] = 0
        self.lengths = lengths

    def write_memory(self, memory: Tensor, columns: slice) -> None:
        """memory [B, H, L, C] into these columns of the filled slots."""
        slots, filled = self.all_slots()
        self.memory.flatten(0, 1)[self.places(slots)[filled], columns] = memory[filled]

    def holds(self, start: int, stop: int) -> bool:
        """Whether every head holds the tokens at positions start..stop - 1."""
        positions = self.slots().positions
        held = ((positions >= start) & (positions < stop)).sum(-1)
        return bool((held >= stop - start).all())

    def clone(self) -> Pages:
        """A copy that shares nothing."""
        return Pages(**{f.name: getattr(self, f.name).clone() for f in fields(self)})

    @classmethod
    def stacked(cls, parts: Sequence[Pages]) -> Pages:
        """The rows of several as the rows of one copy, without the memory of their scorers."""
        starts = torch.tensor([0, *(len(part.keys) for part in parts)]).cumsum(0).tolist()
        tables = [part.table.masked_fill(part.table < 0, -1 - start) + start for part, start in zip(parts, starts, strict=False)]
        width = max(table.shape[-1] for table in tables)
        positions = torch.cat([part.positions for part in parts])
        return cls(
            keys=torch.cat([part.keys for part in parts]),
            values=torch.cat([part.values for part in parts]),
            positions=positions,
            memory=torch.zeros(*positions.shape, 0, device=positions.device),
            table=torch.cat([F.pad(table, (0, width - table.shape[-1]), value=-1) for table in tables]),
            lengths=torch.cat([part.lengths for part in parts]),
        )

    def tensors(self) -> list[Tensor]:
        """All that holds memory."""
        return [getattr(self, f.name) for f in fields(self)]
