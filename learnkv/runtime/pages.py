"""Pages: where one layer's tokens lie, in pages of 16 per KV head; clones share them until they write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import NoReturn
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F

from learnkv import ops
from learnkv.observation import Slots

PAGE = 16
PAGED = ("keys", "values", "positions", "memory")


def pages_for(tokens: Tensor) -> Tensor:
    """Pages that hold so many tokens."""
    return (tokens + PAGE - 1) // PAGE


@dataclass(eq=False)
class Pool:
    """The pages of one layer, and the tables that point at them: one, or those of a cache and its clones.

    keys, values  [N, P, D]
    positions     [N, P] int32 ordinal of the real token in its row, -1 where empty
    memory        [N, P, C] float32, 0 where empty
    shared        whether a page may stand in several tables, or several times in one
    users         the tables
    lock          held while a table's owner writes: clones may run in threads of their own
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    memory: Tensor
    shared: bool = False
    users: WeakSet[Pages] = field(default_factory=WeakSet)
    lock: RLock = field(default_factory=RLock)  # type: ignore[valid-type]

    @classmethod
    def empty(cls, count: int, keys: Tensor, values: Tensor, memory_size: int) -> Pool:
        """`count` pages without tokens, typed as keys and values [..., D]."""
        return cls(
            keys=keys.new_zeros(count, PAGE, keys.shape[-1]),
            values=values.new_zeros(count, PAGE, values.shape[-1]),
            positions=torch.full((count, PAGE), -1, dtype=torch.int32, device=keys.device),
            memory=torch.zeros(count, PAGE, memory_size, device=keys.device),
        )

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            "what an EvictionCache holds can't be pickled or saved; run the prompt again, and clone() the cache to keep a state"
        )

    def slots(self, table: Tensor, lengths: Tensor, ordered: bool) -> Slots:
        """What scorers and ops take."""
        return Slots(self.keys, self.values, self.positions, self.memory, table, lengths, ordered=ordered)

    def uses(self) -> Tensor:
        """[N] int64, in how many places of the tables each page stands; 0 where it is free."""
        tables = torch.cat([user.table.flatten() for user in self.users])
        return torch.bincount(tables[tables >= 0], minlength=len(self.keys))

    def in_common(self) -> bool:
        """Whether some page stands in several places; once none does, nobody asks again."""
        self.shared = self.shared and bool((self.uses() > 1).any())
        return self.shared

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys, values, positions and memory."""
        return sum(getattr(self, name)[:1].nbytes for name in PAGED)

    def take(self, count: int) -> Tensor:
        """[count] int64 free pages, emptied; where there are too few the pool grows, by a quarter at least."""
        free = (self.uses() == 0).nonzero()[:, 0]
        if len(free) < count:
            N = len(self.keys)
            self.grow(max(count - len(free), N // 4))
            free = torch.cat([free, torch.arange(N, len(self.keys), device=free.device)])
        taken = free[:count]
        self.positions[taken], self.memory[taken], self.values[taken] = -1, 0, 0  # an old NaN would outlive its weight of 0
        return taken

    def grow(self, count: int) -> None:
        more = Pool.empty(count, self.keys, self.values, self.memory.shape[-1])
        for name in PAGED:
            setattr(self, name, torch.cat([getattr(self, name), getattr(more, name)]))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Pages source [K] into pages target [K]."""
        for name in PAGED:
            getattr(self, name)[target] = getattr(self, name)[source]


