"""LagKV (arXiv:2504.04704): tokens that stand out against the partition that follows theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learnkv.observation import Observation, Scorer


@dataclass(frozen=True)
class LagKV(Scorer):
    """Rank within a partition of spread(K) + spread(V), each normalised by the range of the next partition (arXiv:2504.04704).

    spread(x)_j = softmax over the partition of std_d((x_j - min) / (max - min)), min and max per channel over the next
    partition; the score is the rank divided by `lag`.  The first slots score 2, whatever has no whole partition behind
    it scores 1 (the latest win): a head of under `first` + 2 * `lag` slots keeps its latest.

    Differs: a channel that is constant over a partition is divided by 1e-6 (the official code by 0); partitions are of
    the slots a head holds, so they shift when eviction runs while decoding.
    """

    lag: int = 128  # slots in a partition; section 4
    first: int = 4  # slots before the first partition, the paper's sinks

    def __post_init__(self) -> None:
        if self.lag < 1 or self.first < 0:
            raise ValueError(f"lag={self.lag} and first={self.first} count slots; give at least 1 and 0")

    def score(self, obs: Observation) -> Tensor:
        B, H, L = obs.positions.shape
        out = torch.ones(B, H, L, device=obs.positions.device)
        out[..., : self.first] = 2.0
        parts = (L - self.first) // self.lag
        if parts < 2:
            return out
        body = slice(self.first, self.first + parts * self.lag)
        spread = (self.spread(obs.keys[:, :, body]) + self.spread(obs.values[:, :, body])) / 2  # [B, H, parts - 1, lag]
        rank = spread.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag
        whole = (obs.slots.lengths - self.first) // self.lag  # [B, H] partitions that a head fills
        scored = torch.arange(parts - 1, device=whole.device) < whole[..., None] - 1
        out[..., self.first : body.stop - self.lag] = rank.where(scored[..., None], 1.0).flatten(2)
        return out

    def spread(self, x: Tensor) -> Tensor:
        """[B, H, parts * lag, D] -> [B, H, parts - 1, lag], softmax over each partition."""
        x = x.float().unflatten(2, (-1, self.lag))  # [B, H, parts, lag, D]
        low, high = x[:, :, 1:].amin(3, keepdim=True), x[:, :, 1:].amax(3, keepdim=True)
        return ((x[:, :, :-1] - low) / (high - low).clamp(min=1e-6)).std(-1).softmax(-1)
