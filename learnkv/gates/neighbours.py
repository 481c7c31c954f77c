"""A token's score mixed with those of the tokens around it, so that an answer stays with its words, as SnapKV pools attention."""

from __future__ import annotations

import torch
from torch import Tensor

from learnkv.gates.base import refuse_below

MAX_REACH = 64


def with_neighbours(scores: Tensor, positions: Tensor, share: float, reach: int) -> Tensor:
    """[B, H, L] scores of which a `share` is the mean over the neighbourhood; shapes as in `neighbourhood_mean`."""
    return torch.lerp(scores, neighbourhood_mean(scores, positions, reach), share) if share else scores


def neighbourhood_mean(scores: Tensor, positions: Tensor, reach: int) -> Tensor:
    """Mean over each token and the tokens held at most `reach` positions away from it.

    scores     [B, H, L] float32, any value on empty slots
    positions  [B, H, L] ascending, -1 on empty slots, which lie at the tail
    returns    [B, H, L]
    """
    total, count = scores.clone(), torch.ones_like(scores)
    for step in range(1, min(reach, scores.shape[-1] - 1) + 1):  # slots apart: at least as many positions
        here, there = slice(None, -step), slice(step, None)
        near = (positions[..., there] >= 0) & (positions[..., there] - positions[..., here] <= reach)
        for to, source in ((here, there), (there, here)):
            total[..., to] += scores[..., source].masked_fill(~near, 0)
            count[..., to] += near
    return total / count


def refuse_pooling(pooling: float, reach: int) -> None:
    """Raises a ValueError for a share or a reach that is none."""
    refuse_below(1, reach=reach)
    if not 0 <= pooling <= 1:
        raise ValueError(f"pooling={pooling} is a share; give 0 to 1")
    if reach > MAX_REACH:
        raise ValueError(f"reach={reach} is no neighbourhood any more; give 1 to {MAX_REACH} positions")
