"""The last phase of `bench kernels`: a model of random weights decodes after long prompts, with its full cache and with evicted ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from learnkv import methods
from learnkv.evaluation.speed import Figure, decode, in_turns, tokens_of
from learnkv.models import PreTrainedModel, random_llama
from learnkv.policy import Policy
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache, prefill_many


@dataclass(frozen=True)
class Whole:
    """A model of random weights, and what it is run on.

    heads    KV heads
    group    query heads to each
    tokens   lengths of the prompts
    budgets  tokens per KV head that SnapKV keeps
    steps    tokens decoded in one turn
    """

    layers: int
    heads: int
    group: int
    head_dim: int
    tokens: tuple[int, ...]
    budgets: tuple[int, ...]
    steps: int
    turns: int = 2


GPU = Whole(32, 8, 4, 128, (32768, 131072), (8192, 4096, 1024), 32)  # an 8 B model
LAPTOP = Whole(2, 3, 3, 64, (2048,), (512, 128), 8)


def whole_model(device: torch.device, dtype: torch.dtype, whole: Whole) -> Iterator[Figure]:
    """Per prompt: what each cache holds, how fast it decodes, and on a GPU the most that prefill and compaction took."""
    shape = whole.layers, whole.heads, whole.group, whole.head_dim
    model = random_llama(*shape, positions=2 * max(whole.tokens), device=device, dtype=dtype)
    for tokens in whole.tokens:
        ids = tokens_of(model, 1, tokens)
        policies: dict[str, Policy | None] = {"full": None}
        policies |= {f"SnapKV to {budget:,}": methods.policy("snapkv", budget) for budget in whole.budgets if budget < tokens}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with attach(model):
            caches = dict(zip(policies, prefill_many(model, ids, list(policies.values())), strict=True))
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device) / 2**30
                yield Figure(f"one prefill of {tokens:,} tokens for all of these caches", f"{peak:.1f} GiB at most, weights included")
            yield from decoded(model, caches, tokens, whole)


def decoded(model: PreTrainedModel, caches: dict[str, EvictionCache], tokens: int, whole: Whole) -> Iterator[Figure]:
    """One line per cache."""
    token = tokens_of(model, 1, 1)
    held = {name: cache.nbytes() for name, cache in caches.items()}
    runs = {name: (lambda cache=cache: decode(model, token, cache, whole.steps)) for name, cache in caches.items()}
    seconds = in_turns(runs, whole.turns)
    for name, taken in seconds.items():
        value = (
            f"{taken / whole.steps * 1000:.2f} ms a token, {seconds['full'] / taken:.2f} x as fast as full, {held[name] / 2**20:,.1f} MiB"
        )
        yield Figure(f"decode after {tokens:,} tokens, {whole.layers} layers, {name}", value)
