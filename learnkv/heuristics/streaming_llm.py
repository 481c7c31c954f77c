"""StreamingLLM (arXiv:2309.17453): sinks and the last tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from learnkv.observation import Observation, Scorer


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """Worth is the position; the policy's `num_sinks` keeps the first tokens (arXiv:2309.17453; num_sinks=0 is a sliding window).

    Differs: tokens keep the RoPE position they were born with; the official code renumbers them inside the cache.
    """

    def score(self, obs: Observation) -> Tensor:
        return obs.positions.float()
