"""KVzap as a press."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from learnkv.presses.common import GatePress, Seen


@dataclass
class KVzapPress(GatePress):
    """The logarithm of KVzip+ from hidden states; scores of all heads lie on one scale (arXiv:2601.07891).

    DMSPress(Press(num_recent=0), threshold=-4.0) keeps what scores the threshold or more, however many tokens those are: its
    sliding_window_size takes num_recent's place.
    """

    num_recent: int = 128
    streams: ClassVar[bool] = True

    def gate_score(self, seen: Seen) -> Tensor:
        w = seen.weights
        x = seen.hidden.to(w["last_weight"].dtype)
        if "first_weight" in w:
            x = F.gelu(x @ w["first_weight"] + w["first_bias"])
        return (x @ w["last_weight"] + w["last_bias"]).mT.float()
