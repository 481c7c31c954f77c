"""Fast KVzip as a press."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from learnkv.kernels.reference import gate_scorer
from learnkv.presses.common import GatePress, Seen


class FastKVzipPress(GatePress):
    """Attention of a token's query to its own key beside learned sinks, from hidden states (arXiv:2601.17668).

    AdaKVPress(Press(ratio)) is nearest to its authors' budget, which is one over the heads of all layers.
    """

    streams: ClassVar[bool] = True

    def gate_score(self, seen: Seen) -> Tensor:
        w, width = seen.weights, self.learned.config["width"]
        x = seen.hidden.to(w["query_weight"].dtype)
        queries = (x @ w["query_weight"] + w["query_bias"]).unflatten(-1, (-1, width)).transpose(1, 2)  # [B, Q, n, width]
        keys = (x @ w["key_weight"]).unflatten(-1, (-1, width)).transpose(1, 2)
        return gate_scorer(queries, keys, w["query_gain"], w["key_gain"], w["sinks"], w["bias"])
