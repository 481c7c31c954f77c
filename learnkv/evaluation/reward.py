"""Normalised reward of any scorer on recorded traces: what a full-cache trace says about a method before a token is evicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from learnkv.gates.base import Gate
from learnkv.gates.ranking import PROTECTED, reward_of
from learnkv.observation import Observation, Scorer, Slots
from learnkv.traces.dataset import TraceDataset
from learnkv.traces.format import Trace


@torch.no_grad()
def rewards(scorers: Mapping[str, Scorer], traces: TraceDataset, scales: Sequence[float]) -> dict[str, Tensor]:
    """Name -> [layers, H] mean normalised reward; -1 is the oracle's, and further below is worse.

    scales  the model's softmax scale of each layer
    """
    totals: dict[str, Tensor] = {}
    for i in range(len(traces)):
        trace = traces[i]
        for name, scorer in scorers.items():
            scores = score_trace(scorer, trace, scales)
            found = reward_of(scores, trace.targets["utility"], num_sinks=PROTECTED[0], num_recent=PROTECTED[1])
            totals[name] = totals.get(name, 0) + found / len(traces)
    return totals


def score_trace(scorer: Scorer, trace: Trace, scales: Sequence[float]) -> Tensor:
    """[layers, H, n] float32 what the scorer says at the end of the context, had it seen it in one prefill."""
    if isinstance(scorer, Gate):
        return scorer.score_trace(trace)  # it may run rows of its own
    seen = (first_look(scorer, trace, layer, scales) for layer in range(len(scales)))
    return torch.cat([scorer.score(with_memory(obs, scorer.remember(obs))) for obs in seen])


def first_look(scorer: Scorer, trace: Trace, layer: int, scales: Sequence[float]) -> Observation:
    """One layer of a trace as the cache shows it right after a prefill; `needs` that a trace does not hold stay None."""
    assert trace.keys is not None and trace.values is not None and trace.window is not None, trace.id
    keys, values = trace.keys[layer][None], trace.values[layer][None]
    _, H, n, _ = keys.shape
    count = torch.tensor([n])
    window = trace.window[layer][None]
    return Observation(
        layer=layer,
        num_layers=len(scales),
        num_seen=count,
        num_new=count,
        new_slots=torch.arange(n).expand(1, H, n),
        slots=Slots.dense(keys, values, memory=torch.zeros(1, H, n, scorer.memory_size)),
        queries=last_queries(window, scorer.observation_window),
        num_queries=count.clamp(max=scorer.observation_window),
        scale=scales[layer],
        mass=of_layer(trace.mass, layer),
        hidden=of_layer(trace.hidden, layer),
        block_input=of_layer(trace.block_input, layer),
        queries_pre_rope=of_layer(trace.queries_pre_rope, layer),
        all_queries=of_layer(trace.queries, layer),
        token_ids=trace.ids[None],
        rope_offset=torch.zeros_like(count),
    )


def of_layer(recorded: Tensor | None, layer: int) -> Tensor | None:
    """[1, ...] one layer of what a trace holds [layers, ...]; None of what it does not hold."""
    return None if recorded is None else recorded[layer][None]


def last_queries(window: Tensor, wanted: int) -> Tensor:
    """[1, Q, wanted, D] of the recorded last queries [1, Q, W, D], left-padded with 0 where the context was shorter."""
    have = min(wanted, window.shape[2])
    last = window[:, :, window.shape[2] - have :]
    return last if have == wanted else F.pad(last, (0, 0, wanted - have, 0))


def with_memory(obs: Observation, memory: Tensor) -> Observation:
    """The observation after `memory` [1, H, n, C] was stored beside the tokens."""
    return replace(obs, slots=Slots.dense(obs.keys, obs.values, obs.positions, memory))
