"""Random eviction: the floor that every method has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learnkv.observation import Observation, Scorer

WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Random(Scorer):
    """Scores uniform in [0, 1): a hash of (seed, layer, head, position), so a token keeps its score in any batch, order or step."""

    seed: int = 0

    def score(self, obs: Observation) -> Tensor:
        heads = torch.arange(obs.positions.shape[1], device=obs.positions.device)[:, None]
        low, high = self.seed & WORD, self.seed >> 32 & WORD
        per_layer = mix(mix(mix(torch.tensor(low, device=heads.device)) + high) + obs.layer)
        bits = mix(mix(per_layer + heads) + obs.positions)  # [B, H, L]
        return (bits >> 8).float() * 2.0**-24  # 24 bits are exact in float32


def mix(bits: Tensor) -> Tensor:
    """int64 -> int64 in [0, 2**32): MurmurHash3's finaliser, each input bit moves half of the output's."""
    bits = bits & WORD
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & WORD
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & WORD
    return bits ^ (bits >> 16)
