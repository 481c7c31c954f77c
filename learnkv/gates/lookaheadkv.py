"""LookaheadKV: learned rows and a LoRA for them alone foresee what the response will attend to (arXiv:2603.10899)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from learnkv.gates.adapter import AdaptedTokens, AdaptedTokensConfig
from learnkv.gates.probe_tokens import Rows

FLOOR = 1e-9  # of a share, inside the logarithm


@dataclass(frozen=True)
class LookaheadKVConfig(AdaptedTokensConfig):
    """The defaults are the paper's (section 2; m, r and alpha as its ablations settle them)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_tokens < 2:
            raise ValueError(
                f"num_tokens={self.num_tokens}: a single row's attention to itself leaves no trace in the loss; give 2 or more"
            )


class LookaheadKV(AdaptedTokens):
    """Rows and LoRA trained so that the rows' attention to the prompt is that of the model's own response (arXiv:2603.10899).

    loss = mean over layers and query heads of KL(response || rows), both normalised over the prompt's tokens; the served score is the
    rows' attention as it was trained, normalised.

    Differs: the adapter lives in a copy of the decoder that shares its weights, so that nothing of the model changes; the last
    evictable layer has it on queries and keys only, which the paper's parameter counts say too.
    """

    METHOD = "lookaheadkv"
    Config = LookaheadKVConfig
    config: LookaheadKVConfig

    def forward(self, rows: Rows) -> Tensor:
        """[l, B, Q, L] float32 as `ProbeTokens.forward`, normalised over the prompt."""
        return normalised(super().forward(rows))

    def distance(self, target: Tensor, shares: Tensor) -> Tensor:
        return divergence(normalised(target), shares)


def normalised(shares: Tensor) -> Tensor:
    """[..., n] divided by their sum."""
    return shares / shares.sum(-1, keepdim=True).clamp(min=FLOOR)


def divergence(target: Tensor, shares: Tensor) -> Tensor:
    """[] KL(target || shares) of distributions [..., n], mean over all but the last dimension."""
    return F.kl_div(shares.clamp(min=FLOOR).log(), target, reduction="none").sum(-1).mean()
