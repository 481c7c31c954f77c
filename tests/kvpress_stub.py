"""What exported presses take from kvpress, made again after its contract for the transformers at hand: kvpress 0.5.5 wants an older one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor


def compute_n_kept(k_len: int, compression_ratio: float) -> int:
    return max(1, int(k_len * (1 - compression_ratio)))


def get_prerope_query_states(module, hidden_states: Tensor) -> Tensor:
    """[B, Q, n, D] before rotation, after Qwen 3's norm."""
    queries = module.q_proj(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
    return module.q_norm(queries) if hasattr(module, "q_norm") else queries


class BasePress:
    """Hooks every self-attention while a prompt is read; `compress` says what becomes of a layer's keys and values."""

    def post_init_from_model(self, model):
        pass

    def forward_hook(self, module, args, kwargs, output):
        layer, T = kwargs["cache"].layers[module.layer_idx], kwargs["hidden_states"].shape[1]
        if layer.get_seq_length() == T:
            shown = kwargs | {"cache_position": torch.arange(T), "past_key_values": kwargs["cache"]}
            layer.keys, layer.values = self.compress(module, kwargs["hidden_states"], layer.keys, layer.values, None, shown)

    @contextmanager
    def __call__(self, model):
        self.post_init_from_model(model)
        hooks = [block.self_attn.register_forward_hook(self.forward_hook, with_kwargs=True) for block in model.model.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@dataclass
class ScorerPress(BasePress):
    """Keeps in each head what scores highest."""

    compression_ratio: float = 0.0

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        if self.compression_ratio == 0:
            return keys, values
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        kept = scores.topk(compute_n_kept(keys.shape[2], self.compression_ratio)).indices[..., None].expand(-1, -1, -1, keys.shape[-1])
        return keys.gather(2, kept), values.gather(2, kept)


@contextmanager
def stub() -> Iterator[None]:
    """`kvpress` is this, inside the block."""
    package, utils = ModuleType("kvpress"), ModuleType("kvpress.utils")
    package.BasePress, package.ScorerPress, package.utils = BasePress, ScorerPress, utils
    utils.compute_n_kept, utils.get_prerope_query_states = compute_n_kept, get_prerope_query_states
    before = {name: sys.modules.pop(name, None) for name in ("kvpress", "kvpress.utils")}
    sys.modules |= {"kvpress": package, "kvpress.utils": utils}
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
