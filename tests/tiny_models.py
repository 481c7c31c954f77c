"""Tiny random models built from configs, and what an EvictionCache over them is compared with: the plain model with tokens masked."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from learnkv.capture import blocks_of, decoder_of
from learnkv.runtime.cache import EvictionCache

SHAPE = dict(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)
SPECIAL = dict(pad_token_id=0, eos_token_id=96, bos_token_id=1, initializer_range=0.2)
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, dict(sliding_window=None)),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        dict(num_hidden_layers=4, layer_types=KINDS, sliding_window=8, query_pre_attn_scalar=24),
    ),
}


def tiny(family: str, *, dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    """A random model of a family in FAMILIES; `changes` are fields of its config."""
    torch.manual_seed(0)
    lm, config, own = FAMILIES[family]
    model = lm(config(**SHAPE | SPECIAL | own | changes)).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.uniform_(weight.data, 0.2, 1.0)  # as they are made, all keys would have the same norm
    return model.to(dtype)


def prompt(n: int, rows: int = 1, seed: int = 1) -> Tensor:
    """[rows, n] random token ids, none of them special."""
    return torch.randint(2, 96, (rows, n), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids and mask [len(rows), longest] of rows of token ids."""
    n = max(map(len, rows))
    ids = torch.stack([torch.cat([torch.zeros(n - len(row), dtype=torch.int64), row]) for row in rows])
    mask = torch.stack([torch.cat([torch.zeros(n - len(row)), torch.ones(len(row))]) for row in rows]).long()
    return ids, mask


def generate(model: PreTrainedModel, ids: Tensor, cache: object = None, n: int = 8, **given: object) -> Tensor:
    """Greedy, n new tokens whatever they are."""
    return model.generate(ids, cache=cache, max_new_tokens=n, min_new_tokens=n, do_sample=False, **given)


def full_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The self-attention of each evictable layer, in order."""
    sliding = EvictionCache(None, model).is_sliding
    return [block.self_attn for block, slides in zip(blocks_of(decoder_of(model)), sliding, strict=True) if not slides]


def masked_logits(model: PreTrainedModel, ids: Tensor, new: Tensor, held: list[Tensor]) -> Tensor:
    """The plain model's logits of `new` [1, T] after `ids`, where each head of a full layer attends to `held` of ids only.

    held  per evictable layer [1, H, L] positions, -1 where empty
    """
    cache = model(ids, use_cache=True).cache
    handles = []
    for layer, positions in zip(full_layers(model), held, strict=True):
        group = model.config.num_attention_heads // positions.shape[1]
        mask = visible(positions[0], ids.shape[1], new.shape[1]).repeat_interleave(group, 1)
        handles.append(layer.register_forward_pre_hook(partial(give_mask, mask), with_kwargs=True))
    logits = model(new, cache=cache).logits
    for handle in handles:
        handle.remove()
    return logits


def give_mask(mask: Tensor, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return args, kwargs | {"attention_mask": mask}


def visible(positions: Tensor, seen: int, T: int) -> Tensor:
    """[1, H, T, seen + T] bool: the held positions [H, L] of what was seen, and the T new tokens causally."""
    old = torch.zeros(len(positions), seen, dtype=torch.bool)
    for h, of_head in enumerate(positions):
        old[h, of_head[of_head >= 0].long()] = True
    own = torch.ones(T, T, dtype=torch.bool).tril().expand(len(positions), T, T)
    return torch.cat([old[:, None].expand(-1, T, -1), own], -1)[None]
