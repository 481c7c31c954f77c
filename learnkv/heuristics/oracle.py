"""Oracle: a prompt's recorded utility as its score, the bound that scorers are measured against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learnkv.observation import Observation, Scorer


@dataclass(frozen=True, eq=False)
class Oracle(Scorer):
    """score_j = the attention that token j is known to receive later, from a trace of the same prompt; tokens past its n score lowest.

    utility  [layers, H, n] float32
    """

    utility: Tensor

    def __post_init__(self) -> None:
        if self.utility.dim() != 3 or self.utility.shape[2] == 0:
            raise ValueError(f"utility has shape {list(self.utility.shape)}; give [layers, kv heads, tokens], 1 token or more")

    def score(self, obs: Observation) -> Tensor:
        layers, H, n = self.utility.shape
        if (layers, H) != (obs.num_layers, obs.positions.shape[1]):
            raise ValueError(
                f"the utility is of {layers} layers x {H} kv heads, the model has {obs.num_layers} x {obs.positions.shape[1]}; "
                "give the trace of the model that runs"
            )
        known = self.utility[obs.layer].to(obs.positions.device, torch.float32).expand(len(obs.positions), H, n)
        scores = known.gather(2, obs.positions.long().clamp(0, n - 1))
        return scores.masked_fill(obs.positions >= n, torch.finfo(torch.float32).min)
