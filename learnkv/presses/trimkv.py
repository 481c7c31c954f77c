"""TRIM-KV as a press."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from learnkv.gates.trimkv import worth
from learnkv.presses.common import GatePress, Seen


class TrimKVPress(GatePress):
    """The rate at which a token fades, from its hidden state, times its age at the prompt's end (arXiv:2512.03324)."""

    def gate_score(self, seen: Seen) -> Tensor:
        w = seen.weights
        x = F.silu(seen.hidden.float() @ w["inner"] + w["inner_bias"])
        log_beta = F.logsigmoid((x @ w["outer"] + w["outer_bias"]).float()).mT
        return worth(log_beta, len(seen.positions) - seen.positions)
