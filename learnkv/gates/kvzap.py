"""KVzap: a linear map or a small network on the hidden state foretells the logarithm of KVzip+ (arXiv:2601.07891)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkv.gates.base import Batch, refuse_below, stacked_linear
from learnkv.gates.born import HiddenGate
from learnkv.models import BaseModel
from learnkv.traces.format import Trace


@dataclass(frozen=True)
class KVzapConfig:
    """Published: width=512 (KVzap-mlp) and width=0 (KVzap-linear), 500 tokens of each text."""

    width: int = 64  # of the hidden layer; 0 for none, a linear gate
    tokens: int = 0  # drawn from a trace in each step; 0 for all of them

    def __post_init__(self) -> None:
        refuse_below(0, width=self.width, tokens=self.tokens)


class KVzap(HiddenGate):
    """log KVzip+ of each token from its hidden state, by Linear, GELU, Linear or by one linear map (arXiv:2601.07891).

    Scores of all heads lie on one scale, so that one threshold on them sets every head's length: METHODS["kvzap"] keeps what scores
    `threshold` or more, and 128 recent tokens, however many those are.

    Differs: the linear gate is trained by the same steps as the other, where the authors solve a ridge regression; the last bias
    starts at the mean of the target; evicted tokens are freed in prefill and decode, where kvpress masks them.
    """

    METHOD = "kvzap"
    READS = frozenset({"hidden", "reconstruction_plus"})
    Config = KVzapConfig
    config: KVzapConfig

    def __init__(self, config: KVzapConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        L, M, H, W = base.num_layers, base.hidden_size, base.num_kv_heads, config.width
        self.first_weight = stacked_linear(L, M, W) if W else None
        self.first_bias = nn.Parameter(torch.zeros(L, 1, W)) if W else None
        self.last_weight = stacked_linear(L, W or M, H)
        self.last_bias = nn.Parameter(torch.zeros(L, 1, H))

    def forward(self, features: Tensor, layers: slice) -> Tensor:
        """features [l, R, M] of any float type -> [l, H, R] float32 log scores by the weights of `layers`."""
        x = features.to(self.last_weight.dtype)
        if self.first_weight is not None and self.first_bias is not None:
            x = F.gelu(torch.baddbmm(self.first_bias[layers], x, self.first_weight[layers]))
        return torch.baddbmm(self.last_bias[layers], x, self.last_weight[layers]).mT.float()

    def trace_loss(self, batch: Batch, trace: Trace) -> Tensor:
        """Mean over tokens and heads, sum over layers: what a layer learns does not hang on the others."""
        scores, target = self.drawn(batch, trace, "reconstruction_plus")
        return (scores - log_score(target)).square().mean((1, 2)).sum()

    @torch.no_grad()
    def prepare(self, traces: Sequence[Trace]) -> None:
        """The last bias at the mean of the target: steps of the size that suits the weights would be long on the way there."""
        targets = [log_score(self.recorded(trace, "reconstruction_plus")) for trace in traces]
        self.last_bias.copy_(torch.cat(targets, -1).mean(-1)[:, None])


LEAST = 1e-9  # of a KVzip+ score: an attention that float32 rounds to 0 has a logarithm


def log_score(plus: Tensor) -> Tensor:
    return plus.clamp(min=LEAST).log()
