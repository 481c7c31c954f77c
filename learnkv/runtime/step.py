"""Step: one forward of one cache, layer by layer: store, remember, select."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from learnkv import ops
from learnkv.observation import Need, Observation, Probe, Scorer, Slots
from learnkv.policy import Policy
from learnkv.runtime.pages import Pages, Pool, pages_for
from learnkv.runtime.positions import RenumberedSlots

WHOLE_WINDOW = 512  # queries up to which a window is held in full from the start; a larger one grows with what was seen

running: ContextVar[Step | ProbeStep | None] = ContextVar("learnkv_running", default=None)


def as_typed(device: torch.device) -> AbstractContextManager:
    """Inside it float32 arithmetic is float32, whatever torch.autocast makes of the model's."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


@dataclass
class LayerState:
    """What one evictable layer of one cache holds.

    index    among the evictable layers
    queries  [B, Q, W, D] the last W queries of each row's real tokens, 0 before the first; of a window far above what was seen, fewer
    columns  tokens seen, padding and evicted ones included: what transformers calls the length
    """

    index: int
    pages: Pages | None = None
    queries: Tensor | None = None
    columns: int = 0
    counted: tuple[object, int] = ((), 0)  # what the bytes hang on, and the bytes

    @property
    def held(self) -> Pages:
        assert self.pages is not None, "stored before it is read"
        return self.pages

    def tensors(self) -> list[Tensor]:
        """All that holds memory."""
        return [] if self.pages is None else [*self.pages.tensors(), *([] if self.queries is None else [self.queries])]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages, added up again only where one of them is another."""
        if self.pages is None or self.queries is None:
            return sum(t.untyped_storage().nbytes() for t in self.tensors())
        pages = self.pages
        now = pages.pool.keys.data_ptr(), len(pages.pool.keys), pages.table.shape, pages.whose is None, self.queries.shape
        if self.counted[0] != now:
            self.counted = now, sum(t.untyped_storage().nbytes() for t in self.tensors())
        return self.counted[1]

    def clone(self) -> LayerState:
        """The same; pages are shared until one of the two writes on them."""
        pages = None if self.pages is None else self.pages.clone()
        return replace(self, pages=pages, queries=None if self.queries is None else self.queries.clone())


@dataclass(frozen=True)
class Seat:
    """A scorer of the cache, and its columns of the slots' memory."""

    scorer: Scorer
    columns: slice

    @property
    def probes(self) -> bool:
        return type(self.scorer).probe is not Scorer.probe


@dataclass
class Target:
    """A selection due after this forward: by which policy, and the layers that take what stays.

    states  of the cache that takes it: the one that runs, or one of those that share its prefill
    budget  [B] int64 tokens per KV head
    pins    (row, start, stop) that stay
    over    [layers, B] bool, the rows that are over their budget; the others keep everything
    """

    states: list[LayerState]
    policy: Policy
    seat: int
    budget: Tensor
    pins: list[tuple[int, int, int]]
    over: Tensor

    @cached_property
    def due(self) -> list[bool]:
        """Per layer, whether some row is over its budget."""
        return self.over.any(1).tolist()

    def pinned(self, obs: Observation) -> Tensor:
        """[B, H, L] bool, the slots that pins hold."""
        out = torch.zeros_like(obs.filled)
        for row, start, stop in self.pins:
            out[row : row + 1] |= (obs.positions[row : row + 1] >= start) & (obs.positions[row : row + 1] < stop)
        return out

    def select(self, states: list[LayerState], observations: list[Observation], scores: list[Tensor], step: Step) -> None:
        """Asks the policy, of these layers together, and keeps what it says."""
        pinned = [self.pinned(obs) for obs in observations]
        keeps = self.policy.select(observations, pinned, budget=self.budget, scores=scores)
        for state, obs, keep in zip(states, observations, keeps, strict=True):
            keep |= obs.filled & ~self.over[state.index].to(keep.device)[:, None, None]
            keep, mine = obs.slots.as_stored(keep), self.states[state.index]
            if mine is state and not step.prefill:
                state.held.compact(keep, self.policy.interval)
            else:
                columns = slice(None) if mine is state else step.seats[self.seat].columns
                mine.pages = state.held.kept(keep, self.policy.interval, columns)


