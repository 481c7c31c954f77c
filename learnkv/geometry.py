"""Geometry: which layers of a model can be evicted from, and the KV heads they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def evictable_layers(model: nn.Module) -> list[int]:
    """Indices of the full-attention layers."""
    config = text_config(model)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [i for i, kind in enumerate(kinds) if kind == "full_attention"]


def kv_shape(model: nn.Module) -> tuple[int, int, int]:
    """(evictable layers, KV heads, head_dim)."""
    config = text_config(model)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return len(evictable_layers(model)), getattr(config, "num_key_value_heads", None) or heads, head_dim


def text_config(model: nn.Module) -> PretrainedConfig:
    """A transformers model's configuration, the text part of it where it has others."""
    return cast("PreTrainedModel", model).config.get_text_config()
