"""SnapKV (arXiv:2404.14469): attention of the last queries, pooled over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from learnkv import ops
from learnkv.observation import Observation, Scorer


@dataclass(frozen=True)
class SnapKV(Scorer):
    """score_j = pool_j(mean over the last W queries and the query group of softmax attention on j) (arXiv:2404.14469).

    The window shrinks to the row's own queries on a short prompt.  Neighbours are slots that follow each other in the head.

    Differs: reduced over the query group, then pooled (the official code keeps a cache per query head); window tokens
    compete with what attention they got, where the official code always keeps them (num_recent=32 does that); average
    pooling divides by the slots it covers, where the official one counts zeros beyond both ends.
    """

    observation_window: int = 32  # queries; section 5, LongBench configuration
    kernel_size: int = 7  # slots, odd; LongBench configuration
    pooling: Literal["max", "mean"] = "max"  # LongBench configuration

    def __post_init__(self) -> None:
        if self.observation_window < 1:
            raise ValueError(f"observation_window={self.observation_window} counts queries; give 1 or more")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size} has no middle slot; give an odd number, 1 for no pooling")
        if self.pooling not in POOL:
            raise ValueError(f"pooling={self.pooling!r} is none of {', '.join(POOL)}")

    def score(self, obs: Observation) -> Tensor:
        mass = ops.column_mass(obs.queries, obs.keys, obs.query_positions, obs.positions, obs.scale, over_group="mean", over_queries="mean")
        return POOL[self.pooling](mass, obs.filled, self.kernel_size)


def max_pool(mass: Tensor, filled: Tensor, kernel_size: int) -> Tensor:
    """mass [B, H, L], 0 on empty slots -> [B, H, L], the largest within kernel_size // 2 slots."""
    return F.max_pool1d(mass, kernel_size, stride=1, padding=kernel_size // 2)


def mean_pool(mass: Tensor, filled: Tensor, kernel_size: int) -> Tensor:
    """mass [B, H, L], 0 on empty slots -> [B, H, L], the mean of the filled slots within kernel_size // 2."""
    total = F.avg_pool1d(mass, kernel_size, stride=1, padding=kernel_size // 2)
    share = F.avg_pool1d(filled.float(), kernel_size, stride=1, padding=kernel_size // 2)
    return total / share.clamp(min=0.5 / kernel_size)


POOL = {"max": max_pool, "mean": mean_pool}
