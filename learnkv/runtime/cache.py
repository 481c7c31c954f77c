"""EvictionCache: a transformers cache whose layers hold what a policy keeps, per KV head."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.metadata import version
from typing import Literal, NoReturn, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from learnkv import budgets
from learnkv.capture import blocks_of, decoder_of, evictable_layers, query_projection
from learnkv.counts import check_count
from learnkv.geometry import kv_shape, max_positions, removable_frequencies
from learnkv.names import given
from learnkv.observation import Probe, Scorer
from learnkv.policy import Policy
from learnkv.runtime.memory import MemoryReport
from learnkv.runtime.pages import Pages
from learnkv.runtime.positions import frequencies_for
from learnkv.runtime.step import LayerState, ProbeStep, Seat, Step, Target, as_typed, over_budget, running
from learnkv.version import __version__

Attach = Callable[[PreTrainedModel], AbstractContextManager[PreTrainedModel]]  # `learnkv.attach`, which lies above this module
TESTED = "5.24"  # the transformers whose way from cache.update to the attention function was read


class EvictionLayer(CacheLayerMixin):
    """transformers' view of one evictable layer: its length is the columns seen, whatever is still held."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, state: LayerState) -> None:
        super().__init__()
        self.state = state

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("the first update makes the pages")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, kwargs: dict | None = None, **others: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the new tokens; `kwargs` is the dict that transformers hands on to the attention function."""
        step = (kwargs or {}).get("learnkv")
        if step is None and running.get() is None:
            raise ValueError("an EvictionCache works inside `with learnkv.attach(model):` only; enter it around generate or the forward")
        if step is None:
            raise RuntimeError(broken_contract("cache.update"))
        step.store(self.state, key_states.detach(), value_states.detach())
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.state.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1


def broken_contract(where: str) -> str:
    installed = version("transformers")
    return (
        f"transformers {installed} did not bring learnkv's handle to {where}, so nothing can be evicted; learnkv {__version__} "
        f"was written for transformers {TESTED}: install that version, or a learnkv for {installed}"
    )


class EvictionCache(Cache):
    """Holds what its policy keeps; `with attach(model): model.generate(ids, cache=EvictionCache(policy, model))`.

    policy  selects after every prefill (a forward of several tokens, or the first), which attends with its whole chunk;
            None keeps everything
    decode  selects every `interval` forwards of one token; None means that `policy` goes on with the budget of the last prefill
    positions  "original": keys keep the RoPE position they were born with; "renumbered": attention and scorers see them as if evicted
            tokens had never been, so that a stream may go on past the model's positions; costs a copy of the layer's keys a forward
    frozen  nothing is evicted while True
    prefill_length  columns that a prompt in chunks will have brought, padding and all before it included, where the caller announces it:
            scorers that run rows after the prompt then do so once, after its last chunk, and evict nothing before; until `reset`

    Sliding-window layers stay transformers' own.  A Ratio is resolved at each prefill on the row's tokens so far, and holds until the next;
    that of a `decode` given by itself is resolved again at each of its selections, so that what is held grows with the row.
    """

    def __init__(
        self,
        policy: Policy | None,
        model: PreTrainedModel,
        decode: Policy | None = None,
        positions: Literal["original", "renumbered"] = "original",
    ) -> None:
        super().__init__(layers=cache_layers(model))
        if positions not in ("original", "renumbered"):
            raise ValueError(f"positions={positions!r} is neither 'original' nor 'renumbered'")
        self.frozen = False
        self.shape = kv_shape(model)
        self.take_policies(bind([policy, policy if decode is None else decode], model))
        self.decodes_by_itself = decode is not None
        scorers = [seat.scorer for seat in self.seats]
        self.frequencies = frequencies_for(model, scorers) if positions == "renumbered" else None
        self.reset()

    def take_policies(self, policies: Sequence[Policy | None]) -> None:
        """Bound policies, prefill's and decode's first, and a seat for each of their scorers."""
        self.policies = list(policies)
        self.seats: list[Seat] = []
        start = 0
        for scorer in {id(policy.scorer): policy.scorer for policy in policies if policy is not None}.values():
            self.seats.append(Seat(scorer, slice(start, start + scorer.memory_size)))
            start += scorer.memory_size

    @property
    def states(self) -> list[LayerState]:
        """The evictable layers."""
        return [layer.state for layer in self.layers if isinstance(layer, EvictionLayer)]

    @property
    def sliding(self) -> list[DynamicSlidingWindowLayer]:
        """The layers that are transformers' own."""
        return [layer for layer in self.layers if isinstance(layer, DynamicSlidingWindowLayer)]

    # ---- what is held

    def lengths(self) -> Tensor:
        """[layers, B, H] int64 tokens held by each head of each evictable layer."""
        return torch.stack([pages.lengths.cpu() for pages in self.held_pages()])

    def kept_positions(self) -> list[Tensor]:
        """Per evictable layer [B, H, L] int32: which of their row's real tokens are held, ascending; -1 past a head's last."""
        return [pages.slots().positions for pages in self.held_pages()]

    def held_pages(self) -> list[Pages]:
        self.refuse_half_run()
        if any(state.pages is None for state in self.states):
            raise ValueError("this EvictionCache is empty; run a forward or generate with it first")
        return [state.held for state in self.states]

    def nbytes(self) -> int:
        """Bytes of all storages held: keys, values, positions, memory, tables, lengths, last queries; sliding layers too."""
        tensors = [t for state in self.states for t in state.tensors()]
        tensors += self.sliding_tensors()
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def sliding_tensors(self) -> list[Tensor]:
        return [t for layer in self.sliding for t in (layer.keys, layer.values) if t is not None]

    def sliding_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.sliding_tensors())

    def report(self) -> MemoryReport:
        """What is held now, by layer and head, and the most that ever was; print it, or `draw` it."""
        pages = self.held_pages()
        nbytes = torch.stack([p.counts.cpu() * p.pool.page_bytes for p in pages])
        total = self.nbytes()
        return MemoryReport(self.lengths(), nbytes, self.num_seen.cpu(), total, max(self.peak, total))

    def pin(self, row: int, start: int, stop: int) -> None:
        """Tokens start..stop - 1 of a row, counted over its real tokens, stay inside the budget until `reset`; they may be yet to come.

        Rows are those that the model sees: `generate` makes num_beams or num_return_sequences rows of each prompt, one after the other.
        Pins that a budget does not hold stay above it, and a warning says so once.
        """
        for name, value in {"row": row, "start": start, "stop": stop}.items():
            check_count(f"pin: {name}", value)
        if row < 0 or start < 0 or stop <= start:
            raise ValueError(f"pin(row={row}, start={start}, stop={stop}): give a row from 0, and 0 <= start < stop")
        if self.get_seq_length() and row >= len(self.num_seen):
            raise ValueError(f"pin(row={row}): this cache holds {len(self.num_seen)} rows")
        for state in self.states:
            if state.pages is not None and not state.pages.holds(row, start, min(stop, int(self.num_seen[row]))):
                raise ValueError(f"pin(row={row}, start={start}, stop={stop}): layer {state.index} evicted some of it; pin before that")
        self.pins.append((row, start, stop))

    def reset(self) -> None:
        """As new: nothing held, nothing pinned."""
        self.layers = [empty_layer(layer) for layer in self.layers]
        self.num_seen = self.next_rope = torch.zeros(0, dtype=torch.int64)
        self.budgets: list[Tensor | None] = [None for _ in self.policies]
        self.steps_since_prefill = 0
        self.pins: list[tuple[int, int, int]] = []
        self.told_of_pins = False
        self.prefill_length: int | None = None
        self.unprobed: list[Tensor] = []  # per row, token ids of an announced prompt so far
        self.peak = 0
        self.step: Step | None = None

    def clone(self) -> EvictionCache:
        """The same as it is now; pages are shared until one of the two writes on them: no question to a prefix copies all of it."""
        self.refuse_half_run()
        other = copy.copy(self)
        other.layers = [clone_layer(layer) for layer in self.layers]
        other.budgets, other.pins = list(self.budgets), list(self.pins)
        return other

    def __deepcopy__(self, memo: dict) -> EvictionCache:
        return self.clone()

    # ---- other rows

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row beam_idx[b] was, as beam search asks; rows that were one share their pages until they write."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        if repeats < 1:
            raise ValueError(f"repeats={repeats} leaves no row of {len(self.num_seen)}; give 1 or more, or reset() the cache")
        self.batch_select_indices(torch.arange(len(self.num_seen)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The rows `indices` [b], in this order."""
        self.refuse_half_run()
        if len(self.num_seen) and not len(indices):
            raise ValueError(f"this EvictionCache holds {len(self.num_seen)} rows and 0 are asked for; name 1 row or more, or reset() it")
        indices = torch.arange(len(self.num_seen))[indices.cpu()] if len(self.num_seen) else indices[:0].cpu()
        for state in self.states:
            if state.pages is not None:
                state.pages = state.pages.rows(indices.to(state.pages.table.device))
            if state.queries is not None:
                state.queries = state.queries[indices]
        for layer in self.sliding:
            layer.batch_select_indices(indices)
        self.num_seen, self.next_rope = self.num_seen[indices], self.next_rope[indices]
        self.budgets = [None if budget is None else budget[indices] for budget in self.budgets]
        self.pins = [(b, start, stop) for b, old in enumerate(indices.tolist()) for row, start, stop in self.pins if row == old]
        self.unprobed = [self.unprobed[b] for b in indices.tolist()] if self.unprobed else []

    # ---- what is refused

    def activate_past_recording(self) -> NoReturn:
        raise ValueError("an EvictionCache can't take drafted tokens back; generate without assistant_model and prompt_lookup_num_tokens")

    def crop(self, tokens_to_remove: int) -> NoReturn:
        raise ValueError("an EvictionCache can't be cropped: tokens were evicted for the later ones; clone() it before they come")

    # ---- one forward

    def begin(self, real: Tensor, rope: Tensor, token_ids: Tensor | None, attention_mask: Tensor | None) -> Step:
        """Opens a forward: real [B, T] bool, rope [B, T] RoPE positions, token_ids [B, T], attention_mask [B, columns + T]."""
        self.refuse_half_run()
        B, T = real.shape
        first = not self.get_seq_length() and not len(self.num_seen)
        seen, next_rope = (real.new_zeros(B, dtype=torch.int64) if first else x.to(real.device) for x in (self.num_seen, self.next_rope))
        if not first and not torch.is_inference_mode_enabled() and self.is_inference():
            raise ValueError(
                "this EvictionCache, or a clone that shares its pages, was filled inside torch.inference_mode(), and torch lets nobody "
                "write on it outside; go on inside it, or run all clones under torch.no_grad()"
            )
        if len(seen) != B:
            raise ValueError(f"this EvictionCache holds {len(seen)} rows and the forward has {B}; use a new cache, or reset() this one")
        lost = [pin for pin in self.pins if pin[0] >= B]
        if lost:
            raise ValueError("pin(row={}, start={}, stop={}): the forward has {} rows, counted from 0".format(*lost[0], B))
        columns, announced, num_new = self.get_seq_length(), self.prefill_length or 0, real.sum(-1)
        step = Step(
            seats=self.seats,
            num_layers=len(self.states),
            window=max((seat.scorer.observation_window for seat in self.seats), default=0),
            positions=torch.where(real, seen[:, None] + real.cumsum(-1) - 1, -1),
            num_new=num_new,
            num_seen=seen + num_new,
            next_rope=torch.maximum(next_rope, rope.masked_fill(~real, -1).amax(-1) + 1),
            prefill=T > 1 or first or columns < announced,
            complete=columns + T >= announced,
            token_ids=token_ids,
            attention_mask=attention_mask,
            frequencies=self.frequencies,
        )
        if "rope_offset" in step.needs:
            self.refuse_jumps((seen > 0) & (step.num_new > 0) & (step.next_rope - step.num_seen != next_rope - seen))
        if "token_ids" in step.needs and token_ids is None:
            raise ValueError(f"{names(self.seats)}: a scorer reads token ids; call the model with input_ids, not inputs_embeds")
        step.targets, step.probes = self.targets(step), self.probes(step)
        step.layer_bytes = {state.index: state.nbytes for state in self.states}
        step.sliding_bytes = self.sliding_bytes()
        self.step = step
        return step

    def is_inference(self) -> bool:
        """Whether something of what is held was made inside torch.inference_mode()."""
        pools = (state.pages.pool for state in self.states if state.pages is not None)
        return self.num_seen.is_inference() or any(pool.keys.is_inference() for pool in pools)

    def refuse_half_run(self) -> None:
        if self.step is not None:
            raise ValueError(
                "a forward with this EvictionCache stopped half way, so its layers differ; reset() it or use a clone from before"
            )

    def refuse_jumps(self, moved: Tensor) -> None:
        """moved [B] bool, the rows whose RoPE positions lie further from their positions than before."""
        if moved.any():
            raise ValueError(
                f"{names(self.seats)}: RoPE positions of row {int(moved.nonzero()[0])} jump between forwards, as they do where pads lie "
                "inside a row; pass position_ids that count real tokens, as generate does"
            )

    def targets(self, step: Step) -> list[Target]:
        """The selection due after this forward, if it is prefill's or decode's turn."""
        if step.prefill:
            self.budgets = [None if policy is None else budgets.resolve(policy.budget, step.num_seen) for policy in self.policies]
        self.steps_since_prefill = 0 if step.prefill else self.steps_since_prefill + 1
        policy, budget = self.policies[not step.prefill], self.budgets[not step.prefill]
        if self.frozen or policy is None or budget is None or self.steps_since_prefill % policy.interval or step.empty:
            return []
        if not step.complete and self.seats[self.seat_of(policy)].probes:
            return []
        if self.decodes_by_itself and not step.prefill:
            budget = budgets.resolve(policy.budget, step.num_seen)
        self.tell_of_pins(policy, budget, step)
        return [self.target(policy, budget, self.states, step)]

    def tell_of_pins(self, policy: Policy, budget: Tensor, step: Step) -> None:
        """Warns, once until `reset`, where pins keep a row above its budget."""
        rows = sorted({row for row, _, _ in self.pins if row < len(budget)})
        for row in rows if not self.told_of_pins else []:
            n = int(step.num_seen[row])
            pins = [(start, min(stop, n)) for other, start, stop in self.pins if other == row]
            kept = covered([(0, min(policy.num_sinks, n)), *pins, (max(0, n - policy.num_recent), n)])
            if kept > budget[row]:
                self.told_of_pins = True
                warnings.warn(
                    f"row {row} keeps {kept} tokens in each head for its pins, sinks and recent window, more than its budget of "
                    f"{int(budget[row])}; pin fewer, or raise the budget",
                    stacklevel=2,
                )
                return

    def target(self, policy: Policy, budget: Tensor, states: list[LayerState], step: Step) -> Target:
        return Target(states, policy, self.seat_of(policy), budget, self.pins, over_budget(self.states, step.num_new, budget, policy))

    def seat_of(self, policy: Policy) -> int:
        return next(i for i, seat in enumerate(self.seats) if seat.scorer is policy.scorer)

    def probes(self, step: Step) -> list[tuple[int, int, Probe]]:
        """(seat, row, probe) of the scorers that want rows run after this prefill, counted in positions of the row.

        Of an announced prompt the token ids are kept until it is complete.
        """
        asking = [(i, seat.scorer) for i, seat in enumerate(self.seats) if seat.probes]
        if self.frozen or not step.prefill or not asking:
            return []
        if step.token_ids is None:
            raise ValueError(f"{names(self.seats)}: a scorer runs tokens after the prompt; call with input_ids, not inputs_embeds")
        prompts = [ids[positions >= 0] for ids, positions in zip(step.token_ids, step.positions, strict=True)]
        if self.unprobed:
            prompts = [torch.cat(parts) for parts in zip(self.unprobed, prompts, strict=True)]
        self.unprobed = [] if step.complete else prompts
        found = []
        for b, prompt in enumerate(prompts if step.complete else []):
            before, rope = int(step.num_seen[b]) - len(prompt), int(step.next_rope[b]) - len(prompt)
            for i, scorer in asking:
                for p in scorer.probe(prompt) if len(prompt) else []:
                    found.append((i, b, replace(p, start=p.start + before, stop=p.stop + before, position=p.position + rope)))
        return found

    @torch.no_grad()
    def finish_forward(self, model: PreTrainedModel, attach: Attach) -> None:
        """What spans the layers, after the model's forward: probe rows, then the selections that waited for all layers."""
        step = self.step
        assert step is not None, "begin comes before"
        missing = [state.index for state in self.states if state.index not in step.attended]
        if missing:
            raise RuntimeError(broken_contract(f"the attention of evictable layers {missing}"))
        for seat, row, probe in step.probes:
            self.run_probe(model, ProbeStep(step, seat, row, probe), attach)
        with as_typed(step.positions.device):
            step.select_waiting(self.states)
        self.num_seen, self.next_rope, self.step = step.num_seen, step.next_rope, None
        self.peak = max(self.peak, step.peak + max(step.sliding_bytes, self.sliding_bytes()))

    def run_probe(self, model: PreTrainedModel, probe: ProbeStep, attach: Attach) -> None:
        """Runs a probe's rows through the decoder, or its own, over one row; all that changes is its scorer's memory."""
        sliding = [(layer, vars(layer).copy()) for layer in self.sliding]
        for layer, before in sliding:
            layer.keys, layer.values = (before[name][probe.row : probe.row + 1] for name in ("keys", "values"))
        refuse_late_rows(model, probe.probe)
        decoder = model if probe.probe.decoder is None else cast(PreTrainedModel, probe.probe.decoder)
        rows = probe.probe.rows.to(probe.base.positions.device)[None]
        mask = probe.base.attention_mask
        if mask is not None:
            mask = torch.cat([mask[probe.row : probe.row + 1], mask.new_ones(rows.shape[:2])], 1)
        rope = torch.arange(rows.shape[1], device=rows.device)[None] + probe.probe.position
        token = running.set(probe)
        try:
            with attach(decoder):
                decoder.forward(**as_input(rows, decoder), attention_mask=mask, position_ids=rope, cache=self, use_cache=True)
        finally:
            running.reset(token)
            for layer, before in sliding:
                vars(layer).update(before)


def as_input(rows: Tensor, decoder: PreTrainedModel) -> dict[str, Tensor]:
    """rows [1, R] token ids or [1, R, M] embeddings by the name that a decoder knows them by."""
    return {"inputs_embeds": rows.to(decoder.dtype)} if rows.is_floating_point() else {"input_ids": rows}


def refuse_late_rows(model: PreTrainedModel, probe: Probe) -> None:
    """Raises a ValueError where a probe's rows end past the model's positions: what they would attend to means nothing."""
    end, limit = probe.position + len(probe.rows), max_positions(model)
    if end > limit:
        raise ValueError(
            f"a probe of {len(probe.rows)} rows after the prompt ends at position {end}, the model has {limit}; "
            "shorten the prompt, take smaller probes (kvzip: chunk_size), or a method that runs nothing after it"
        )


def covered(spans: Sequence[tuple[int, int]]) -> int:
    """How many numbers lie in some span start..stop - 1."""
    total = end = 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def names(seats: Sequence[Seat]) -> str:
    return ", ".join(type(seat.scorer).__name__ for seat in seats)


Layer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer  # transformers' own three


def cache_layers(model: PreTrainedModel) -> list[Layer]:
    """transformers' own layers for this model, full-attention ones replaced by evictable ones."""
    layers = DynamicCache(config=model.config).layers
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)})
    full = evictable_layers(model)
    if unknown or not full:
        problem = f"keeps {', '.join(unknown)}" if unknown else "has sliding-window layers only"
        raise ValueError(f"{type(model).__name__} {problem}; EvictionCache serves full-attention layers, with sliding ones beside them")
    for index, i in enumerate(full):
        layers[i] = EvictionLayer(LayerState(index))
    return layers


