"""Geometry: the KV heads that can be evicted from."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from learnkv.capture import evictable_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def kv_shape(model: nn.Module) -> tuple[int, int, int]:
    """(evictable layers, KV heads, head_dim)."""
    lm = cast("PreTrainedModel", model)
    config = lm.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return len(evictable_layers(lm)), getattr(config, "num_key_value_heads", None) or heads, head_dim
