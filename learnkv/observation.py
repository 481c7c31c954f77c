"""What an eviction method may read (Observation, Slots) and the one thing it must say (Scorer)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from learnkv import ops

if TYPE_CHECKING:
    from torch import nn

Need = Literal["hidden", "block_input", "mass", "queries_pre_rope", "all_queries", "token_ids", "rope_offset"]


@dataclass(frozen=True)
class Slots:
    """Where one layer's tokens lie: pages of keys and values, and which pages belong to which head.

    The first `lengths[b, h]` slots of a head are filled, the rest are empty; slot s lies in page
    `table[b, h, s // P]` at row `s % P`.  A dense tensor is a Slots with one page per head (`Slots.dense`).

    key_pages, value_pages  [N, P, D]     cache dtype
    position_pages          [N, P] int32  ordinal of the real token in its row, -1 where empty
    memory_pages            [N, P, C] float32
    table                   [B, H, pages] int32, -1 past a head's last page
    lengths                 [B, H] int32  slots held by each head
    ordered                 whether every head's slots lie ascending in position; the padded views do in any case
    """

    key_pages: Tensor
    value_pages: Tensor
    position_pages: Tensor
    memory_pages: Tensor
    table: Tensor
    lengths: Tensor
    ordered: bool = field(default=True, kw_only=True)

    @classmethod
    def dense(cls, keys: Tensor, values: Tensor, positions: Tensor | None = None, memory: Tensor | None = None) -> Slots:
        """keys, values [B, H, L, D] -> Slots of one page per head.  positions [B, H, L] default to 0..L-1; memory [B, H, L, C]."""
        B, H, L, D = keys.shape
        if positions is None:
            positions = torch.arange(L, dtype=torch.int32, device=keys.device).expand(B, H, L)
        if memory is None:
            memory = keys.new_zeros(B, H, L, 0, dtype=torch.float32)
        table = torch.arange(B * H, dtype=torch.int32, device=keys.device).view(B, H, 1)
        lengths = (positions >= 0).sum(-1, dtype=torch.int32)
        flat = (keys.reshape(B * H, L, D), values.reshape(B * H, L, D), positions.reshape(B * H, L), memory.reshape(B * H, L, -1))
        return cls(*flat, table=table, lengths=lengths)

    @cached_property
    def max_length(self) -> int:
        """L of the padded views: the longest head."""
        return int(self.lengths.max()) if self.lengths.numel() else 0

    # gathered once for all scorers that look at the same slots

    @cached_property
    def keys(self) -> Tensor:
        """[B, H, L, D] ascending in position, 0 where empty."""
        return self.gathered(self.key_pages)

    @cached_property
    def values(self) -> Tensor:
        """[B, H, L, D] ascending in position, 0 where empty."""
        return self.gathered(self.value_pages)

    @cached_property
    def positions(self) -> Tensor:
        """[B, H, L] int32, -1 where the slot is empty."""
        return self.in_order(self.stored_positions)

    @cached_property
    def stored_positions(self) -> Tensor:
        """[B, H, L] int32 as the slots lie, -1 where empty."""
        gathered = ops.gather_pages(self.position_pages[..., None], self.table, self.lengths)[..., 0]
        return gathered.masked_fill(~self.filled, -1)

    @cached_property
    def order(self) -> Tensor | None:
        """[B, H, L] int64 which slot each place of the padded views shows; None where they lie as they are shown."""
        if self.ordered:
            return None
        return self.stored_positions.masked_fill(~self.filled, torch.iinfo(torch.int32).max).argsort(dim=-1, stable=True)

    def gathered(self, pages: Tensor) -> Tensor:
        """pages [N, P, X] -> [B, H, L, X] ascending in position, 0 where empty."""
        return self.in_order(ops.gather_pages(pages, self.table, self.lengths))

    def in_order(self, x: Tensor) -> Tensor:
        """x [B, H, L, ...] of the slots as they lie -> as the padded views show them."""
        return x if self.order is None else x.gather(2, expanded(self.order, x))

    def as_stored(self, x: Tensor) -> Tensor:
        """x [B, H, L, ...] of the padded views -> of the slots as they lie."""
        return x if self.order is None else torch.zeros_like(x).scatter(2, expanded(self.order, x), x)

    @cached_property
    def filled(self) -> Tensor:
        """[B, H, L] bool, True where the slot holds a token."""
        return torch.arange(self.max_length, device=self.lengths.device) < self.lengths[..., None]


def expanded(index: Tensor, x: Tensor) -> Tensor:
    """index [B, H, L] in the shape of x [B, H, L, ...]."""
    return index.view(*index.shape, *[1] * (x.ndim - 3)).expand_as(x)


@dataclass(frozen=True)
class Observation:
    """One evictable layer of one cache, as a scorer sees it.

    B sequences, H kv heads, Q query heads, L slots, T new tokens, W recent queries, D head_dim, M hidden_size, C memory_size.

    layer             index among the evictable layers
    num_layers        how many there are
    num_seen          [B] int64  real tokens so far, evicted ones included, padding not
    num_new           [B] int64  real tokens of this step
    new_slots         [B, H, T] int64  where this step's tokens lie, -1 for padding
    slots             pages, table and lengths: what every op takes
    memory_columns    which floats of the slots' memory are this scorer's
    queries           [B, Q, W, D]  the last `observation_window` queries, rotated; of each row's real tokens, ascending, left-padded with 0
    num_queries       [B] int64  how many of the W are real
    scale             the model's own softmax scale
    The rest is None unless the scorer's `needs` names it:
    hidden            [B, T, M]  input of self-attention (after the input layernorm) for this step's tokens
    block_input       [B, T, M]  input of the decoder layer (before the input layernorm)
    mass              [B, H, L] float32  attention each slot received in this step, summed over queries and the group
    queries_pre_rope  [B, Q, T, D]  this step's queries before rotation
    all_queries       [B, Q, T, D]  this step's queries, rotated
    token_ids         [B, T] int64  this step's tokens
    rope_offset       [B] int64  RoPE position minus position of every token: pads that a plain left-padded forward counts, else 0
    """

    layer: int
    num_layers: int
    num_seen: Tensor
    num_new: Tensor
    new_slots: Tensor
    slots: Slots
    queries: Tensor
    num_queries: Tensor
    scale: float
    memory_columns: slice = field(default_factory=lambda: slice(None), kw_only=True)
    hidden: Tensor | None = field(default=None, kw_only=True)
    block_input: Tensor | None = field(default=None, kw_only=True)
    mass: Tensor | None = field(default=None, kw_only=True)
    queries_pre_rope: Tensor | None = field(default=None, kw_only=True)
    all_queries: Tensor | None = field(default=None, kw_only=True)
    token_ids: Tensor | None = field(default=None, kw_only=True)
    rope_offset: Tensor | None = field(default=None, kw_only=True)

    @property
    def keys(self) -> Tensor:
        """[B, H, L, D] ascending in position, 0 where empty."""
        return self.slots.keys

    @property
    def values(self) -> Tensor:
        """[B, H, L, D] ascending in position, 0 where empty."""
        return self.slots.values

    @property
    def positions(self) -> Tensor:
        """[B, H, L] int32 ordinal of the real token in its row, -1 where the slot is empty."""
        return self.slots.positions

    @cached_property
    def memory(self) -> Tensor:
        """[B, H, L, C] float32, what this scorer wrote beside each token."""
        return self.slots.gathered(self.slots.memory_pages[..., self.memory_columns])

    @property
    def filled(self) -> Tensor:
        """[B, H, L] bool, True where the slot holds a token."""
        return self.slots.filled

    @cached_property
    def query_positions(self) -> Tensor:
        """[B, W] int64 ordinal of each of `queries` in its row, -1 where it is padding."""
        ago = torch.arange(-self.queries.shape[2], 0, device=self.num_seen.device)
        return torch.where(ago >= -self.num_queries[:, None], self.num_seen[:, None] + ago, -1)

    @cached_property
    def new_positions(self) -> Tensor:
        """[B, T] int64 ordinal of each of this step's tokens in its row, -1 where it is padding."""
        real = (self.new_slots >= 0).any(1)
        return torch.where(real, (self.num_seen - self.num_new)[:, None] + real.cumsum(-1) - 1, -1)

    @cached_property
    def new_keys(self) -> Tensor:
        """[B, H, T, D] keys of this step's tokens as they were born, read where they lie; meaningless where padding is."""
        return self.of_new(self.slots.key_pages)

    @cached_property
    def new_values(self) -> Tensor:
        """[B, H, T, D] values of this step's tokens, likewise."""
        return self.of_new(self.slots.value_pages)

    def of_new(self, pages: Tensor) -> Tensor:
        """pages [N, P, X] -> [B, H, T, X] of this step's tokens."""
        P, slots = pages.shape[1], self.new_slots.clamp(min=0)
        return pages[self.slots.table.long().gather(2, slots // P), slots % P]

    def with_columns(self, start: int, stop: int) -> Observation:
        """The same with a part of this scorer's memory: its columns start..stop - 1."""
        first = self.memory_columns.start or 0
        return replace(self, memory_columns=slice(first + start, first + stop))

    def write_new(self, values: Tensor) -> Tensor:
        """The memory with `values` [B, H, T, C] written at this step's tokens: what a creation-time scorer's `remember` returns."""
        real = (self.new_slots >= 0)[..., None]
        index = self.new_slots.clamp(min=0)[..., None].expand(*self.new_slots.shape, values.shape[-1])
        # padding points at slot 0; adding 0 there leaves it alone whatever the order of writes
        old = self.memory.gather(2, index)
        return self.memory.scatter_add(2, index, (values.float() - old) * real)


class Scorer:
    """Says how much every cached token is worth; higher stays.  Holds weights or constants, never a request's state.

    observation_window  how many of the last queries `score` reads
    memory_size         floats per slot that travel with the token
    needs               which optional fields of Observation it reads
    scope               "layer", or "model": scores of all layers are wanted before anyone is evicted
    """

    observation_window: int = 0
    memory_size: int = 0
    needs: ClassVar[frozenset[Need]] = frozenset()
    scope: Literal["layer", "model"] = "layer"

    def bind(self, model: nn.Module) -> Scorer:
        """A scorer ready for `model`: takes what it needs of it (W_O, rotary).  Called once per cache; returns self by default."""
        return self

    def remember(self, obs: Observation) -> Tensor:
        """[B, H, L, memory_size] float32 for the next step; runs at every forward, whatever the policy's interval."""
        return obs.memory

    def score(self, obs: Observation) -> Tensor:
        """[B, H, L] float32 worth of every slot, higher stays; values on empty slots are ignored."""
        raise NotImplementedError

    def refine(self, scores: Tensor, kept: Tensor, obs: Observation) -> Tensor:
        """[B, H, L] float32 worth by which slots stay, now that the allocator has said from the scores how many; the scores by default.

        scores  [B, H, L] float32, +inf on protected slots, -inf on empty ones; what is returned for either is ignored
        kept    [B, H] int64 slots that stay in each head, protected ones included
        """
        return scores

    def probe(self, token_ids: Tensor) -> list[Probe]:
        """Rows to run over the full cache after the prompt `token_ids` [n] and before eviction; none by default."""
        return []

    def absorb(self, obs: Observation, probe: Probe, queries: Tensor, keys: Tensor) -> Tensor:
        """[B, H, L, memory_size] after a probe's rows ran: queries [B, Q, R, D], keys [B, H, R, D], both rotated."""
        return obs.memory


@dataclass(frozen=True)
class Wrapper(Scorer):
    """Reads and remembers what its base does; a subclass says what becomes of the base's scores.

    Raises ValueError for a base that runs rows of its own after the prompt (KVzip), or refines its scores (CriticalKV).
    """

    base: Scorer

    def __post_init__(self) -> None:
        kind, base = type(self).__name__, type(self.base).__name__
        if type(self.base).probe is not Scorer.probe:
            raise ValueError(f"{kind}: base={base} runs passes of its own; wrap another scorer")
        if type(self.base).refine is not Scorer.refine:
            raise ValueError(f"{kind}: base={base} has the last word itself; make {kind} its base")
        for name in ("observation_window", "memory_size", "needs", "scope"):
            object.__setattr__(self, name, getattr(self.base, name))

    def bind(self, model: nn.Module) -> Scorer:
        return replace(self, base=self.base.bind(model))

    def remember(self, obs: Observation) -> Tensor:
        return self.base.remember(obs)


NOT_SCORED = 2.0  # above any attention: tokens that no probe was about stay


class ProbeScorer(Scorer):
    """Scores a prompt by what rows of its own, run after it (`probe`), see of it; `absorb` writes that beside the slots.

    Tokens that come later have no score and stay before all that have one.
    """

    memory_size = 1

    def remember(self, obs: Observation) -> Tensor:
        return obs.write_new(torch.full((*obs.new_slots.shape, 1), NOT_SCORED, device=obs.new_slots.device))

    def score(self, obs: Observation) -> Tensor:
        return obs.memory[..., 0]


def pooled(scores: Tensor, positions: Tensor, kernel_size: int) -> Tensor:
    """[B, H, L] the largest score among each slot's neighbours, kernel_size // 2 to both sides; slots that are not scored take no part.

    scores       [B, H, L] of a ProbeScorer
    positions    [B, H, L] int32, -1 where empty
    kernel_size  slots, odd; 0 or 1 for no pooling
    """
    if kernel_size < 2:
        return scores
    scored = scores < NOT_SCORED
    most = ops.pool(scores, positions.masked_fill(~scored, -1), kernel_size=kernel_size, pooling="max")
    return torch.where(scored, most, scores)


def refuse_kernel(kernel_size: int) -> None:
    """Raises a ValueError for a pooling kernel without a middle slot."""
    if kernel_size < 0 or (kernel_size and kernel_size % 2 == 0):
        raise ValueError(f"kernel_size={kernel_size} has no middle slot; give an odd number, 0 or 1 for no pooling")


@dataclass(frozen=True)
class Probe:
    """Rows that a scorer wants run after the prompt; they see the cache and themselves, and leave nothing in it.

    Numbers count from the first of the prompt's tokens that `Scorer.probe` was given; `Scorer.absorb` gets them as positions of the row.

    rows        [R] int64 token ids, or [R, M] embeddings
    start, stop the prompt tokens that these rows are about (KVzip: the chunk they repeat)
    position    RoPE position of the first row; the rows follow each other from there
    decoder     runs these rows in the place of the model's own: a copy with an adapter, of the same layers
    """

    rows: Tensor
    start: int
    stop: int
    position: int
    decoder: nn.Module | None = None