def empty_layer(layer: Layer) -> Layer:
    """A layer of the same kind that has seen nothing."""
    if isinstance(layer, EvictionLayer):
        return EvictionLayer(LayerState(layer.state.index))
    assert isinstance(layer, DynamicSlidingWindowLayer), "cache_layers lets no other in"
    return DynamicSlidingWindowLayer(sliding_window=layer.sliding_window)


def clone_layer(layer: Layer) -> Layer:
    """A layer that holds the same."""
    return EvictionLayer(layer.state.clone()) if isinstance(layer, EvictionLayer) else copy.deepcopy(layer)


def bind(policies: Sequence[Policy | None], model: PreTrainedModel) -> list[Policy | None]:
    """The policies with scorers ready for the model; equal scorers (the same object, or equal settings) become one."""
    bound: dict[Scorer, Scorer] = {}
    for policy in policies:
        refuse_other_than_policy(policy)
        if policy is not None and policy.scorer not in bound:
            refuse_needs(policy.scorer, model)
            bound[policy.scorer] = policy.scorer.bind(model)
    return [None if policy is None else replace(policy, scorer=bound[policy.scorer]) for policy in policies]


def refuse_other_than_policy(policy: Policy | None) -> None:
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(
            f'an EvictionCache takes a Policy, this is {given(policy)}; methods.METHODS["snapkv"](budget=512) makes one, '
            'and learnkv.evict(model, "snapkv", budget=512) goes by name'
        )


