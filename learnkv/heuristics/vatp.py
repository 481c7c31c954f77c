"""VATP (arXiv:2406.12335): attention times the size of the value that it brings."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from learnkv.heuristics.h2o import H2O
from learnkv.observation import Observation, Scorer, Wrapper


@dataclass(frozen=True)
class VATP(Wrapper):
    """score_j = base_j * ||v_j||_1, for a base whose scores are attention (arXiv:2406.12335).

    Sinks have small values and must stay: the policy's `num_sinks` sees to it, as the authors' code does.

    Differs: over H2O, values weigh the sum; the authors' code weighs each step's attention, which is the same while a value stays.
    """

    base: Scorer = field(default=H2O())

    def score(self, obs: Observation) -> Tensor:
        return self.base.score(obs) * obs.values.float().abs().sum(-1)
