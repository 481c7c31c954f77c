"""What a cache policy costs a server: bytes on the card, on the host and over the link, and how many tokens stay.

Four kinds.  `full` keeps everything.  `evict` keeps a budget per KV head, as learnkv's runtime does.  `offload` holds keys and values in
the host's memory and fetches what a partial key cache says will matter, as InfiniGen (OSDI 2024).  `quantise` keeps everything in few
bits with a scale and a zero per group of 32, as KIVI (arXiv:2402.02750).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from learnkv.serving.cards import Card
from learnkv.serving.shapes import Shape

PAGE = 16  # tokens of one request and KV head, as in learnkv's runtime
WIDTH = 2  # bytes of a number in bfloat16
SCORE = 4  # bytes of the float32 that an evicting cache keeps beside a token
GROUP, SCALES = 32, 4  # numbers that share a scale and a zero, and the bytes of both: KIVI, section 4.1
PARTIAL = 0.2  # of the key columns stay on the card: InfiniGen, partial_weight_ratio
EVERYTHING = 2**31 - 1  # the budget of who evicts nothing


@dataclass(frozen=True)
class CacheModel:
    """Bytes and operations per slot, that is per token and KV head, and the budget.

    keeps       what it does to quality, in words
    loss        its place in the order of what is lost, 0 for nothing
    slot        bytes on the card
    read        bytes that attention moves of a slot in a decode step, on the card; `reread` of a slot held before in a prefill chunk
    fetched     bytes of a slot that a decode step takes over the link; `refetched` likewise a prefill chunk
    stored      bytes of a new slot that go over the link to the host
    host        bytes on the host
    attended    share of a slot's attention operations in a decode step
    prefill     time of a prefill in a full cache's
    budget      tokens per KV head, or a fraction of the request's prompt below 1
    interval    decode steps between evictions
    """

    name: str
    keeps: str
    loss: int
    slot: float
    read: float
    reread: float
    fetched: float = 0.0
    refetched: float = 0.0
    stored: float = 0.0
    host: float = 0.0
    attended: float = 1.0
    prefill: float = 1.0
    budget: float = EVERYTHING
    interval: int = 1

    @property
    def page(self) -> float:
        """Bytes of a page on the card."""
        return PAGE * self.slot

    def tokens(self, prompt: int) -> int:
        """The budget of a request in tokens, as learnkv.budgets resolves it."""
        if self.budget >= 1:
            return int(self.budget)
        share = Fraction(self.budget).limit_denominator(10**6)
        return max(1, prompt * share.numerator // share.denominator)


def full(shape: Shape) -> CacheModel:
    """transformers' or vLLM's cache."""
    size = 2.0 * shape.head_dim * WIDTH
    return CacheModel("full", "keeps every token exactly", 0, slot=size, read=size, reread=size)


def evict(shape: Shape, budget: float, interval: int, prefill: float) -> CacheModel:
    """H2O-like: a score beside each token, read and written at each step; prefill as `learnkv.bench overhead` measured it.

    Prompts are evicted from between their chunks, as in learnkv's runtime: later chunks attend to less, and cost less.
    """
    size = 2.0 * shape.head_dim * WIDTH
    return CacheModel(
        "evict",
        "drops tokens for good",
        3,
        slot=size + SCORE,
        read=size + 2 * SCORE,
        reread=size + 2 * SCORE,
        prefill=prefill,
        budget=budget,
        interval=interval,
    )


def offload(shape: Shape, share: float) -> CacheModel:
    """InfiniGen-like: a share of the tokens is fetched at each step, chosen by a fifth of the key columns.

    A prefill chunk attends to everything, so that what was there before it is fetched whole.  Differs: InfiniGen's first layer fetches
    everything and the others as many tokens as pass a threshold, where all layers fetch the cap here; its prompts come in one chunk.
    """
    size = 2.0 * shape.head_dim * WIDTH
    partial = PARTIAL * size / 2
    return CacheModel(
        "offload",
        "keeps every token on the host, attends to some",
        1,
        slot=partial,
        read=partial + 2 * share * size,  # what was fetched is written once and read once
        reread=2 * size,
        fetched=share * size,
        refetched=size,
        stored=size,
        host=size,
        attended=share + PARTIAL / 2,
    )


def quantise(shape: Shape, bits: int) -> CacheModel:
    """KIVI-like.  Differs: its last 128 tokens in full precision, and the time to unpack, are not counted."""
    size = 2.0 * shape.head_dim * (bits / 8 + SCALES / GROUP)
    return CacheModel("quantise", f"keeps every token in {bits} bits", 2, slot=size, read=size, reread=size)


def pool_pages(cache: CacheModel, card: Card, cards: int, share: float, weights: float, host: float) -> int:
    """Pages that fit beside the weights; of an offloaded cache those that fit the host as well.  0 where the weights fill the card.

    share    of the card's memory that weights and pages may take
    weights  bytes
    host     bytes of the host's memory for keys and values
    """
    pages = max(0, math.floor((cards * card.memory * share - weights) / cache.page))
    return min(pages, math.floor(host / (PAGE * cache.host))) if cache.host else pages
