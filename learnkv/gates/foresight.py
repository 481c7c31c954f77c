"""Foresight, our own: one scale for all heads, learned from questions that were asked and from one that never ends, "repeat it all"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkv.gates.base import Batch, positions_of, refuse_below, refuse_infinite, stacked_linear
from learnkv.gates.born import HiddenGate
from learnkv.gates.neighbours import refuse_pooling, with_neighbours
from learnkv.gates.network import LOG_SPAN
from learnkv.gates.ranking import LEAST_COST, PROTECTED
from learnkv.models import BaseModel
from learnkv.observation import Observation
from learnkv.traces.format import Trace


@dataclass(frozen=True)
class ForesightConfig:
    """What won on kinds of prompts left out of training, by answers and NLL at 10% and 5%."""

    width: int = 128  # of the first hidden layer
    inner_width: int = 64  # of the second
    reconstruction: float = 0.1  # weight of KVzip's score in what a token is worth, beside its utility
    pooling: float = 0.3  # share in a served score of the mean over the token's neighbourhood; 0 for none
    reach: int = 2  # positions that the neighbourhood reaches to both sides

    def __post_init__(self) -> None:
        refuse_below(1, width=self.width, inner_width=self.inner_width)
        refuse_pooling(self.pooling, self.reach)
        if self.reconstruction < 0:
            raise ValueError(f"reconstruction={self.reconstruction} is the weight of a target; give 0 or more")


class Foresight(HiddenGate):
    """A small network per layer from hidden state and position to a score per head; keys and values are linear in the hidden state.

    A token is worth its utility, the attention that the questions of the trace paid to it (arXiv:2602.10238), plus the attention that
    repeating the context pays (arXiv:2505.23416): a kind of question that no trace asks finds what it needs among the second.  One
    softmax over the tokens of all heads and layers is trained to the shares of that worth, so that scores lie on one scale and heads
    compete for one budget: allocate="adaptive_global".  A token's own score is written when it is born: no pass beside the model's
    own, nothing to keep for decoding; served, it is mixed with its neighbours', as SnapKV pools attention.
    """

    METHOD = "foresight"
    READS = frozenset({"hidden", "reconstruction"})
    Config = ForesightConfig
    config: ForesightConfig
    mean: Tensor
    deviation: Tensor

    def __init__(self, config: ForesightConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        L, M, H = base.num_layers, base.hidden_size, base.num_kv_heads
        self.first = Normed(L, M + 1, config.width)
        self.second = Normed(L, config.width, config.inner_width)
        self.last = stacked_linear(L, config.inner_width, H)
        self.register_buffer("mean", torch.zeros(L, 1, M))
        self.register_buffer("deviation", torch.ones(L, 1, M))

    def forward(self, features: Tensor, layers: slice) -> Tensor:
        """float32 features [l, R, M + 1], position last -> [l, H, R] float32 scores by the weights of `layers`."""
        mean, deviation = F.pad(self.mean[layers], (0, 1)), F.pad(self.deviation[layers], (0, 1), value=1.0)  # the position stays as it is
        x = self.second(self.first((features - mean) / deviation, layers), layers)
        return torch.bmm(x, self.last[layers]).mT.float()

    def score(self, obs: Observation) -> Tensor:
        return with_neighbours(super().score(obs), obs.positions, self.config.pooling, self.config.reach)

    def score_trace(self, trace: Trace) -> Tensor:
        scores = super().score_trace(trace)
        return with_neighbours(scores, positions_of(scores), self.config.pooling, self.config.reach)

    def new_features(self, obs: Observation) -> Tensor:
        return with_position(super().new_features(obs), obs.new_positions)

    def trace_features(self, trace: Trace) -> Tensor:
        hidden = super().trace_features(trace)
        return with_position(hidden, torch.arange(len(trace.ids), device=hidden.device))

    def trace_loss(self, batch: Batch, trace: Trace) -> Tensor:
        """KL(shares of worth || softmax of the scores), both over the tokens of all heads but those that a policy protects.

        Times the number of heads, which makes it the size of KVP's.
        """
        n = len(trace.ids)
        first = min(PROTECTED[0], n - 1)
        rest = slice(first, max(first + 1, n - PROTECTED[1]))
        worth = self.recorded(trace, "utility") + self.config.reconstruction * self.recorded(trace, "reconstruction")
        share = worth[..., rest].flatten() / worth[..., rest].sum().clamp(min=LEAST_COST)
        logprob = self(self.trace_features(trace), slice(None))[..., rest].flatten().log_softmax(0)
        return F.kl_div(logprob, share, reduction="sum") * worth[..., 0].numel()

    @torch.no_grad()
    def prepare(self, traces: Sequence[Trace]) -> None:
        """Mean and deviation of the hidden states."""
        refuse_infinite(traces, "hidden")
        hidden = torch.cat([self.recorded(trace, "hidden").float() for trace in traces], 1)
        self.mean.copy_(hidden.mean(1, keepdim=True))
        self.deviation.copy_(hidden.std(1, keepdim=True) + 1e-5)


class Normed(nn.Module):
    """Linear, LayerNorm, SiLU, stacked over layers."""

    def __init__(self, layers: int, size: int, width: int) -> None:
        super().__init__()
        self.weight = stacked_linear(layers, size, width)
        self.bias = nn.Parameter(torch.zeros(layers, 1, width))
        self.gain = nn.Parameter(torch.ones(layers, 1, width))
        self.offset = nn.Parameter(torch.zeros(layers, 1, width))

    def forward(self, x: Tensor, layers: slice) -> Tensor:
        """[l, R, size] -> [l, R, width]."""
        x = F.layer_norm(torch.baddbmm(self.bias[layers], x, self.weight[layers]), self.bias.shape[-1:])
        return F.silu(torch.addcmul(self.offset[layers], x, self.gain[layers]))


def with_position(hidden: Tensor, positions: Tensor) -> Tensor:
    """[..., R, M + 1] in float32 of hidden [..., R, M] and positions that broadcast to [..., R]; anything where those are below 0."""
    position = (positions.clamp(min=0).float().log1p() / LOG_SPAN).expand(hidden.shape[:-1])
    return torch.cat([hidden.float(), position[..., None]], -1)
