"""What every exported press shares: the gate that it carries, the model that it fits, and the tokens that always stay."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from kvpress import ScorerPress
from safetensors.torch import load
from torch import Tensor, nn
from transformers import PreTrainedModel

from learnkv.capture import evictable_layers
from learnkv.geometry import kv_shape
from learnkv.rope import rotary_frequencies

FIRST = torch.finfo(torch.float32).max  # score of a token that stays before all others


@dataclass(frozen=True)
class Learned:
    """A gate as text.

    method   its name in learnkv
    config   its knobs
    base     name and shape of the model that it was trained for
    encoded  its tensors: safetensors in base64
    """

    method: str
    config: dict[str, Any]
    base: dict[str, Any]
    encoded: str

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        return load(base64.b64decode(self.encoded))

    def layers_of(self, model: PreTrainedModel) -> list[int]:
        """Which of the model's layers have tokens that can be evicted; a ValueError with both sides where the gate does not fit it."""
        found = shape_of(model)
        wrong = [f"{name} {self.base[name]} against {found[name]}" for name in found if self.base[name] != found[name]]
        if wrong:
            raise ValueError(
                f"this {self.method} gate was trained for {self.base['name']}, the model at hand is {model.config.name_or_path}: "
                f"{', '.join(wrong)}; export a gate of this model"
            )
        return evictable_layers(model)


def shape_of(model: PreTrainedModel) -> dict[str, int]:
    """What a gate's weights hang on; layers of a sliding window do not count."""
    config, (num_layers, num_kv_heads, head_dim) = model.config.get_text_config(), kv_shape(model)
    return {
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "num_query_heads": config.num_attention_heads,
        "head_dim": head_dim,
        "hidden_size": config.hidden_size,
    }


@dataclass(frozen=True)
class Seen:
    """One layer of a prompt, as kvpress shows it.

    layer         index among the evictable layers
    module        the self-attention
    hidden        [B, n, M] input of self-attention, after the input layernorm
    keys, values  [B, H, n, D], keys rotated
    positions     [n] int64
    weights       of this layer, by name
    frequencies   [R / 2] float32 of the model's RoPE
    """

    layer: int
    module: nn.Module
    hidden: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    weights: dict[str, Tensor]
    frequencies: Tensor


@dataclass
class GatePress(ScorerPress):
    """Keeps what a gate scores highest, in float32, beside the prompt's first and last tokens.

    compression_ratio       share of the tokens that go
    num_sinks, num_recent   first and last tokens of a prompt that stay before all others
    """

    num_sinks: int = 4
    num_recent: int = 32
    layers: list[int] = field(default_factory=list, init=False, repr=False, compare=False)  # of the model that it has met

    learned: ClassVar[Learned]
    streams: ClassVar[bool] = False  # whether a token's score hangs on that token alone, so that it may come in any part of a sequence

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        self.layers = self.learned.layers_of(model)
        sliding = len(model.get_decoder().layers) - len(self.layers)
        if sliding and type(model).__name__ != "Gemma3ForConditionalGeneration":  # the one of which kvpress leaves them alone
            raise ValueError(
                f"{type(model).__name__} has {sliding} layers of a sliding window, which kvpress compresses too; this "
                f"{self.learned.method} gate has no scores for them"
            )
        self.weights = {name: w.to(model.device) for name, w in self.learned.weights.items()}
        self.frequencies = rotary_frequencies(model)[0].to(model.device)

    def gate_score(self, seen: Seen) -> Tensor:
        """[B, H, n] float32 of every token, as the gate scores it in learnkv."""
        raise NotImplementedError

    @torch.no_grad()
    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        seen = self.seen(module, hidden_states, keys, values, kwargs["cache_position"])
        scores = self.gate_score(seen)
        return scores if seen.positions[0] else marked(scores, self.num_sinks, self.num_recent)

    def seen(self, module: nn.Module, hidden: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Seen:
        if not self.layers:
            raise ValueError(f"{type(self).__name__} has not met its model; enter it by `with press(model):`, or call post_init_from_model")
        self.refuse_parts(hidden.shape[1], keys.shape[2], positions)
        layer, device = self.layers.index(int(module.layer_idx)), keys.device  # type: ignore[arg-type]
        weights = {name: w[min(layer, len(w) - 1)].to(device) for name, w in self.weights.items()}
        return Seen(layer, module, hidden, keys, values, positions, weights, self.frequencies.to(device))

    def refuse_parts(self, num_hidden: int, num_keys: int, positions: Tensor) -> None:
        """Raises a ValueError inside a wrapper that shows something else than whole prompts, or than new tokens to a gate that streams."""
        name = type(self).__name__
        if not num_hidden == num_keys == len(positions):
            raise ValueError(
                f"{name} was given {num_keys} keys, {num_hidden} hidden states and {len(positions)} positions: a wrapper shows it parts, "
                "which it cannot score; use it alone or inside AdaKVPress"
            )
        if not self.streams and positions[0]:
            raise ValueError(
                f"{name} was given tokens {int(positions[0])} to {int(positions[-1])}; it scores whole prompts, so use it in prefill only"
            )


def marked(scores: Tensor, num_sinks: int, num_recent: int) -> Tensor:
    """scores [B, H, n] with the first and the last tokens above all."""
    at = torch.arange(scores.shape[-1], device=scores.device)
    return scores.masked_fill((at < num_sinks) | (at >= len(at) - num_recent), FIRST)