def over_budget(states: list[LayerState], num_new: Tensor, budget: Tensor, policy: Policy) -> Tensor:
    """[layers, B] bool, whether a layer will be over budget [B] with num_new [B] tokens more; the same for all where they share one budget.

    Where scores decide how many stay, a layer is always looked at.
    """
    if policy.allocate.spans == "nothing":
        return torch.ones(len(states), len(budget), dtype=torch.bool)
    if states[0].pages is None:
        return (num_new > budget).expand(len(states), -1)
    H = states[0].pages.lengths.shape[1]
    after = torch.stack([state.held.lengths.sum(1) for state in states]) + num_new * H  # [layers, B]
    if policy.allocate.spans == "model":
        return (after.sum(0) > budget * H * len(states)).expand(len(states), -1)
    return after > budget * H


@dataclass
class Step:
    """One forward of one cache: what its layers share, and what waits for all of them.

    seats            the cache's scorers
    num_layers       evictable layers
    window           queries kept for the scorers
    positions        [B, T] int64 ordinal of each token among its row's real ones, -1 on padding
    num_new          [B] int64 real tokens of this forward
    num_seen         [B] int64 real tokens with this forward
    next_rope        [B] int64 RoPE position after the last token
    prefill          more than one token, or the first forward, or a part of an announced prompt
    complete         False while more of an announced prompt is to come
    token_ids        [B, T] or None
    attention_mask   [B, columns + T] as it was given, or None
    frequencies      [R / 2] of the model's RoPE where positions are renumbered, else None
    """

    seats: list[Seat]
    num_layers: int
    window: int
    positions: Tensor
    num_new: Tensor
    num_seen: Tensor
    next_rope: Tensor
    prefill: bool
    token_ids: Tensor | None
    attention_mask: Tensor | None
    frequencies: Tensor | None = None
    targets: list[Target] = field(default_factory=list)
    probes: list[tuple[int, int, Probe]] = field(default_factory=list)  # (seat, row, probe)
    complete: bool = True
    # of the layer that runs
    state: LayerState | None = None
    new_slots: Tensor | None = None
    slots: Slots | None = None  # as attention and scorers see them
    mass: Tensor | None = None  # [B, H, L] attention that they received, where attention found it
    hidden: Tensor | None = None
    block_input: Tensor | None = None
    queries_pre_rope: Tensor | None = None
    # of the layers that ran
    attended: set[int] = field(default_factory=set)
    waiting: dict[tuple[int, int], Observation] = field(default_factory=dict)  # (seat, layer)
    scores: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # bytes that each layer holds, and the most that they held together
    layer_bytes: dict[int, int] = field(default_factory=dict)
    sliding_bytes: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        self.padded = bool((self.positions < 0).any())
        self.empty = not bool(self.num_seen.any())  # nothing but padding so far
        self.needs = frozenset(need for seat in self.seats for need in seat.scorer.needs)

    def store(self, state: LayerState, keys: Tensor, values: Tensor) -> None:
        """Appends keys, values [B, H, T, D] of this forward to a layer."""
        B, H, T, _ = keys.shape
        positions = self.positions.to(keys.device)
        if state.pages is None:
            counts = pages_for(self.num_new.to(keys.device) + 1)[:, None].expand(B, H)
            state.pages = Pages.empty(counts, keys, values, sum(seat.scorer.memory_size for seat in self.seats))
        refuse_other_types(state.pages.pool, keys, values)
        self.state, self.new_slots = state, state.pages.append(keys, values, positions, padded=self.padded)
        self.slots = self.seen(state.pages.slots())
        state.columns += T
        self.layer_bytes[state.index] = state.nbytes
        self.peak = max(self.peak, sum(self.layer_bytes.values()))

    def seen(self, slots: Slots) -> Slots:
        """The slots of a layer, renumbered where positions are."""
        if self.frequencies is None:
            return slots
        device = slots.lengths.device
        return RenumberedSlots.of(slots, self.num_seen.to(device), self.frequencies.to(device))

    def observe(self, state: LayerState, queries: Tensor, scale: float) -> None:
        """After a layer's attention over all it holds: scorers remember, and what need not wait is selected."""
        self.attended.add(state.index)
        self.keep_queries(state, queries)
        if not self.empty and (self.targets or self.probes or any(seat.scorer.memory_size for seat in self.seats)):
            self.ask(state, queries, scale)
            self.layer_bytes[state.index] = state.nbytes  # fewer, where something was evicted

    def ask(self, state: LayerState, queries: Tensor, scale: float) -> None:
        """Shows the layer to the scorers, and evicts what can go at once."""
        base = self.base_observation(state, queries, scale)
        for seat in self.seats:
            if seat.scorer.memory_size:
                state.held.write_memory(base.slots.as_stored(seat.scorer.remember(self.shown(base, seat))), seat.columns)
        if state.held.table is not base.slots.table:  # a clone wrote on pages of its own
            base = replace(base, slots=self.seen(state.held.slots()))
        for i, seat in enumerate(self.seats):
            if seat.probes and self.probes:
                self.waiting[i, state.index] = replace(self.shown(base, seat), slots=state.held.slots())
        for target in self.targets:
            if target.due[state.index]:
                self.select_or_wait(target, state, self.shown(base, self.seats[target.seat]))
        self.scores = {key: s for key, s in self.scores.items() if key in self.waiting}

    def select_or_wait(self, target: Target, state: LayerState, obs: Observation) -> None:
        key = (target.seat, state.index)
        if self.deferred(target) and key in self.waiting:
            return
        if key not in self.scores:
            self.scores[key] = self.seats[target.seat].scorer.score(obs)
        if self.deferred(target):
            # only scores and positions of a layer wait for the others
            self.waiting[key] = replace(show(obs, frozenset()), slots=state.held.slots())
        else:
            target.select([state], [obs], [self.scores[key]], self)

    def deferred(self, target: Target) -> bool:
        """Whether a selection waits until all layers, or a scorer's probes, ran."""
        return target.policy.scope == "model" or (self.seats[target.seat].probes and bool(self.probes))

    def select_waiting(self, states: list[LayerState]) -> None:
        """The selections that waited."""
        for target in self.targets:
            if self.deferred(target):
                due = [state for state in states if target.due[state.index]]
                for together in [due] if target.policy.scope == "model" and due else [[state] for state in due]:
                    observations = [self.waiting[target.seat, state.index] for state in together]
                    target.select(together, observations, [self.late_score(target.seat, obs) for obs in observations], self)

    def late_score(self, seat: int, obs: Observation) -> Tensor:
        """A layer's scores, asked once for all policies; replaced, `obs` reads what a probe has written."""
        if (seat, obs.layer) not in self.scores:
            self.scores[seat, obs.layer] = self.seats[seat].scorer.score(replace(obs))
        return self.scores[seat, obs.layer]

    # ---- what scorers see

    def base_observation(self, state: LayerState, queries: Tensor, scale: float) -> Observation:
        """The layer with everything that some scorer needs."""
        assert self.new_slots is not None and state.queries is not None
        assert self.slots is not None
        slots, device = self.slots, queries.device
        mass, self.mass = self.mass, None
        if mass is None and "mass" in self.needs:
            mass = ops.column_mass(queries, slots.keys, self.positions.to(device), slots.positions, scale)
        return Observation(
            layer=state.index,
            num_layers=self.num_layers,
            num_seen=self.num_seen.to(device),
            num_new=self.num_new.to(device),
            new_slots=self.new_slots,
            slots=slots,
            queries=state.queries,
            num_queries=self.num_seen.to(device),
            scale=scale,
            hidden=self.hidden,
            block_input=self.block_input,
            mass=mass,
            queries_pre_rope=self.queries_pre_rope,
            all_queries=queries.detach(),
            token_ids=self.token_ids,
            rope_offset=(self.next_rope - self.num_seen).to(device),
        )

    def shown(self, base: Observation, seat: Seat) -> Observation:
        """What one scorer asked for; keys, values and positions are gathered once for all."""
        W = seat.scorer.observation_window
        queries = base.queries[:, :, max(0, base.queries.shape[2] - W) :]
        seen = show(base, seat.scorer.needs)
        return replace(seen, queries=queries, num_queries=base.num_seen.clamp(max=W), memory_columns=seat.columns)

    def keep_queries(self, state: LayerState, queries: Tensor) -> None:
        """The last `window` queries of each row's real tokens."""
        queries, (B, Q, T, D), W = queries.detach(), queries.shape, self.window
        W = min(W, max(WHOLE_WINDOW, 1 << (state.columns - 1).bit_length()))
        before = queries.new_zeros(B, Q, W, D) if state.queries is None else state.queries
        if before.shape[2] < W:
            before = F.pad(before, (0, 0, W - before.shape[2], 0))
        if self.padded and W:
            real = torch.cat([torch.ones(B, W, dtype=torch.bool), self.positions.cpu() >= 0], 1).to(queries.device)
            last = real.int().argsort(dim=-1, stable=True)[:, None, T:, None].expand(B, Q, W, D)
            state.queries = torch.cat([before, queries], 2).gather(2, last)
        else:
            state.queries = torch.cat([before[:, :, min(T, W) :], queries[:, :, max(0, T - W) :]], 2)