def refuse_needs(scorer: Scorer, model: PreTrainedModel) -> None:
    """Raises a ValueError where a scorer reads what learnkv can't take from this model."""
    layers = [block.get_submodule("self_attn") for block in blocks_of(decoder_of(model))]
    if "queries_pre_rope" in scorer.needs and any(query_projection(layer) is None for layer in layers):
        raise ValueError(
            f"{type(scorer).__name__} reads queries before rotation, and {type(model).__name__} projects them in a way that learnkv does "
            "not know (neither q_proj nor qkv_proj with queries, keys and values side by side); take another method"
        )
    if {"queries_pre_rope", "rope_offset"} <= scorer.needs and not removable_frequencies(model):
        raise ValueError(
            f"{type(scorer).__name__} turns keys by one RoPE, and that of {type(model).__name__} is interleaved, or not in all layers; "
            "take another method"
        )


class SharedPrefill(EvictionCache):
    """The full cache of one prefill, from which several caches take what their policies keep."""

    def __init__(self, policies: Sequence[Policy | None], model: PreTrainedModel) -> None:
        super().__init__(None, model)
        self.take_policies(bind(policies, model))
        self.caches = [EvictionCache(None, model) for _ in policies]
        for cache, policy in zip(self.caches, self.policies, strict=True):
            cache.take_policies([policy, policy])

    def targets(self, step: Step) -> list[Target]:
        targets = []
        for cache, policy in zip(self.caches, self.policies, strict=True):
            if policy is not None:
                budget = budgets.resolve(policy.budget, step.num_seen)
                cache.budgets = [budget, budget]
                targets.append(self.target(policy, budget, cache.states, step))
        return targets

    def hand_out(self) -> list[EvictionCache]:
        """The caches, each with what this one knows and they lack."""
        for cache, policy in zip(self.caches, self.policies, strict=True):
            cache.num_seen, cache.next_rope, cache.frozen = self.num_seen, self.next_rope, True
            cache.pins = list(self.pins)
            seat = None if policy is None else self.seats[self.seat_of(policy)]
            for mine, shared in zip(cache.states, self.states, strict=True):
                mine.columns = shared.columns
                mine.queries = last_queries(shared, seat)
                if mine.pages is None:
                    columns = slice(0, 0) if seat is None else seat.columns
                    mine.pages = shared.held.kept(shared.held.all_slots()[1], 1, columns)
            for own, layer in zip(cache.sliding, self.sliding, strict=True):
                vars(own).update(vars(copy.deepcopy(layer)))
        return self.caches


