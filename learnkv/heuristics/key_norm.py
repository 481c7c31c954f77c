"""Key norm (arXiv:2406.11430): keys of small norm attract attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from learnkv.observation import Observation, Scorer


@dataclass(frozen=True)
class KeyNorm(Scorer):
    """score_j = -||k_j||_2 (arXiv:2406.11430).

    Differs: every layer evicts (the authors leave the first two alone), and norms are float32 (in bf16 most of them tie).
    """

    def score(self, obs: Observation) -> Tensor:
        return -obs.keys.float().norm(dim=-1)
