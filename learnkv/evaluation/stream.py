"""Perplexity of a text far longer than the model's positions, in a cache that never holds more than its budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learnkv import methods
from learnkv.evaluation.speed import Figure
from learnkv.geometry import max_positions
from learnkv.models import PreTrainedModel
from learnkv.prompts.haystack import documents
from learnkv.prompts.prompt import Tokenizer
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache

Positions = Literal["original", "renumbered"]
CONTENDERS: tuple[tuple[str, Positions], ...] = (
    ("streaming_llm", "renumbered"),
    ("streaming_llm", "original"),
    ("sliding_window", "original"),
    ("snapkv", "renumbered"),
    ("snapkv", "original"),
)


@dataclass
class StreamSettings:
    """The text and what is held of it."""

    num_tokens: int = 32768  # of the text
    budget: int = 1024  # tokens per KV head
    chunk: int = 256  # tokens of a forward

    def __post_init__(self) -> None:
        for name, least in {"num_tokens": 2, "chunk": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"stream.{name}={getattr(self, name)} must be {least} or more")
        for name, _ in CONTENDERS:
            methods.policy(name, self.budget)


def perplexities(
    model: PreTrainedModel, tokenizer: Tokenizer, settings: StreamSettings, progress: Callable[[list], Iterable] = iter
) -> Iterator[Figure]:
    """One line per contender: its perplexity over each run of as many tokens as the model has positions; the full cache over the first.

    progress  wraps the list of a contender's chunks, as tqdm does
    """
    limit = int(min(max_positions(model), settings.num_tokens))
    ids = text_of(tokenizer, settings.num_tokens).to(model.device)
    yield Figure("full cache, while it has positions", listed(losses(model, ids[:limit], None, settings.chunk, progress), limit))
    for name, positions in CONTENDERS:
        cache = EvictionCache(methods.policy(name, settings.budget), model, positions=positions)
        nll = losses(model, ids, cache, settings.chunk, progress)
        yield Figure(f"`{name}` to {settings.budget:,} tokens, {positions} positions", listed(nll, limit))


def text_of(tokenizer: Tokenizer, num_tokens: int) -> Tensor:
    """[num_tokens] int64: held-out prose, then held-out docstrings, one document after the other."""
    ids: list[int] = []
    for document in [*documents("prose", "heldout"), *documents("docstrings", "heldout")]:
        ids += tokenizer(" ".join(document) + "\n\n", add_special_tokens=False)["input_ids"]
        if len(ids) >= num_tokens:
            return torch.tensor(ids[:num_tokens])
    raise ValueError(f"stream.num_tokens={num_tokens}, but this Python's own texts give {len(ids)}; lower it")


@torch.no_grad()
def losses(model: PreTrainedModel, ids: Tensor, cache: EvictionCache | None, chunk: int, progress: Callable[[list], Iterable]) -> Tensor:
    """[n - 1] float32 NLL of each token of ids [n] after all before it that are held."""
    cache = EvictionCache(None, model) if cache is None else cache
    found = []
    with attach(model):
        for inputs, targets in progress(list(zip(ids[:-1].split(chunk), ids[1:].split(chunk), strict=True))):
            logits = model(inputs[None], cache=cache).logits[0].float()
            found.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(found)


def listed(nll: Tensor, run: int) -> str:
    """The perplexity of each run of so many tokens."""
    return " / ".join(f"{part.mean().exp():.2f}" for part in nll.split(run))
