"""What an answer is worth after eviction: its tokens under teacher forcing, or what a task makes of the answer that the model generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from learnkv.capture import capture, evictable_layers
from learnkv.models import PreTrainedModel
from learnkv.prompts import Encoded, Question
from learnkv.prompts.prompt import Tokenizer
from learnkv.runtime.cache import EvictionCache, together
from learnkv.tasks import TASKS
from learnkv.traces import measure
from learnkv.traces.format import Continuation, Trace
from learnkv.traces.measure import softmax_scales


def judged(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    caches: Sequence[EvictionCache],
    asked: Sequence[tuple[Encoded, Question]],
    task: str,
) -> Iterator[dict]:
    """The figures of a Row for each cache and what it is asked; equal questions lie side by side.

    caches  from one `prefill_many`; they are left as they were
    task    in TASKS, "" where the answer's tokens are matched
    """
    encoded = [e for e, _ in asked]
    forced = teacher_forced(model, caches, encoded)
    if not task or TASKS[task].metric is None:
        for cache, e, (right, nll) in zip(caches, encoded, forced, strict=True):
            accuracy = right.double().mean().item() if task else float(right.all())
            yield {"accuracy": accuracy, "nll": nll, **holdings(cache, e)}
        return
    answers = evicted_further(model, caches, encoded, task) if TASKS[task].decode else generated(model, caches, encoded, task)
    for (ids, cache), (e, question), (_, nll) in zip(answers, asked, forced, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        yield {"accuracy": TASKS[task].score(text, question), "nll": nll, "prediction": text, **holdings(cache, e)}


def teacher_forced(model: PreTrainedModel, caches: Sequence[EvictionCache], encoded: Sequence[Encoded]) -> list[tuple[Tensor, float]]:
    """Which of an answer's tokens [count] are the argmax after those before them, and their mean NLL in nats.

    Each cache is a row of one forward per question.
    """
    found: list[tuple[Tensor, float]] = []
    for e, same in by_question(caches, encoded):
        ids = torch.cat([e.question, e.answer]).expand(len(same), -1)
        logits = model(ids, cache=together(same, model), use_cache=True, logits_to_keep=len(e.answer) + 1).logits[:, :-1]
        for row in logits:  # [count, vocabulary]
            found.append((row.argmax(-1) == e.answer, F.cross_entropy(row.float(), e.answer).item()))
    return found


def generated(
    model: PreTrainedModel, caches: Sequence[EvictionCache], encoded: Sequence[Encoded], task: str
) -> Iterator[tuple[Tensor, EvictionCache]]:
    """The tokens [count] that each cache answers its question with, and the cache; each is a row of one generation per question."""
    for e, same in by_question(caches, encoded):
        ids = torch.cat([e.context, e.question]).expand(len(same), -1)
        answers = greedy(model, together(same, model), ids, TASKS[task].max_new_tokens)
        yield from zip(answers, same, strict=True)


def evicted_further(
    model: PreTrainedModel, caches: Sequence[EvictionCache], encoded: Sequence[Encoded], task: str
) -> Iterator[tuple[Tensor, EvictionCache]]:
    """As `generated`, but each policy goes on evicting while it generates; the caches are as the generation left them."""
    for cache, e in zip(caches, encoded, strict=True):
        own = cache.clone()
        own.frozen = False
        (answer,) = greedy(model, own, torch.cat([e.context, e.question])[None], TASKS[task].max_new_tokens)
        yield answer, own


def greedy(model: PreTrainedModel, cache: EvictionCache, ids: Tensor, max_new_tokens: int) -> Tensor:
    """[rows, count] int64, the argmax at each step after ids [rows, n], up to the end of the turn; rows that end early are padded.

    cache  has seen the first of ids, 1 token or more is new to it
    """
    generate = cast(Callable[..., Tensor], model.generate)
    out = generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=max_new_tokens, do_sample=False)
    return out[:, ids.shape[1] :]


def by_question(caches: Sequence[EvictionCache], encoded: Sequence[Encoded]) -> Iterator[tuple[Encoded, list[EvictionCache]]]:
    """Each question with the caches that are asked it."""
    for _, group in groupby(zip(caches, encoded, strict=True), key=lambda pair: id(pair[1])):
        rows = list(group)
        yield rows[0][1], [cache for cache, _ in rows]


def oracle_utility(model: PreTrainedModel, encoded: Sequence[Encoded]) -> Tensor:
    """[layers, H, n] float32 attention that all questions and answers pay to the context over the full cache: what the oracle knows."""
    nothing = encoded[0].context[:0]
    asked = [Continuation(e.question, e.answer, response=nothing) for e in encoded]
    bare = Trace("", "", "", encoded[0].context, asked)
    scales = softmax_scales(model, evictable_layers(model))
    with capture(model, {"queries"}) as taken:
        full, _ = measure.run(model, bare.ids)
        return measure.future_targets(model, full, bare, "question_answer", "sum", scales, taken)["utility"]


def holdings(cache: EvictionCache, encoded: Encoded) -> dict:
    """What a cache keeps after eviction, the answer's span in particular."""
    lengths = cache.lengths()  # [layers, 1, H]
    return {
        "span_kept": None if encoded.span is None else span_kept(cache.kept_positions(), *encoded.span),
        "kept_mean": lengths.double().mean().item(),
        "kept_max": int(lengths.max()),
        "bytes_held": cache.nbytes(),
    }


def span_kept(kept: Sequence[Tensor], start: int, stop: int) -> float:
    """Share of the tokens [start, stop) among the kept positions (one [1, H, L] per layer), mean over layers and heads."""
    shares = [((positions >= start) & (positions < stop)).sum(-1).double() / (stop - start) for positions in kept]
    return torch.stack(shares).mean().item()
