"""SnapKV (arXiv:2404.14469): attention of the last queries, pooled over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from learnkv import ops
from learnkv.observation import Observation, Scorer

Pooling = Literal["max", "mean"]


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
    pooling: Pooling = "max"  # LongBench configuration

    def __post_init__(self) -> None:
        if self.observation_window < 1:
            raise ValueError(f"observation_window={self.observation_window} counts queries; give 1 or more")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size} has no middle slot; give an odd number, 1 for no pooling")
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"pooling={self.pooling!r} is none of {', '.join(get_args(Pooling))}")

    def score(self, obs: Observation) -> Tensor:
        mass = ops.column_mass(obs.queries, obs.keys, obs.query_positions, obs.positions, obs.scale, over_group="mean", over_queries="mean")
        return ops.pool(mass, obs.positions, kernel_size=self.kernel_size, pooling=self.pooling)
