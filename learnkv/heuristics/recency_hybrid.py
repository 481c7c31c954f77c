"""A control of ours between H2O and StreamingLLM: fading attention mass, weighed against age."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from learnkv.observation import Observation, Scorer


@dataclass(frozen=True)
class RecencyHybrid(Scorer):
    """score_j = weight * mass_j / (largest mass of the head) + (1 - weight) * 2 ** (-age_j / age_half_life).

    mass_j fades: a step of t queries multiplies what was there by 2 ** (-t / mass_half_life) and adds what j receives in it.
    weight=1 without fading (mass_half_life=inf) is H2O, weight=0 is StreamingLLM.
    """

    weight: float = 0.7
    mass_half_life: float = 512.0  # tokens
    age_half_life: float = 128.0  # tokens

    memory_size = 1
    needs = frozenset({"mass"})

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight={self.weight} is the share of attention against age; give a number from 0 to 1")
        if not (self.mass_half_life > 0 and self.age_half_life > 0):
            raise ValueError(f"mass_half_life={self.mass_half_life}, age_half_life={self.age_half_life} are tokens; give numbers above 0")

    def remember(self, obs: Observation) -> Tensor:
        assert obs.mass is not None
        kept = 2 ** (-obs.num_new / self.mass_half_life)  # [B]
        return kept[:, None, None, None] * obs.memory + obs.mass[..., None]

    def score(self, obs: Observation) -> Tensor:
        mass = obs.memory[..., 0].masked_fill(~obs.filled, 0)
        age = (obs.num_seen[:, None, None] - 1 - obs.positions).clamp(min=0)
        fresh = 2 ** (-age / self.age_half_life)
        return self.weight * mass / mass.amax(-1, keepdim=True).clamp(min=1e-30) + (1 - self.weight) * fresh
