"""TOVA (arXiv:2401.06104): what the last query attends to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from learnkv import ops
from learnkv.observation import Observation, Scorer


@dataclass(frozen=True)
class TOVA(Scorer):
    """score_j = attention of the last query on token j, averaged over all heads of the layer (arXiv:2401.06104).

    Differs: with ragged heads a token counts 0 in a head that no longer holds it; the official cache has one set for all heads.
    """

    observation_window = 1

    def score(self, obs: Observation) -> Tensor:
        mass = ops.column_mass(obs.queries, obs.keys, obs.query_positions, obs.positions, obs.scale, over_group="mean")
        return mean_over_heads(mass, obs.positions, int(obs.num_seen.max()))


def mean_over_heads(mass: Tensor, positions: Tensor, num_seen: int) -> Tensor:
    """mass [B, H, L], 0 on empty slots; positions [B, H, L] -> [B, H, L], each token's mean over the H heads, found by position."""
    B, H, _ = mass.shape
    token = positions.clamp(min=0).long()
    total = mass.new_zeros(B, num_seen).scatter_add(1, token.flatten(1), mass.flatten(1))
    return (total / H)[:, None].expand(B, H, num_seen).gather(2, token)
