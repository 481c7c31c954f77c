"""CurDKV (arXiv:2509.15038): tokens with large keys and values among their neighbours, an approximate leverage score."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from learnkv.observation import Observation, Scorer


@dataclass(frozen=True)
class CUR(Scorer):
    """score_j = share(||k_j||^2) * share(||v_j||^2), each a share of its block of `block_size` slots (arXiv:2509.15038).

    The product is divided by its sum over the head, so that heads can share a budget; the first slots score above it.

    Differs: squares are summed in float32; a block of zeros gives 0 (kvpress: NaN).  The paper's random projection, which only
    approximates the same norms, is left out.
    """

    block_size: int = 16  # slots; kvpress 0.5.5, as all defaults here
    first: int = 4  # slots, the paper's sinks

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.first < 0:
            raise ValueError(f"block_size={self.block_size} and first={self.first} count slots; give at least 1 and 0")

    def score(self, obs: Observation) -> Tensor:
        product = self.share(obs.keys) * self.share(obs.values)
        scores = product / product.sum(-1, keepdim=True).clamp(min=1e-30)
        scores[..., : self.first] = 1.0
        return scores

    def share(self, x: Tensor) -> Tensor:
        """[B, H, L, D] -> [B, H, L] squared norm, divided by its sum over the block."""
        squares = x.float().square().sum(-1)  # empty slots are 0
        L = squares.shape[-1]
        blocks = F.pad(squares, (0, -L % self.block_size)).unflatten(-1, (-1, self.block_size))
        return (blocks / blocks.sum(-1, keepdim=True).clamp(min=1e-30)).flatten(-2)[..., :L]
