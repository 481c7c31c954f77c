"""How many tokens stay, per KV head: uniform, or adaptive over the heads of a layer or of the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Protocol

import torch
from torch import Tensor

from learnkv import ops
from learnkv.observation import Observation


@dataclass(frozen=True)
class Ratio:
    """A budget as the fraction of the row's own tokens that is kept: `Ratio(0.1)` keeps a tenth."""

    kept: float

    def __post_init__(self) -> None:
        if not 0 < self.kept <= 1:
            raise ValueError(f"budget ratio {self.kept} is the fraction of tokens kept; give a number above 0, up to 1")


def resolve(budget: int | Ratio, num_seen: Tensor) -> Tensor:
    """Tokens per KV head for each row: num_seen [B] -> [B] int64.  The one place where a fraction becomes tokens."""
    if isinstance(budget, Ratio):
        share = Fraction(budget.kept).limit_denominator(10**6)  # 0.57 is 57 in 100, whatever a float makes of it
        return (num_seen * share.numerator // share.denominator).clamp(min=1)
    return torch.full_like(num_seen, budget)


class Allocator(Protocol):
    """Splits a budget over the heads it is shown.

    scores        one [B, H, L] float32 per layer: +inf on protected slots, -inf on empty ones
    budget        [B] int64 tokens per KV head
    observations  one per layer, beside the scores
    returns       one [B, H] int64 per layer, tokens kept per head; sums to H * budget over what it was shown where that many are filled
    """

    @property
    def scope(self) -> Literal["layer", "model"]: ...

    def __call__(self, scores: list[Tensor], budget: Tensor, observations: list[Observation]) -> list[Tensor]: ...


@dataclass(frozen=True)
class Uniform:
    """Every head keeps `budget` tokens."""

    scope: Literal["layer", "model"] = "layer"

    def __call__(self, scores: list[Tensor], budget: Tensor, observations: list[Observation]) -> list[Tensor]:
        return [budget[:, None].expand(s.shape[:2]) for s in scores]


@dataclass(frozen=True)
class Adaptive:
    """Heads compete for one budget: within a layer (Ada-KV, arXiv:2407.11550) or over the whole model (KVzip, arXiv:2505.23416).

    floor  fraction of the budget that every head keeps whatever the others score (Ada-KV's alpha, 0.2; KVzip's global threshold has 0)

    Differs: the floor is a hard minimum and the sum is exact; official Ada-KV shrinks linearly and drifts by rounding.
    """

    floor: float = 0.2
    scope: Literal["layer", "model"] = "layer"

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor={self.floor} is the fraction of the budget every head is sure of; give a number from 0 to 1")

    def __call__(self, scores: list[Tensor], budget: Tensor, observations: list[Observation]) -> list[Tensor]:
        positions = [obs.positions for obs in observations]
        low = (budget.double() * self.floor + 1e-9).long()
        raised = [raise_top(s, p, low) for s, p in zip(scores, positions, strict=True)]
        heads = [s.shape[1] for s in scores]
        flat = torch.cat([s.flatten(1) for s in raised], 1)  # [B, N]
        order = torch.cat([p.flatten(1) for p in positions], 1)
        keep = ops.select(flat, order, budget * sum(heads))  # [B, N]
        parts = keep.split([s[0].numel() for s in scores], 1)
        return [part.view(s.shape).sum(-1) for part, s in zip(parts, scores, strict=True)]


def raise_top(scores: Tensor, positions: Tensor, count: Tensor) -> Tensor:
    """scores [B, H, L] with each head's best `count` [B] entries raised to +inf, above what is protected beyond them."""
    best = ops.select(scores, positions, count[:, None].expand(scores.shape[:2]))
    return scores.clamp(max=torch.finfo(scores.dtype).max).masked_fill(best, float("inf"))


uniform = Uniform()
adaptive = Adaptive()
adaptive_global = Adaptive(floor=0.0, scope="model")

ALLOCATORS: dict[str, Allocator] = {"uniform": uniform, "adaptive": adaptive, "adaptive_global": adaptive_global}
