"""One full-cache pass over a context, one over each continuation, and everything a trace keeps of them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from learnkv import reconstruction
from learnkv.capture import Captured, Want, capture, decoder_of, evictable_layers
from learnkv.models import PreTrainedModel
from learnkv.observation import Probe
from learnkv.projection import output_projections, projected_norms
from learnkv.traces.format import Trace
from learnkv.traces.targets import (
    OVER_QUESTIONS,
    RECONSTRUCTIONS,
    TARGETS,
    Future,
    OverQuestions,
    context_mass,
    cut_positions,
    future_rows,
    utility_cuts,
)

FIELDS: tuple[Want, ...] = ("queries", "hidden", "block_input", "queries_pre_rope")  # tensors of the context that a recipe may ask for
ALSO = (*FIELDS, *(name for name in TARGETS if name != "utility"), *RECONSTRUCTIONS)
WINDOW = 32  # last queries of the context that every trace keeps, so that SnapKV and TOVA can be compared without a model


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    bare: Trace,
    *,
    future: Future,
    max_new_tokens: int,
    over_questions: OverQuestions = "sum",
    cuts: int = 0,
    also: Collection[str] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> Trace:
    """The trace of a bare one (token ids only), with everything that comes from the model.

    The context runs once; each continuation runs over a copy of its cache.

    future          whose attention is the utility, see `targets.future_rows`
    max_new_tokens  of a response that future=response wants and the trace lacks
    over_questions  targets are sums over the continuations, or the largest of them: then what one asks for alone weighs as much as
                    what every one looks at
    cuts            how many earlier ends of the context get a utility too, drawn by the trace's id
    also            names in `ALSO` of what is kept beside keys, values, window, mass and utility
    dtype           of stored keys, values, queries and hidden states; mass and targets are float32
    """
    layers, n = evictable_layers(model), len(bare.ids)
    scales = softmax_scales(model, layers)
    kept: list[Want] = [name for name in FIELDS if name in also]
    repeats = [name for name in RECONSTRUCTIONS if name in also]
    of_rows: set[Want] = {"hidden"} if "reconstruction_plus" in also else set()
    with capture(model, {"queries", *kept, *of_rows}) as taken:
        cache, logits = run(model, bare.ids)
        queries = of_layers(taken.queries, layers)
        fields = {name: stacked(of_layers(getattr(taken, name), layers), dtype) for name in kept}
        keys, values = [cache.layers[i].keys for i in layers], [cache.layers[i].values for i in layers]
        if future == "response":
            bare = answered(model, bare, cache, logits, max_new_tokens)
        wanted = ["utility", *(name for name in TARGETS if name in also)]
        targets = future_targets(model, cache, bare, future, over_questions, scales, taken, wanted)
        targets |= reconstruction_targets(model, cache, bare, scales, taken, repeats) if repeats else {}
    if cuts:
        at = targets["cut_positions"] = cut_positions(n, cuts, seed=int(bare.id, 16) % 2**63)
        per_layer = zip(queries, keys, targets["utility"], scales, strict=True)
        targets["utility_cuts"] = torch.cat([utility_cuts(q, k, u[None], at, s) for q, k, u, s in per_layer], 1)
    measured = replace(
        bare,
        keys=stacked(keys, dtype),
        values=stacked(values, dtype),
        window=stacked([q[:, :, -WINDOW:] for q in queries], dtype),
        mass=torch.cat([context_mass(q, k, s) for q, k, s in zip(queries, keys, scales, strict=True)]),
        targets=targets,
    )
    return replace(measured, **fields)  # type: ignore[arg-type]


def future_targets(
    model: PreTrainedModel,
    cache: object,
    bare: Trace,
    future: Future,
    over_questions: OverQuestions,
    scales: list[float],
    taken: Captured,
    wanted: Sequence[str] = ("utility",),
) -> dict[str, Tensor]:
    """{target: [layers, heads, n] float32} over all continuations; `cache` holds the context and is left as it was."""
    layers, n = evictable_layers(model), len(bare.ids)
    found: dict[str, Tensor] = {}
    for asked in bare.questions:
        rows, first = future_rows(asked, future)
        after = run(model, rows, copy.deepcopy(cache))[0]
        for name in wanted:
            target = TARGETS[name]
            of_layer = [target.of(taken.queries[i][:, :, first:], after.layers[i].keys, n, s) for i, s in zip(layers, scales, strict=True)]
            new = torch.cat(of_layer)
            found[name] = OVER_QUESTIONS[target.over_questions or over_questions](found[name], new) if name in found else new
    return found


def reconstruction_targets(
    model: PreTrainedModel, cache: object, bare: Trace, scales: list[float], taken: Captured, wanted: Sequence[str]
) -> dict[str, Tensor]:
    """{target: [layers, H, n] float32} of the context, chunk by chunk; `cache` holds it and is left as it was."""
    if bare.repeat_whole is None or bare.repeat_onward is None:
        raise ValueError(f"trace {bare.id} does not say how the model is asked to repeat its context; record it again")
    layers, parts = evictable_layers(model), []
    for probe in reconstruction.repetitions(bare.ids, bare.repeat_whole, bare.repeat_onward):
        after = run(model, probe.rows, copy.deepcopy(cache))[0]
        rows = [repeating_rows(probe, taken.queries[i], after.layers[i].keys, s) for i, s in zip(layers, scales, strict=True)]
        part = {}
        if "reconstruction" in wanted:
            part["reconstruction"] = torch.cat([reconstruction.attention(r) for r in rows])
        if "reconstruction_plus" in wanted:
            values = [after.layers[i].values[:, :, : len(bare.ids)] for i in layers]
            norms = [projected_norms(v, w) for v, w in zip(values, output_projections(model), strict=True)]
            hidden = [taken.hidden[i] for i in layers]
            part["reconstruction_plus"] = torch.cat(list(map(reconstruction.attention_plus, rows, hidden, norms)))
        parts.append({name: found[..., probe.start : probe.stop] for name, found in part.items()})
    return {name: torch.cat([part[name] for part in parts], -1) for name in wanted}


def repeating_rows(probe: Probe, queries: Tensor, keys: Tensor, scale: float) -> reconstruction.Rows:
    """What one layer shows of a probe's rows: queries [1, Q, R, D], keys [1, H, n + R, D] of the context and the rows."""
    context, own = keys.split([keys.shape[2] - len(probe.rows), len(probe.rows)], 2)
    positions = torch.arange(context.shape[2], device=keys.device).expand(context.shape[:3])
    return reconstruction.Rows(queries, own, context, reconstruction.repeated(positions, probe)[1], scale)