@dataclass(eq=False)
class Pages:
    """Keys, values, positions and memory of one layer: which pages of a pool belong to which head.

    A head owns as many pages as it needs, whatever its neighbours hold.  Tokens are appended and compacted in place; a page that stands
    in another table too is copied before it is written.

    table    [B, H, pages] int32, -1 past a head's last page; never written in place
    lengths  [B, H] int64 slots held
    runs     whether each head's pages lie in one run, in order of the heads, from page 0 on
    ordered  whether slots lie ascending in position: they do until something was compacted in place
    equal    the length of all heads where they have one, and equally many pages, else None; as `room` known without asking the device
    room     tokens that every head takes before it needs another page
    first    [B, H, 1] int64 where the first slot of each head lies among all slots
    """

    pool: Pool
    table: Tensor
    lengths: Tensor
    runs: bool = False
    ordered: bool = True
    equal: int | None = field(init=False)
    room: int = field(init=False)
    first: Tensor = field(init=False)
    whose: ops.Owners | None = field(init=False)  # kept while tokens are only appended, None where nobody has asked

    def __post_init__(self) -> None:
        self.pool.users.add(self)
        self.measure()

    def measure(self) -> None:
        """Looks at table and lengths, one of which has changed."""
        self.whose = None
        self.first = self.table[..., :1].long() * PAGE  # [B, H, 1] where the first slot of each head lies
        longest, shortest = int(self.lengths.max()), int(self.lengths.min())
        self.equal = longest if longest == shortest and bool((self.table >= 0).all()) else None
        self.room = int((self.counts * PAGE - self.lengths).min())

    @classmethod
    def empty(cls, counts: Tensor, keys: Tensor, values: Tensor, memory_size: int) -> Pages:
        """`counts` [B, H] pages for each head, without tokens, typed as keys and values [..., D]."""
        start = (counts.flatten().cumsum(0).view_as(counts) - counts)[..., None]
        column = torch.arange(max(1, int(counts.max())), device=keys.device)
        table = torch.where(column < counts[..., None], start + column, -1).int()
        pool = Pool.empty(int(counts.sum()), keys, values, memory_size)
        return cls(pool, table, torch.zeros_like(counts), runs=True)

    @property
    def counts(self) -> Tensor:
        """[B, H] pages that each head owns."""
        return (self.table >= 0).sum(-1)

    def slots(self) -> Slots:
        """What scorers and ops take; shares the pages."""
        return self.pool.slots(self.table, self.lengths, self.ordered)

    def row(self, b: int) -> Slots:
        """One sequence."""
        return self.pool.slots(self.table[b : b + 1], self.lengths[b : b + 1], self.ordered)

    def equal_run(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values [B, H, L, D] as views where all heads hold equally many in equal runs, else None."""
        B, H, pages = self.table.shape
        L = self.equal
        if not self.runs or L is None:
            return None
        keys, values = (x[: B * H * pages].view(B, H, pages * PAGE, -1)[:, :, :L] for x in (self.pool.keys, self.pool.values))
        return keys, values

    def places(self, slots: Tensor) -> Tensor:
        """slots [B, H, S] -> [B, H, S] int64 rows of the flattened pages; meaningless past a head's last page."""
        return self.first + slots if self.runs else ops.page_rows(self.table, slots, PAGE)

    def owners(self) -> ops.Owners | None:
        """What `ops.owners` says of the table, asked again only after more than an append; None on CUDA, where nobody needs it."""
        if self.table.is_cuda:
            return None
        if self.whose is None or len(self.whose.slots) != len(self.pool.keys):
            self.whose = ops.owners(self.table, self.pool.positions)
        return self.whose

    def all_slots(self) -> tuple[Tensor, Tensor]:
        """Slot numbers [B, H, L] up to the longest head, and which of them are filled."""
        slots = torch.arange(int(self.lengths.max()), device=self.lengths.device).expand(*self.lengths.shape, -1)
        return slots, slots < self.lengths[..., None]

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, *, padded: bool = True) -> Tensor:
        """Writes keys, values [B, H, T, D] after what each head holds; positions [B, T] are -1 on padding, which is not stored.

        Where nothing is padding and there is room, the device is asked nothing.  Returns [B, H, T] int64 slots written to, -1 on padding.
        """
        T = keys.shape[2]
        with self.pool.lock:
            longer = self.lengths + ((positions >= 0).sum(-1)[:, None] if padded else T)
            if self.pool.shared or self.room < T:
                self.reserve(longer)
                self.measure()
            pool, first = self.pool, self.first if self.runs else None
            slots = ops.append_kv(
                pool.keys, pool.values, pool.positions, self.table, self.lengths, keys, values, positions, first=first, padded=padded
            )
            self.lengths = longer
            if padded:
                self.measure()
            else:
                self.equal, self.room = None if self.equal is None else self.equal + T, self.room - T
                self.own(slots)
        return slots

    def own(self, slots: Tensor) -> None:
        """slots [B, H, T] are filled now, where it is kept whose each slot is."""
        if self.whose is not None:
            places = self.places(slots).flatten()
            heads = torch.arange(len(places), dtype=torch.int32, device=places.device) // slots.shape[2]
            self.whose.slots.view(-1).index_copy_(0, places, heads)

    def reserve(self, lengths: Tensor) -> None:
        """Room for `lengths` [B, H] tokens.

        Where it lacks, all heads move to runs a sixteenth and a page longer than they need; where pages are shared they only take those
        that they lack, and copies of the shared ones that they write on.
        """
        need = pages_for(lengths)
        if self.pool.in_common():
            first = self.lengths // PAGE
            self.part(first, torch.where(lengths > self.lengths, need, first))
            self.extend(need)
        elif bool((need > self.counts).any()):
            self.become(self.moved(self.all_slots()[1], need + 1 + need // 16))

    def extend(self, need: Tensor) -> None:
        """Pages for the heads that own fewer than `need` [B, H]."""
        self.table = F.pad(self.table, (0, max(0, int(need.max()) - self.table.shape[-1])), value=-1)
        column = torch.arange(self.table.shape[-1], device=need.device)
        lacking = (column < need[..., None]) & (self.table < 0)
        if bool(lacking.any()):
            self.table = self.table.masked_scatter(lacking, self.pool.take(int(lacking.sum())).int())
            self.runs = False

    def part(self, start: Tensor, stop: Tensor) -> None:
        """Copies of the pages start..stop - 1 [B, H] of each head that stand elsewhere too."""
        column = torch.arange(self.table.shape[-1], device=start.device)
        mine = (column >= start[..., None]) & (column < stop[..., None]) & (self.table >= 0)
        twice = mine & (self.pool.uses()[self.table.clamp(min=0).long()] > 1)
        if bool(twice.any()):
            before = self.table[twice].long()
            after = self.pool.take(len(before))
            self.pool.copy(before, after)
            self.table = self.table.masked_scatter(twice, after.int())
            self.runs = False

    def become(self, other: Pages) -> None:
        """Takes over what `other` holds, which nobody else uses."""
        self.pool.users.discard(self)
        self.pool, self.table, self.lengths, self.runs, self.ordered = other.pool, other.table, other.lengths, other.runs, other.ordered
        self.pool.users.add(self)
        self.measure()

    def moved(self, keep: Tensor, counts: Tensor, columns: slice = slice(None)) -> Pages:
        """A copy of the slots in `keep` [B, H, L], in fresh pages; `columns` of the memory come along."""
        pool = self.pool
        new = Pages.empty(counts, pool.keys, pool.values, pool.memory[..., columns].shape[-1])
        source = pool.keys, pool.values, pool.positions, pool.memory[..., columns]
        target = new.pool.keys, new.pool.values, new.pool.positions, new.pool.memory
        new.lengths = ops.copy_kept(*source, self.table, self.lengths, keep, *target, new.table)
        new.ordered = self.ordered
        new.measure()
        return new

    def kept(self, keep: Tensor, spare: int, columns: slice = slice(None)) -> Pages:
        """A copy of the slots in `keep` [B, H, L], in pages for them and `spare` more tokens per head."""
        return self.moved(keep, pages_for(keep.sum(-1) + spare), columns)

    def compact(self, keep: Tensor, spare: int) -> None:
        """Drops all slots but `keep` [B, H, L], in place; gives pages back when over half of them hold nothing.

        In place only as many slots are moved as were evicted, and they no longer lie in order.
        """
        with self.pool.lock:
            if self.pool.in_common() or len(self.pool.keys) > 2 * int(pages_for(keep.sum(-1) + spare).sum()):
                self.become(self.kept(keep, spare))
            else:
                pool = self.pool
                self.lengths = ops.compact(pool.keys, pool.values, pool.positions, pool.memory, self.table, self.lengths, keep)
                self.ordered = False
                self.measure()

    def write_memory(self, memory: Tensor, columns: slice, rows: slice = slice(None)) -> None:
        """memory [b, H, L, C] into these columns of the filled slots of some rows."""
        with self.pool.lock:
            if self.pool.in_common():
                self.part(torch.zeros_like(self.lengths), pages_for(self.lengths))
            slots, filled = self.all_slots()
            places, filled = self.places(slots)[rows], filled[rows]
            L = memory.shape[2]  # of the longest head of these rows
            self.pool.memory.flatten(0, 1)[places[..., :L][filled[..., :L]], columns] = memory[filled[..., :L]]

    def holds(self, row: int, start: int, stop: int) -> bool:
        """Whether every head of a row holds the tokens at positions start..stop - 1."""
        positions = self.row(row).positions
        held = ((positions >= start) & (positions < stop)).sum(-1)
        return bool((held >= stop - start).all())

    def clone(self) -> Pages:
        """The same slots; the pages are shared until one of the two writes on them."""
        return self.rows(torch.arange(len(self.table), device=self.table.device))

    def rows(self, index: Tensor) -> Pages:
        """The rows `index` [b] as they are now, some of them perhaps several times; pages are shared."""
        self.pool.shared = True
        same = torch.equal(index, torch.arange(len(self.table), device=index.device))
        return Pages(self.pool, self.table[index], self.lengths[index], runs=self.runs and same, ordered=self.ordered)

    @classmethod
    def stacked(cls, parts: Sequence[Pages]) -> Pages:
        """The rows of several as the rows of one copy, without the memory of their scorers."""
        parts = [part.kept(part.all_slots()[1], 0) if part.pool.shared else part for part in parts]
        starts = torch.tensor([0, *(len(part.pool.keys) for part in parts)]).cumsum(0).tolist()
        tables = [part.table.masked_fill(part.table < 0, -1 - start) + start for part, start in zip(parts, starts, strict=False)]
        width = max(table.shape[-1] for table in tables)
        positions = torch.cat([part.pool.positions for part in parts])
        pool = Pool(
            keys=torch.cat([part.pool.keys for part in parts]),
            values=torch.cat([part.pool.values for part in parts]),
            positions=positions,
            memory=torch.zeros(*positions.shape, 0, device=positions.device),
        )
        table = torch.cat([F.pad(table, (0, width - table.shape[-1]), value=-1) for table in tables])
        in_runs = all(part.runs and part.table.numel() == len(part.pool.keys) for part in parts)
        equal = len({part.table.shape[2] for part in parts}) == 1
        ordered = all(part.ordered for part in parts)
        return cls(pool, table, torch.cat([part.lengths for part in parts]), runs=in_runs and equal, ordered=ordered)

    def tensors(self) -> list[Tensor]:
        """All that holds memory."""
        return [
            *(getattr(self.pool, name) for name in PAGED),
            self.table,
            self.lengths,
            *([] if self.whose is None else [self.whose.slots]),
        ]
