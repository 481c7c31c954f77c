"""KeyDiff (arXiv:2504.15364): keys unlike the average key stay."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from learnkv.observation import Observation, Scorer


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """score_j = -cos(k_j, mean over slots of k / ||k||), per head (arXiv:2504.15364).

    Differs: one pass over what the cache holds; the paper works through the prompt in blocks of 128, which a chunked prefill does.
    """

    def score(self, obs: Observation) -> Tensor:
        unit = F.normalize(obs.keys.float(), dim=-1)  # 0 stays 0, so empty slots add nothing
        anchor = F.normalize(unit.sum(2, keepdim=True), dim=-1)  # [B, H, 1, D]
        return -(unit * anchor).sum(-1)
