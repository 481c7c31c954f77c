"""Scissorhands (arXiv:2305.17118): tokens that the recent queries found important go on being important."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from learnkv import ops
from learnkv.observation import Observation, Scorer


@dataclass(frozen=True)
class Scissorhands(Scorer):
    """score_j = attention of the last `observation_window` queries on token j, mean over queries and group (arXiv:2305.17118).

    The paper drops half of the budget at a time, which spares steps: `interval` does that here.

    Differs: the attention is what those queries pay to the tokens still held, computed when it is asked for, where the paper keeps
    a history of rows as they were; it is summed, where the paper counts how often a token got less than an equal share.
    """

    observation_window: int = 400  # queries; section 4

    def __post_init__(self) -> None:
        if self.observation_window < 1:
            raise ValueError(f"observation_window={self.observation_window} counts queries; give 1 or more")

    def score(self, obs: Observation) -> Tensor:
        return ops.column_mass(obs.queries, obs.keys, obs.query_positions, obs.positions, obs.scale, over_group="mean", over_queries="mean")
