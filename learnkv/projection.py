"""W_O of the model at hand: what carries the output of an attention head into the hidden state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learnkv.capture import blocks_of, decoder_of, evictable_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def output_projections(model: PreTrainedModel) -> tuple[Tensor, ...]:
    """[M, Q * D] of each evictable layer, in their order: the weights of the model's `o_proj`, not copies of them."""
    blocks = blocks_of(decoder_of(model))
    attentions = [blocks[i].get_submodule("self_attn") for i in evictable_layers(model)]
    if not all(hasattr(attention, "o_proj") for attention in attentions):
        raise ValueError(f"{type(model).__name__} has no `o_proj` in its attention layers; a scorer reads W_O from it")
    return tuple(attention.get_submodule("o_proj").get_parameter("weight").detach() for attention in attentions)


def projected_norms(values: Tensor, weight: Tensor) -> Tensor:
    """||W_O v||_2 of each value by each query head, in float32: values [B, H, T, D], weight [M, Q * D] -> [B, Q, T]."""
    heads = weight.float().unflatten(1, (values.shape[1], -1, values.shape[3]))  # [M, H, G, D]
    gram = torch.einsum("mhgd,mhge->hgde", heads, heads)  # ||W v||^2 = v' (W' W) v, which is D x D
    squares = torch.einsum("bhtd,hgde,bhte->bhgt", values.float(), gram, values.float())
    return squares.clamp(min=0).sqrt().flatten(1, 2)
