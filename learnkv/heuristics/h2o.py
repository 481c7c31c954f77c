"""H2O (arXiv:2306.14048): heavy hitters, the tokens that gathered most attention so far."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from learnkv.observation import Observation, Scorer


@dataclass(frozen=True)
class H2O(Scorer):
    """score_j = attention that token j received from every query so far, summed over the query group (arXiv:2306.14048).

    The recent half of the paper's budget is the policy's `num_recent`; its sinks win on mass alone (num_sinks=0 is the paper's).

    Differs: summed in float32 (the official code keeps the model's type); per KV head (the official eviction fails on grouped heads).
    """

    memory_size = 1
    needs = frozenset({"mass"})

    def remember(self, obs: Observation) -> Tensor:
        assert obs.mass is not None
        return obs.memory + obs.mass[..., None]

    def score(self, obs: Observation) -> Tensor:
        return obs.memory[..., 0]
