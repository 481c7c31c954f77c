"""What methods add to a prefill: prompts of the same tokens with each method and without any, in turns in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from learnkv.budgets import Ratio
from learnkv.evaluation.contenders import Contender, contenders_of, entries_of
from learnkv.evaluation.speed import BenchSettings, Figure, in_turns, prefill, tokens_of
from learnkv.geometry import max_positions
from learnkv.models import PreTrainedModel
from learnkv.prompts.prompt import Tokenizer
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache

BOUNDS = {"lookaheadkv": "at most 1.10 x", "kvp": "at most 1.05 x", "fast_kvzip": "at most 1.05 x"}


def overhead(model: PreTrainedModel, tokenizer: Tokenizer, settings: BenchSettings) -> Iterator[Figure]:
    """A prefill into transformers' DynamicCache, then each method's, with its scoring, extra passes and eviction."""
    refuse_untimed(settings.methods)
    contenders = contenders_of(settings.methods, model, tokenizer, always=())
    refuse_beyond(model, settings.overhead_tokens)
    ids = tokens_of(model, 1, settings.overhead_tokens)
    runs: dict[str, Callable[[], object]] = {"plain": lambda: prefill(model, ids, None)}
    for contender in contenders:
        runs[name_of(contender)] = partial(evicted_prefill, model, ids, contender, settings.kept)
    with attach(model):
        seconds = in_turns(runs, settings.turns)
    yield Figure(f"prefill of {settings.overhead_tokens:,} tokens, DynamicCache", f"{seconds['plain'] * 1000:.0f} ms")
    for contender in contenders:
        taken = seconds[name_of(contender)]
        value = f"{taken * 1000:.0f} ms, {taken / seconds['plain']:.2f} x DynamicCache's"
        yield Figure(f"prefill, `{name_of(contender)}` to {settings.kept:.0%}", value, BOUNDS.get(contender.scorer, ""))


def name_of(contender: Contender) -> str:
    """Its line; of several training runs, which share one, the run's folder too."""
    return contender.line if contender.run in contender.line else f"{contender.line}, {contender.run}"


def refuse_beyond(model: PreTrainedModel, num_tokens: int) -> None:
    if num_tokens > max_positions(model):
        raise ValueError(f"bench.overhead_tokens={num_tokens} is above the model's {max_positions(model)} positions; give fewer")


def refuse_untimed(methods: Sequence[str]) -> None:
    """Raises a ValueError for methods that cannot be timed; asks for no model."""
    entries = entries_of(methods)
    if not entries:
        raise ValueError("bench.methods is empty, so there is nothing to time; name methods as in evaluate.methods")
    for entry in entries:
        if entry.name in WHY:
            raise ValueError(f"bench.methods names {entry.name}, which {WHY[entry.name]}; leave it out")


WHY = {"full": "evicts nothing", "oracle": "knows what is asked afterwards, and here nothing is"}


def evicted_prefill(model: PreTrainedModel, ids: Tensor, contender: Contender, kept: float) -> None:
    prefill(model, ids, EvictionCache(contender.at(Ratio(kept)), model))