def run(model: PreTrainedModel, ids: Tensor, cache: object = None) -> tuple:
    """(cache, logits [vocabulary] of the last token) after `ids` [n]; a cache that is given grows in place."""
    out = model(input_ids=ids.to(model.device)[None], cache=cache, use_cache=True, logits_to_keep=1)
    return out.cache, out.logits[0, -1]


@torch.no_grad()
def respond(model: PreTrainedModel, bare: Trace, max_new_tokens: int) -> Trace:
    """The trace with the model's own greedy response to each question, its end token included."""
    cache, logits = run(model, bare.ids)
    return answered(model, bare, cache, logits, max_new_tokens)


def answered(model: PreTrainedModel, bare: Trace, cache: object, logits: Tensor, max_new_tokens: int) -> Trace:
    """`respond` on a cache that holds the context; a response that is there already stays."""
    replies = [
        q.response if len(q.response) else greedy(model, copy.deepcopy(cache), logits, q.question, max_new_tokens) for q in bare.questions
    ]
    return replace(bare, questions=[replace(q, response=reply) for q, reply in zip(bare.questions, replies, strict=True)])


def greedy(model: PreTrainedModel, cache: object, logits: Tensor, question: Tensor, max_new_tokens: int) -> Tensor:
    """[at most max_new_tokens] int64 of most likely tokens after the cache and `question`, up to the model's end token."""
    end = model.generation_config.eos_token_id
    ends = set(end) if isinstance(end, list) else {end}
    response: list[int] = []
    rows = question
    while len(response) < max_new_tokens and not ends & set(response[-1:]):
        if len(rows):  # an empty question leaves the context's own logits to start from
            cache, logits = run(model, rows, cache)
        rows = logits.argmax()[None]
        response.append(int(rows))
    return torch.tensor(response, dtype=torch.int64)


def softmax_scales(model: PreTrainedModel, layers: list[int]) -> list[float]:
    """What each layer multiplies its logits with (Gemma 3: not D ** -0.5)."""
    blocks = cast(nn.ModuleList, decoder_of(model).layers)
    return [cast(float, cast(nn.Module, blocks[i].self_attn).scaling) for i in layers]


def of_layers(taken: dict[int, Tensor], layers: list[int]) -> list[Tensor]:
    """The tensors of `layers`, kept through the forwards that follow."""
    return [taken[i] for i in layers]


def stacked(per_layer: list[Tensor], dtype: torch.dtype) -> Tensor:
    """[layers, ...] in `dtype` out of one [1, ...] per layer."""
    return torch.cat([t.to(dtype) for t in per_layer])