def refuse_other_types(pool: Pool, keys: Tensor, values: Tensor) -> None:
    """Raises a ValueError where a forward's keys or values are not of the type that the cache holds."""
    held, new = (pool.keys.dtype, pool.values.dtype), (keys.dtype, values.dtype)
    if held != new:
        names = [" and ".join(str(dtype).removeprefix("torch.") for dtype in types) for types in (held, new)]
        raise ValueError(
            f"this EvictionCache holds keys and values in {names[0]}, this forward brings {names[1]}; "
            "run all forwards of a cache in one type, all or none of them under torch.autocast"
        )


def show(obs: Observation, needs: frozenset[Need]) -> Observation:
    """The observation with what is needed of its optional fields."""
    return replace(
        obs,
        hidden=obs.hidden if "hidden" in needs else None,
        block_input=obs.block_input if "block_input" in needs else None,
        mass=obs.mass if "mass" in needs else None,
        queries_pre_rope=obs.queries_pre_rope if "queries_pre_rope" in needs else None,
        all_queries=obs.all_queries if "all_queries" in needs else None,
        token_ids=obs.token_ids if "token_ids" in needs else None,
        rope_offset=obs.rope_offset if "rope_offset" in needs else None,
    )


@dataclass
class ProbeStep:
    """A scorer's probe rows running over what one row of the cache holds; they are not stored.

    base        the prefill after which they run
    seat, row   whose they are, and what they look at
    """

    base: Step
    seat: int
    row: int
    probe: Probe
    state: LayerState | None = None
    hidden: Tensor | None = None
    block_input: Tensor | None = None
    queries_pre_rope: Tensor | None = None
    needs: ClassVar[frozenset[Need]] = frozenset()

    def store(self, state: LayerState, keys: Tensor, values: Tensor) -> None:
        self.state = state

    def observe(self, state: LayerState, slots: Slots, queries: Tensor, keys: Tensor) -> None:
        """queries [1, Q, R, D], keys [1, H, R, D] of the rows: the scorer writes what it learnt beside the row's slots."""
        seat, one = self.base.seats[self.seat], slice(self.row, self.row + 1)
        obs = self.base.waiting[self.seat, state.index]
        names = ("num_seen", "num_new", "new_slots", "queries", "num_queries", *get_args(Need))
        per_row = {name: x[one] for name in names if (x := getattr(obs, name)) is not None}
        memory = seat.scorer.absorb(replace(obs, slots=slots, **per_row), self.probe, queries, keys)
        state.held.write_memory(slots.as_stored(memory), seat.columns, one)
