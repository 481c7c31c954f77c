"""Geometry: the KV heads that can be evicted from, the RoPE on their keys, and how far positions go."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from learnkv.capture import evictable_layers
from learnkv.rope import rotary_frequencies, turn_back

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def kv_shape(model: nn.Module) -> tuple[int, int, int]:
    """(evictable layers, KV heads, head_dim)."""
    lm = cast("PreTrainedModel", model)
    config = lm.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return len(evictable_layers(lm)), getattr(config, "num_key_value_heads", None) or heads, head_dim


def max_positions(model: PreTrainedModel) -> float:
    """How many positions the model was made for; infinity where its configuration does not say."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return math.inf if limit is None else limit


def removable_frequencies(model: PreTrainedModel) -> tuple[float, ...]:
    """The model's RoPE frequencies, or () where `turn_back` does not take its RoPE off (interleaved pairs, layers without RoPE).

    Tried once per model.
    """
    if model not in REMOVABLE:
        REMOVABLE[model] = tried_frequencies(model)
    return REMOVABLE[model]


REMOVABLE: WeakKeyDictionary[nn.Module, tuple[float, ...]] = WeakKeyDictionary()


@torch.no_grad()
def tried_frequencies(model: PreTrainedModel) -> tuple[float, ...]:
    """See `removable_frequencies`.

    Tried on one token many times over: whatever layers do to it, they do at every position alike, so that its keys are equal
    before RoPE, and equal again once it is off.
    """
    frequencies = rotary_frequencies(model)[0].to(model.device)
    if not len(frequencies):
        return ()
    ids = torch.full((1, 40), model.config.get_text_config().vocab_size // 2, device=model.device)
    cache = model(ids, use_cache=True).cache
    keys = torch.stack([cache.layers[i].keys[0].float() for i in evictable_layers(model)])  # [layers, H, 40, D]
    angle = torch.arange(40, device=model.device)[:, None] * frequencies
    turned = turn_back(keys, angle.cos(), angle.sin())
    apart = (turned - turned[:, :, :1]).abs().amax((1, 2, 3)) / turned.abs().amax((1, 2, 3)).clamp(min=1e-6)
    return tuple(frequencies.tolist()) if (apart < MOST_APART).all() else ()


MOST_APART = 0.06  # of the largest key; bfloat16 rounding stays below, another rotation does not
