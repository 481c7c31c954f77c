"""DMS as a press."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from learnkv.gates.dms import EPSILON, UNDECIDED, of_next
from learnkv.presses.common import GatePress, Seen


class DMSGatePress(GatePress):
    """Each token decides whether the one before it may go, from its block's input before the layernorm (arXiv:2506.05345).

    DMSPress(Press(num_recent=0), threshold=0.0, sliding_window_size=window) evicts what was decided, however many tokens that is; of
    prompts only: a token's score comes with the next one, too late for decoding=True.
    """

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        super().post_init_from_model(model)
        self.norms = [model.get_decoder().layers[i].input_layernorm for i in self.layers]

    def gate_score(self, seen: Seen) -> Tensor:
        x = normed(self.norms[seen.layer], seen.hidden)
        emitted = self.learned.config["scale"] * (x @ seen.weights["weight"]).float().mT - self.learned.config["offset"]
        return -of_next(emitted, -UNDECIDED)


def normed(norm: nn.Module, after: Tensor) -> Tensor:
    """[B, n, M] float32 RMSNorm of EPSILON, without weights, of what the model's own norm made `after` [B, n, M] of.

    Its output y over its gain has mean square m = s / (s + e) where its input has s, so that s follows from m, and the other norm from s.
    """
    gain = norm(torch.full_like(after[:1, :1], 1e3)).float()  # far above e
    if not gain.all():
        raise ValueError(f"the gain of {type(norm).__name__} is 0 in {int((gain == 0).sum())} channels, which dms reads before it")
    y, e = after.float() / gain, epsilon_of(norm)
    m = y.square().mean(-1, keepdim=True)
    return y * (e / (e * m + EPSILON * (1 - m))).sqrt()


def epsilon_of(norm: nn.Module) -> float:
    """Of an RMSNorm of transformers."""
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if found is None:
        raise ValueError(f"{type(norm).__name__} is no RMSNorm of transformers, through which dms can see the input of its block")
    return float(found)