def last_queries(state: LayerState, seat: Seat | None) -> Tensor:
    """[B, Q, W, D] of a layer's last queries, as many as one scorer reads."""
    assert state.queries is not None
    window = 0 if seat is None else seat.scorer.observation_window
    return state.queries[:, :, max(0, state.queries.shape[2] - window) :].clone()


@torch.no_grad()
def prefill_many(
    model: PreTrainedModel,
    input_ids: Tensor,
    policies: Sequence[Policy | None],
    attention_mask: Tensor | None = None,
    pins: Sequence[tuple[int, int]] = (),
) -> list[EvictionCache]:
    """One full-cache prefill of input_ids [B, T], and a cache per policy that holds what it keeps, as its own prefill would have kept.

    Equal scorers remember, probe and score once; None keeps everything.  The caches are frozen: question and answer can
    follow and nothing more is evicted; `cache.frozen = False` lets a policy go on.  Call it inside `attach(model)`.

    pins  (start, stop) of tokens that stay in every row, above a budget that does not hold them
    """
    if not policies:
        raise ValueError("prefill_many got no policies; give at least one")
    shared = SharedPrefill(policies, model)
    for row in range(len(input_ids)):
        for start, stop in pins:
            shared.pin(row, start, stop)
    decoder_of(model)(input_ids=input_ids, attention_mask=attention_mask, cache=shared, use_cache=True)
    return shared.hand_out()


def together(caches: Sequence[EvictionCache], model: PreTrainedModel) -> EvictionCache:
    """A frozen copy that holds each cache as a row: one forward then asks all of them the same question.

    caches  frozen ones that saw equally many columns, as `prefill_many` returns them
    """
    columns = [cache.get_seq_length() for cache in caches]
    if not all(cache.frozen for cache in caches) or len(set(columns)) != 1:
        raise ValueError(f"together takes frozen caches of one length, these saw {columns} columns; take them from one prefill_many")
    one = EvictionCache(None, model)
    one.frozen = True
    one.num_seen = torch.cat([cache.num_seen for cache in caches])
    one.next_rope = torch.cat([cache.next_rope for cache in caches])
    for state, parts in zip(one.states, zip(*(cache.states for cache in caches), strict=True), strict=True):
        state.pages, state.columns = Pages.stacked([part.held for part in parts]), parts[0].columns
    for own, layers in zip(one.sliding, zip(*(cache.sliding for cache in caches), strict=True), strict=True):
        vars(own).update(vars(copy.deepcopy(layers[0])))
        own.keys, own.values = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("keys", "values"))
    return one
