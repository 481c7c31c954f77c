"""Seconds of a step: a roofline over what it reads, multiplies and moves over the link."""

from __future__ import annotations

import math
from dataclasses import dataclass

from learnkv.serving.caches import CacheModel
from learnkv.serving.cards import Card
from learnkv.serving.shapes import Shape


@dataclass
class Work:
    """What steps do, in sums; a step of nothing is a step without requests.

    steps            how many; a sum of floats where it is a bound
    tokens           through the weights; `prefilled` of them in prefill chunks
    rows             sampled from
    decode_slots     slots that decoding tokens attend to
    prefill_slots    slots that tokens of chunks attend to, summed over tokens
    earlier_slots    slots that chunks find there and read once each
    new_slots        slots written
    swapped          bytes over the link that the step waits for
    """

    steps: float = 1
    tokens: float = 0
    prefilled: float = 0
    rows: float = 0
    decode_slots: float = 0
    prefill_slots: float = 0
    earlier_slots: float = 0
    new_slots: float = 0
    swapped: float = 0


@dataclass(frozen=True)
class Machine:
    """A model on cards, with its cache: what each part of a step costs.

    Weights and attention run one after the other, each at its own roof; fetching keys and values from the host overlaps with both, and
    swapping whole requests does not.  Several cards share everything evenly, at no cost.

    weights      bytes that a step reads
    flops_token  operations of a token in the weights; flops_row of a row in the output
    flops_slot   operations of one token of all query heads of a KV head on one slot
    step_s       seconds that a step takes on the host besides
    """

    cache: CacheModel
    bytes_s: float
    flops_s: float
    link_s: float
    weights: float
    flops_token: float
    flops_row: float
    flops_slot: float
    step_s: float = 0.0

    def seconds(self, work: Work) -> float:
        """What one step takes; of several together no more than they take: a maximum of sums is at most the sum of maxima."""
        cache = self.cache
        extra = cache.prefill - 1
        operations = (work.tokens + extra * work.prefilled) * self.flops_token + work.rows * self.flops_row
        linear = max(work.steps * self.weights / self.bytes_s, operations / self.flops_s)
        moved = work.decode_slots * cache.read + work.earlier_slots * cache.reread + work.new_slots * cache.slot
        attended = (work.decode_slots * cache.attended + work.prefill_slots * cache.prefill) * self.flops_slot
        computed = linear + max(moved / self.bytes_s, attended / self.flops_s) + work.steps * self.step_s
        linked = work.decode_slots * cache.fetched + work.earlier_slots * cache.refetched + work.new_slots * cache.stored
        if linked or work.swapped:
            return max(computed, linked / self.link_s) + work.swapped / self.link_s
        return computed


class Impossible(ValueError):
    """A policy that a machine cannot run at all."""


def machine_of(shape: Shape, card: Card, cache: CacheModel, *, cards: int = 1, weight_bits: int = 16, step_s: float = 0.0) -> Machine:
    """Raises Impossible where the cache needs a link that the card does not have."""
    if cache.host and not card.link:
        raise Impossible(f"{card.name} shares its memory with the host: there is nowhere to offload to")
    return Machine(
        cache=cache,
        bytes_s=card.bytes * cards,
        flops_s=card.flops * cards,
        link_s=card.link * cards or math.inf,
        weights=(shape.body_weights + shape.head_weights) * weight_bits / 8,
        flops_token=2.0 * shape.body_weights,
        flops_row=2.0 * shape.head_weights,
        flops_slot=4.0 * shape.head_dim * shape.group,
        step_s=step_s,
    )
