"""ChunkKV (arXiv:2502.00299): neighbours stay or go together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from learnkv.heuristics.snapkv import SnapKV
from learnkv.observation import Observation, Scorer, Wrapper


@dataclass(frozen=True)
class ChunkKV(Wrapper):
    """score_j = mean of the base's scores over the chunk of `chunk_size` positions that j lies in, all heads together (arXiv:2502.00299).

    Differs: the budget is met to the token, so of the last chunk that fits in part the later tokens stay; kvpress keeps whole chunks
    and misses it by up to one.  The paper's reuse of one layer's chunks in the next is left out.
    """

    base: Scorer = field(default=SnapKV())
    chunk_size: int = 20  # positions; kvpress 0.5.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size={self.chunk_size} counts tokens; give 1 or more")

    def score(self, obs: Observation) -> Tensor:
        largest = torch.finfo(torch.float32).max / obs.filled[0].numel()  # a base's infinities must leave room for a sum
        scores = self.base.score(obs).clamp(-largest, largest).masked_fill(~obs.filled, 0)
        chunk = obs.positions.clamp(min=0).long() // self.chunk_size
        total, count = (sum_by(chunk, x) for x in (scores, obs.filled.float()))
        return (total / count.clamp(min=1)).gather(1, chunk.flatten(1)).view(scores.shape)


def sum_by(group: Tensor, x: Tensor) -> Tensor:
    """[B, groups] sums of x [B, H, L] over the slots of each group [B, H, L]."""
    out = x.new_zeros(x.shape[0], int(group.max()) + 1 if group.numel() else 1)
    return out.scatter_add(1, group.flatten(1), x.flatten(1))
