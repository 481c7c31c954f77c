"""Fast KVzip: attention of a token's query to its own key beside learned sinks foretells KVzip's score (arXiv:2601.17668)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkv import ops
from learnkv.gates.base import Batch, refuse_below, stacked_linear
from learnkv.gates.born import HiddenGate
from learnkv.models import BaseModel
from learnkv.traces.format import Trace


@dataclass(frozen=True)
class FastKVzipConfig:
    """Published (q{G}_dim16_sink16): width=16, num_sinks=16, 1,000 tokens in each step."""

    width: int = 16  # of the gate's queries and keys
    num_sinks: int = 16  # learned keys that compete with a token's own, per KV head
    tokens: int = 0  # drawn from a trace in each step; 0 for all of them

    def __post_init__(self) -> None:
        refuse_below(1, width=self.width, num_sinks=self.num_sinks)
        refuse_below(0, tokens=self.tokens)


class FastKVzip(HiddenGate):
    """A gate of low rank on the hidden state, trained to give KVzip's score without its passes (arXiv:2601.17668).

    q = RMSNorm(W_q x + b_q) for each query head, k = RMSNorm(W_k x) for each KV head, z = <q, k> / sqrt(width) + b, and the score is the
    mean over the query group of exp(z) / (exp(z) + sum over sinks of exp(<q, sink> / sqrt(width))).  Trained by the binary cross-entropy
    to the reconstruction score.  The paper's budget is one over all heads: allocate="adaptive_global".

    Differs: b is added once, in training too, where the authors' training adds it twice and their serving once; a score is written when
    its token is born, so decoding needs no buffer of hidden states (theirs scores 128 steps at a time); the first tokens are the policy's
    sinks.
    """

    METHOD = "fast_kvzip"
    READS = frozenset({"hidden", "reconstruction"})
    Config = FastKVzipConfig
    config: FastKVzipConfig

    def __init__(self, config: FastKVzipConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        L, H, G, D = base.num_layers, base.num_kv_heads, base.num_query_heads // base.num_kv_heads, config.width
        self.query_weight = stacked_linear(L, base.hidden_size, H * G * D)
        self.query_bias = nn.Parameter(torch.zeros(L, 1, H * G * D))
        self.key_weight = stacked_linear(L, base.hidden_size, H * D)
        self.query_gain = nn.Parameter(torch.ones(L, D))
        self.key_gain = nn.Parameter(torch.ones(L, D))
        self.sinks = nn.Parameter(torch.zeros(L, H, config.num_sinks, D))
        self.bias = nn.Parameter(torch.zeros(L, H, G))

    def forward(self, features: Tensor, layers: slice) -> Tensor:
        """features [l, R, M] of any float type -> [l, H, R] float32 scores in (0, 1) by the weights of `layers`."""
        x = features.to(self.query_weight.dtype)
        weight = torch.cat([self.query_weight[layers], self.key_weight[layers]], -1)  # one product is faster than two
        shift = F.pad(self.query_bias[layers], (0, self.key_weight.shape[-1]))
        projected = torch.baddbmm(shift, x, weight).unflatten(-1, (-1, self.config.width))  # [l, R, Q + H, width]
        by_head = projected.transpose(1, 2)[:, None].split([self.base.num_query_heads, self.base.num_kv_heads], 2)
        small = (w[layers] for w in (self.query_gain, self.key_gain, self.sinks, self.bias))
        return torch.cat([ops.gate_scorer(*of_layer) for of_layer in zip(*by_head, *small, strict=True)])

    def trace_loss(self, batch: Batch, trace: Trace) -> Tensor:
        """Mean over tokens, sum over heads and layers: what a layer learns does not hang on the others."""
        return binary_cross_entropy(*self.drawn(batch, trace, "reconstruction")).mean(-1).sum()


SURE = 1e-6  # a score nearer to 0 or 1 is taken for this


def binary_cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    """-(y log s + (1 - y) log(1 - s)), each as it is; torch's own refuses to run under autocast."""
    s = scores.clamp(SURE, 1 - SURE)
    return -(target * s.log() + (1 - target) * (-s).log1p())
