"""SimLayerKV (arXiv:2410.13846): layers that look at the first and the last tokens only hold no more than those."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learnkv import ops
from learnkv.observation import Observation, Scorer


@dataclass(frozen=True)
class SimLayerKV(Scorer):
    """score_j = 1 - age_j / span: the span of a lazy layer is its last `recent` tokens, that of another all tokens (arXiv:2410.13846).

    A layer is lazy where the last query pays more than `threshold` of its attention, mean over the heads, to the first `first` and
    the last `recent` tokens; the first ones score 1.  That is decided once, by the prompt, or when tokens beyond those come.

    Differs: the paper's cache is as long as the data make it, here a budget over all layers bounds it (allocate="adaptive_global").
    Where the budget is what the paper would keep, its tokens stay: of lazy layers the first and recent ones, of others all.  A smaller
    one shrinks the span of every layer by the same factor, a larger one leaves lazy layers more.  Each row decides for itself
    (kvpress: one mean over the batch), by the prompt's last query (official code: by the first decoded token's).
    """

    threshold: float = 0.9  # of the attention; the paper's Llama 3, others there: Llama 2 0.65, Mistral 0.8, Qwen 0.85
    first: int = 4  # tokens; official code
    recent: int = 1024  # tokens; official code

    observation_window = 1
    memory_size = 1  # the share that was found beside every token of the layer, 0 until it was decided

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} is a share of the attention; give a number from 0 to 1")
        if not 0 <= self.first < 2**31 or not 1 <= self.recent < 2**31:
            raise ValueError(f"first={self.first} and recent={self.recent} count tokens; give at least 0 and 1, and less than 2**31")

    def remember(self, obs: Observation) -> Tensor:
        decided = decided_share(obs)
        due = (decided == 0) & (obs.num_seen > self.first + self.recent)
        share = torch.where(due, self.share(obs), decided) if due.any() else decided
        return share[:, None, None, None].expand(*obs.positions.shape, 1)

    def share(self, obs: Observation) -> Tensor:
        """[B] the last query's attention on first and recent tokens, mean over the heads."""
        mass = ops.column_mass(obs.queries, obs.keys, obs.query_positions, obs.positions, obs.scale, over_group="mean")
        near = (obs.positions < self.first) | (obs.positions >= (obs.num_seen - self.recent)[:, None, None])
        return (mass * near).sum(-1).mean(-1)

    def score(self, obs: Observation) -> Tensor:
        span = torch.where(decided_share(obs) > self.threshold, self.recent, obs.num_seen)  # [B] tokens
        age = obs.num_seen[:, None, None] - 1 - obs.positions
        return (1 - age / span[:, None, None]).masked_fill(obs.positions < self.first, 1.0)


def decided_share(obs: Observation) -> Tensor:
    """[B] what was written beside the layer's tokens."""
    return obs.memory[..., 0].amax((1, 2))
