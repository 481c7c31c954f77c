"""Locret as a press."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from kvpress.utils import get_prerope_query_states
from torch import Tensor

from learnkv.presses.common import GatePress, Seen
from learnkv.rope import turn_back


class LocretPress(GatePress):
    """A small network on queries, keys and values of all heads, without RoPE (arXiv:2410.01805)."""

    streams: ClassVar[bool] = True

    def gate_score(self, seen: Seen) -> Tensor:
        angle = seen.positions[:, None] * seen.frequencies
        keys = turn_back(seen.keys.float(), angle.cos(), angle.sin())
        queries = get_prerope_query_states(seen.module, seen.hidden)
        features = torch.cat([queries.float(), keys, seen.values.float()], 1).transpose(1, 2).flatten(2)  # [B, n, (Q + 2 H) * D]
        x = F.silu(features.to(seen.weights["first"].dtype) @ seen.weights["first"])
        return (x @ seen.weights["last"]).mT.float()
