"""DuoAttention as a press."""

from __future__ import annotations

from typing import Any

import torch
from kvpress.utils import compute_n_kept
from torch import Tensor, nn

from learnkv.budgets import filled, rounded
from learnkv.presses.common import GatePress, Seen


class DuoAttentionGatePress(GatePress):
    """The heads of largest alpha share what the ratio leaves beside first and last tokens, which the others keep (arXiv:2410.10819).

    Tokens are masked, as in every press of kvpress whose heads differ.  AdaKVPress(Press(ratio)) fills the heads of each layer in the
    order of their alphas instead.
    """

    def gate_score(self, seen: Seen) -> Tensor:
        share = (seen.positions + 1) / (len(seen.positions) + 1)
        return (self.ranks[seen.layer][:, None] + share).expand(seen.keys.shape[:3])

    @property
    def ranks(self) -> Tensor:
        """[layers, H] int64, 0 for the least alpha."""
        alpha = self.weights["alpha"]
        return alpha.clamp(0, 1).flatten().argsort(stable=True).argsort().view_as(alpha)

    def compress(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        if self.compression_ratio:
            if module.config._attn_implementation == "eager":  # type: ignore[union-attr]
                raise ValueError("kvpress masks no tokens in eager attention; load the model with attn_implementation='sdpa'")
            scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
            n = keys.shape[2]
            counts = self.counts(n, compute_n_kept(n, self.compression_ratio))[self.layers.index(int(module.layer_idx))]  # type: ignore[arg-type]
            place = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)  # [B, H, n]
            module.masked_key_indices = (place >= counts[:, None].to(place.device)).nonzero(as_tuple=True)  # type: ignore[assignment]
        return keys, values

    def counts(self, n: int, budget: int) -> Tensor:
        """[layers, H] int64 tokens of n that each head keeps: `budget` on average, or what is protected where that is more."""
        ranks = self.ranks
        full = ranks >= min(round(self.learned.config["sparsity"] * ranks.numel()), ranks.numel() - 1)
        protected = min(n, self.num_sinks + self.num_recent)
        pool = max(0, budget - protected) * ranks.numel() / int(full.sum())
        extra = rounded(filled([pool * is_full for is_full in full.flatten().tolist()], n - protected))
        return protected + torch.tensor(extra).view(ranks.shape)
