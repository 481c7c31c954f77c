"""Keep rare tokens: a lexical control without attention, keys or weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learnkv.observation import Observation, Scorer


@dataclass(frozen=True)
class KeepRare(Scorer):
    """score_j = -(how often token j's id occurred in its row so far); of equal ones the latest stay.  A control of ours.

    Beside each token lie its id (float32 holds ids up to 2**24) and the count.
    An id whose every token was evicted is counted from 0 again.
    """

    memory_size = 2
    needs = frozenset({"token_ids"})

    def remember(self, obs: Observation) -> Tensor:
        assert obs.token_ids is not None
        B, H, T = obs.new_slots.shape
        new = obs.token_ids.clamp(min=0)[:, None].expand(B, H, T)
        ids, counts = obs.write_new(torch.stack([new.float(), torch.zeros_like(new).float()], -1)).unbind(-1)  # [B, H, L]
        ids = ids.long()
        vocabulary = 1 + max(int(ids.max()), int(new.max()))
        seen = counts.new_zeros(B, H, vocabulary).scatter_reduce(2, ids, counts, "amax")
        seen = seen.scatter_add(2, new, (obs.new_slots >= 0).float())  # [B, H, V] occurrences so far
        return torch.stack([ids.float(), seen.gather(2, ids)], -1) * obs.filled[..., None]

    def score(self, obs: Observation) -> Tensor:
        return -obs.memory[..., 1]
