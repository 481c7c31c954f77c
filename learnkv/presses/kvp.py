"""KVP as a press."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from learnkv.gates.neighbours import with_neighbours
from learnkv.gates.network import LOG_SPAN
from learnkv.kernels.reference import BranchWeights, TrunkWeights, mlp_scorer
from learnkv.presses.common import GatePress, Seen
from learnkv.rope import turn_back


class KVPPress(GatePress):
    """A small network per KV head on key, value and position (arXiv:2602.10238).

    Alone it keeps as many tokens in every head; AdaKVPress(Press(ratio)) lets the heads of a layer compete, which is better.
    """

    def gate_score(self, seen: Seen) -> Tensor:
        config = self.learned.config
        inputs = {"keys": self.keys_as_read(seen), "values": seen.values}
        read = [inputs[name] for name in config["inputs"]]
        scores = mlp_scorer(read, self.position_features(seen), *self.network(seen))
        return with_neighbours(scores, seen.positions.expand(scores.shape), config["pooling"], config["reach"])

    def keys_as_read(self, seen: Seen) -> Tensor:
        """[B, H, n, D] keys without RoPE where the gate was trained so."""
        if not self.learned.config["unrotate"]:
            return seen.keys
        angle = seen.positions[:, None] * seen.frequencies
        return turn_back(seen.keys.float(), angle.cos(), angle.sin())

    def network(self, seen: Seen) -> tuple[list[BranchWeights], list[TrunkWeights], Tensor, Tensor, Tensor]:
        """The weights of all heads of a layer."""
        H = seen.keys.shape[1]
        w = {name: x.expand(H, *x.shape[1:]) for name, x in seen.weights.items()}  # shared ones serve every head
        branches = [
            BranchWeights(w[f"{at}.mean"][:, 0], w[f"{at}.deviation"][:, 0], w[f"{at}.linear.weight"], w[f"{at}.linear.bias"][:, 0])
            for at in (f"branches.{i}" for i in range(len(self.learned.config["inputs"])))
        ]
        trunk = [
            TrunkWeights(w[f"{at}.linear.weight"], *(w[f"{at}.{name}"][:, 0] for name in ("linear.bias", "norm.weight", "norm.bias")))
            for at in (f"trunk.{i}" for i in range(self.learned.config["depth"]))
        ]
        return branches, trunk, w["head.weight"][..., 0], w["scale"], w["shift"]

    def position_features(self, seen: Seen) -> Tensor:
        """[B, H, n, F] float32."""
        B, H, n, _ = seen.keys.shape
        pos = seen.positions.float()
        if self.learned.config["positions"] == "none":
            found = pos.new_zeros(n, 0)
        elif self.learned.config["positions"] == "log":
            found = torch.stack([pos.log1p() / LOG_SPAN, (n - pos).log1p() / LOG_SPAN, pos / n], -1)
        else:
            table, gain, offset = (seen.weights[f"position.{name}"] for name in ("table", "norm.weight", "norm.bias"))
            rows = table[:, seen.positions.clamp(max=table.shape[1] - 1)]  # [H, n, F], [1, n, F] where shared
            found = torch.addcmul(offset, F.layer_norm(rows, rows.shape[-1:]), gain)
        return found.expand(B, H, n, found.shape[-1])
