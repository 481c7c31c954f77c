"""Expected Attention (arXiv:2510.00636): attention that queries like the prompt's will pay from the positions that follow."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from learnkv.observation import Observation, Scorer
from learnkv.rope import rotary_frequencies, turn_back


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """score_j = (mean over the query group of z_j + epsilon) * ||v_j||_2, z the softmax over j of the expected logits (arXiv:2510.00636).

    With mu and S the mean and covariance of this step's queries before rotation, R the mean rotation over the next
    `future` positions, and a the model's scale: logit_j = a k_j' R mu + a**2 / 2 k_j' R S R' k_j.
    The first tokens are outliers: left out of mu, S and the softmax, and scored highest.

    Differs: queries are taken after the model's query norm, where it has one (kvpress refuses such models).  The statistics
    are of one step: the prompt or a chunk of it; while decoding, one query without covariance.
    """

    future: int = 512  # positions; kvpress 0.5.5, as all defaults here
    first: int = 4  # tokens, the paper's sinks
    epsilon: float = 0.0  # attention that every token is sure of

    needs = frozenset({"queries_pre_rope", "rope_offset"})

    def __post_init__(self) -> None:
        if self.future < 1 or self.first < 0 or self.epsilon < 0:
            raise ValueError(
                f"future={self.future}, first={self.first} and epsilon={self.epsilon}: give at least 1 position, 0 tokens and 0.0"
            )

    def bind(self, model: nn.Module) -> Scorer:
        frequencies, scaling = rotary_frequencies(model)
        if not len(frequencies):
            raise ValueError(f"{type(model).__name__} has no rotary embedding with inv_freq; expected_attention needs one")
        return BoundExpectedAttention(self.future, self.first, self.epsilon, frequencies=frequencies, attention_scaling=scaling)

    def score(self, obs: Observation) -> Tensor:
        raise ValueError("ExpectedAttention rotates as the model does; use scorer.bind(model), which EvictionCache does")


@dataclass(frozen=True, eq=False)
class BoundExpectedAttention(ExpectedAttention):
    """ExpectedAttention with a model's rotary embedding.

    frequencies        [R / 2] float32, of the R dimensions that rotate
    attention_scaling  factor of cos and sin, 1 but in YaRN and LongRoPE
    """

    frequencies: Tensor = field(kw_only=True)
    attention_scaling: float = field(kw_only=True)

    def score(self, obs: Observation) -> Tensor:
        H = obs.positions.shape[1]
        mean, covariance = query_statistics(obs, self.first)
        mean, covariance = mean.unflatten(1, (H, -1)), covariance.unflatten(1, (H, -1))  # [B, H, G, D], [B, H, G, D, D]
        keys = self.turned_back(obs)
        expected = obs.scale * mean @ keys.mT  # [B, H, G, L]
        spread = [(keys @ covariance[:, :, g] * keys).sum(-1) for g in range(mean.shape[2])]  # one [B, H, L, D] at a time
        logits = expected + obs.scale**2 / 2 * torch.stack(spread, 2)
        outlier = (obs.positions < self.first) & obs.filled
        counted = obs.filled & ~outlier
        attention = logits.masked_fill(~counted[:, :, None], torch.finfo(torch.float32).min).softmax(-1).mean(2)  # [B, H, L]
        scores = (attention + self.epsilon) * obs.values.float().norm(dim=-1)
        return scores.masked_fill(outlier, float("inf"))

    def turned_back(self, obs: Observation) -> Tensor:
        """R' k [B, H, L, D] float32: rotating the keys back by the mean rotation is rotating mu and S forward."""
        assert obs.rope_offset is not None
        frequencies = self.frequencies.to(obs.keys.device)
        ahead = (obs.num_seen + obs.rope_offset)[:, None] + torch.arange(self.future, device=frequencies.device)  # [B, future]
        angle = ahead[..., None] * frequencies
        cos, sin = ((f(angle) * self.attention_scaling).mean(1)[:, None, None] for f in (torch.cos, torch.sin))
        return turn_back(obs.keys.float(), cos, sin)


def query_statistics(obs: Observation, first: int) -> tuple[Tensor, Tensor]:
    """Mean [B, Q, D] and covariance [B, Q, D, D] of this step's queries before rotation, tokens before `first` and padding left out."""
    assert obs.queries_pre_rope is not None
    counted = (obs.new_positions >= first)[:, None, :, None]  # [B, 1, T, 1]
    count = counted.sum(2).clamp(min=1)  # [B, 1, 1]
    queries = obs.queries_pre_rope.float()
    mean = (queries * counted).sum(2) / count
    centred = (queries - mean[:, :, None]) * counted
    return mean, centred.mT @ centred / count[..., None]
