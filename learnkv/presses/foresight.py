"""Foresight as a press."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from learnkv.gates.foresight import with_position
from learnkv.gates.neighbours import with_neighbours
from learnkv.presses.common import GatePress, Seen


class ForesightPress(GatePress):
    """A small network on hidden state and position, whose scores compare across heads.

    AdaKVPress(Press(ratio)) is nearest to the budget that it was trained for, which is one over the heads of all layers.
    """

    def gate_score(self, seen: Seen) -> Tensor:
        w = seen.weights
        mean, deviation = F.pad(w["mean"], (0, 1)), F.pad(w["deviation"], (0, 1), value=1.0)
        x = (with_position(seen.hidden, seen.positions) - mean) / deviation
        for at in ("first", "second"):
            x = F.layer_norm(x @ w[f"{at}.weight"] + w[f"{at}.bias"], w[f"{at}.bias"].shape[-1:])
            x = F.silu(w[f"{at}.offset"] + x * w[f"{at}.gain"])
        scores, config = (x @ w["last"]).mT, self.learned.config
        return with_neighbours(scores, seen.positions.expand(scores.shape), config["pooling"], config["reach"])
