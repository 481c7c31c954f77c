"""Locret: retaining heads foretell the largest attention logit that a token will receive (arXiv:2410.01805)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkv.gates.base import Batch, refuse_below, stacked_linear
from learnkv.gates.born import BornGate
from learnkv.models import BaseModel
from learnkv.observation import Observation
from learnkv.rope import turn_back
from learnkv.traces.format import Trace


@dataclass(frozen=True)
class LocretConfig:
    """Published: width=1024."""

    width: int = 128  # of the hidden layer

    def __post_init__(self) -> None:
        refuse_below(1, width=self.width)


class Locret(BornGate):
    """W_2 SiLU(W_1 [q; k; v]) in each layer, of all heads of a token, without RoPE on q and k and without biases (arXiv:2410.01805).

    Trained to the largest logit that later rows give the token, over the rows and the query group, with neighbours held together.

    Differs: the authors keep the last tokens of every prefill chunk beside the best ones ("stabilizers"); here they are the policy's
    num_recent.  Their code sums the neighbours' part over layers, here it is a mean as the rest is.
    """

    METHOD = "locret"
    READS = frozenset({"queries_pre_rope", "peak_logit"})
    Config = LocretConfig
    config: LocretConfig
    needs = frozenset({"queries_pre_rope", "rope_offset"})
    frequencies: Tensor

    def __init__(self, config: LocretConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        if not base.frequencies:
            raise ValueError(f"learnkv can't take the RoPE of model {base.name} off its keys, which locret reads; train another method")
        size = (base.num_query_heads + 2 * base.num_kv_heads) * base.head_dim
        self.first = stacked_linear(base.num_layers, size, config.width)
        self.last = stacked_linear(base.num_layers, config.width, base.num_kv_heads)
        self.register_buffer("frequencies", torch.tensor(base.frequencies), persistent=False)

    def bind(self, model: nn.Module) -> Locret:
        """The gate on the model's device, and with the model's RoPE."""
        return super(Locret, self.with_rope_of(model)).bind(model)

    def forward(self, features: Tensor, layers: slice) -> Tensor:
        """features [l, R, (Q + 2 H) * D] of any float type -> [l, H, R] float32 scores by the weights of `layers`."""
        x = F.silu(torch.bmm(features.to(self.first.dtype), self.first[layers]))
        return torch.bmm(x, self.last[layers]).mT.float()

    def new_features(self, obs: Observation) -> Tensor:
        assert obs.queries_pre_rope is not None and obs.rope_offset is not None
        positions = (obs.new_positions + obs.rope_offset[:, None])[:, None]  # [B, 1, T]
        features = self.side_by_side(obs.queries_pre_rope, obs.new_keys, obs.new_values, positions)
        self.check_width("numbers of q, k and v", features, self.first.shape[1])
        return features

    def trace_features(self, trace: Trace) -> Tensor:
        queries, keys, values = (self.recorded(trace, name) for name in ("queries_pre_rope", "keys", "values"))
        return self.side_by_side(queries, keys, values, torch.arange(len(trace.ids), device=self.device))

    def side_by_side(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """[b, R, F] of queries [b, Q, R, D] before rotation, keys [b, H, R, D] rotated to `positions`, and values, in float32."""
        angle = positions[..., None] * self.frequencies
        keys = turn_back(keys.float(), angle.cos(), angle.sin())
        return torch.cat([queries.float(), keys, values.float()], 1).transpose(1, 2).flatten(2)

    def trace_loss(self, batch: Batch, trace: Trace) -> Tensor:
        scores, target = self(self.trace_features(trace), slice(None)), self.recorded(trace, "peak_logit")
        apart = scores.diff().square().sum() / max(1, scores[..., 1:].numel())
        return F.smooth_l1_loss(scores, target) + SMOOTHNESS * apart


SMOOTHNESS = 0.0025  # weight of the squared difference of neighbours' scores
