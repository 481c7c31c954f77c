"""CriticalKV (arXiv:2502.03805): half of the budget by the base's scores, the rest also by what a token's value can do to the output."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from learnkv import ops
from learnkv.heuristics.snapkv import SnapKV
from learnkv.observation import Observation, Scorer, Wrapper
from learnkv.projection import output_projections


@dataclass(frozen=True)
class CriticalKV(Wrapper):
    """Of the n tokens that a head keeps, n * first_stage are the base's best, and the rest the best of the others by
    (base_j + epsilon) * mean over the query group of ||W_O v_j||_1, for a base whose scores are attention (arXiv:2502.03805).

    How many a head keeps is the allocator's choice, by the base's scores (adaptive: the paper's variant of Ada-KV).  Protected
    tokens count in the first stage.  The norms are computed once, when tokens are born, and lie beside them.

    Differs: the floor of `adaptive` decides only how many tokens a head keeps; kvpress makes its best tokens by the base stay too.
    A head that keeps one token has no first stage (kvpress: no second).
    """

    base: Scorer = field(default=SnapKV())
    first_stage: float = 0.5  # fraction of the tokens kept; kvpress 0.5.5, as all defaults here
    epsilon: float = 1e-4  # attention that every token is sure of

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "memory_size", self.base.memory_size + 1)
        if not 0 <= self.first_stage <= 1 or self.epsilon < 0:
            raise ValueError(f"first_stage={self.first_stage} and epsilon={self.epsilon}: give a fraction from 0 to 1, and 0 or more")

    def bind(self, model: nn.Module) -> Scorer:
        weights = output_projections(model)  # type: ignore[arg-type]
        return BoundCriticalKV(self.base.bind(model), self.first_stage, self.epsilon, weights=weights)

    def remember(self, obs: Observation) -> Tensor:
        raise ValueError("CriticalKV needs the model's W_O; use scorer.bind(model), which EvictionCache does")

    def score(self, obs: Observation) -> Tensor:
        return self.base.score(obs.with_columns(0, self.base.memory_size))

    def refine(self, scores: Tensor, kept: Tensor, obs: Observation) -> Tensor:
        first = ops.select(scores, obs.positions, (kept.double() * self.first_stage + 1e-9).long())
        return ((scores + self.epsilon) * obs.memory[..., -1]).masked_fill(first | scores.isinf(), float("inf"))


@dataclass(frozen=True, eq=False)
class BoundCriticalKV(CriticalKV):
    """CriticalKV with a model's output projections.

    weights  one [M, Q * D] per evictable layer, in the model's type
    """

    weights: tuple[Tensor, ...] = field(kw_only=True)

    def remember(self, obs: Observation) -> Tensor:
        base, own = obs.with_columns(0, self.base.memory_size), obs.with_columns(self.base.memory_size, self.memory_size)
        norms = projected_norm(obs.new_values, self.weights[obs.layer]).masked_fill(obs.new_slots < 0, 0)
        return torch.cat([self.base.remember(base), own.write_new(norms[..., None])], -1)


def projected_norm(values: Tensor, weight: Tensor) -> Tensor:
    """||W_O v||_1, mean over the query group, in float32: values [B, H, T, D], weight [M, Q * D] -> [B, H, T]."""
    H, D = values.shape[1], values.shape[3]
    heads = weight.unflatten(1, (H, -1, D))  # [M, H, G, D]

    def norm(h: int, g: int) -> Tensor:
        """[B, T], for one query head at a time: [B, T, M] is as large as what the layer gives."""
        return (values[:, h].float() @ heads[:, h, g].float().mT).abs().sum(-1)

    return torch.stack([torch.stack([norm(h, g) for g in range(heads.shape[2])]).mean(0) for h in range(H)], 1)
