"""TRIM-KV: each token is born with a rate at which it fades, and what has faded most is evicted (arXiv:2512.03324)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkv.gates.base import Batch
from learnkv.gates.distilled import LEARN_FROM, DistilledGate, check_choice, divergence
from learnkv.gates.soft import Change, Seen, blocks_of_rows, gated_attention, per_row, recomputed
from learnkv.models import BaseModel
from learnkv.observation import Observation
from learnkv.traces.format import Trace

ROWS = 64  # query rows at once


@dataclass(frozen=True)
class TrimKVConfig:
    """Published: the defaults, with bias=18 in the paper; released config: bias=10."""

    width: int = 512  # of the hidden layer
    bias: float = 10.0  # of the outputs at first, so that retention begins near 1
    budget: int = 512  # M, tokens per KV head up to which what is retained costs nothing
    capacity: float = 1.0  # lambda, weight of what is retained above it
    form: str = "additive"  # what decay does to attention logits: additive, multiplicative
    learn_from: str = "all"  # next tokens that are distilled: all, those of the continuation, of its answers

    def __post_init__(self) -> None:
        check_choice("form", self.form, tuple(FORMS))
        check_choice("learn_from", self.learn_from, LEARN_FROM)
        for name in ("width", "budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} counts from 1; give 1 or more")
        if self.capacity < 0:
            raise ValueError(f"capacity={self.capacity} is the weight of a loss; give 0 or more")


class TrimKV(DistilledGate):
    """log beta = logsigmoid(MLP(hidden)) per KV head; after t tokens, i is worth (t + 1 - i) log beta_i (arXiv:2512.03324).

    In training attention decays softly: at t, key i counts beta_i^(t - i) times.  Loss: KL(plain || gated) of the next token, its
    cross-entropy, and the mean over t of max(0, sum_i beta_i^(t - i) - M) / t.

    Differs: decay is added to the logits, where the released eager kernel multiplies them (form=multiplicative): the added form is a
    decay of attention itself.  The released cache counts one token more of age than the paper.  Only gates train; the release has no
    training code.
    """

    METHOD = "trimkv"
    READS = frozenset({"hidden"})
    needs = frozenset({"hidden"})
    memory_size = 1  # log beta, written when the token is born
    Config = TrimKVConfig
    config: TrimKVConfig

    def __init__(self, config: TrimKVConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        L, M, W, H = base.num_layers, base.hidden_size, config.width, base.num_kv_heads
        self.inner = nn.Parameter(uniform(M, L, M, W))
        self.inner_bias = nn.Parameter(uniform(M, L, 1, W))
        self.outer = nn.Parameter(uniform(W, L, W, H))
        self.outer_bias = nn.Parameter(torch.full((L, 1, H), config.bias))

    def forward(self, hidden: Tensor, layers: slice) -> Tensor:
        """[l, H, R] float32 log beta of rows [l, R, M] by the weights of `layers`."""
        x = F.silu(torch.baddbmm(self.inner_bias[layers], hidden.float(), self.inner[layers]))
        return F.logsigmoid(torch.baddbmm(self.outer_bias[layers], x, self.outer[layers]).float()).mT

    def of_layer(self, layer: int, hidden: Tensor) -> Tensor:
        """[B, H, T] log beta of one layer's hidden [B, T, M]."""
        rows = self(hidden.flatten(0, 1)[None], slice(layer, layer + 1))[0]  # [H, B * T]
        return rows.unflatten(1, hidden.shape[:2]).transpose(0, 1)

    @torch.no_grad()
    def remember(self, obs: Observation) -> Tensor:
        self.check_geometry(obs)
        assert obs.hidden is not None
        return obs.write_new(self.of_layer(obs.layer, obs.hidden)[..., None])

    def score(self, obs: Observation) -> Tensor:
        self.check_geometry(obs)
        return worth(obs.memory[..., 0], obs.num_seen[:, None, None] - obs.positions)

    @torch.no_grad()
    def score_trace(self, trace: Trace) -> Tensor:
        log_beta = self(self.inputs_of(trace, "hidden"), slice(None))
        return worth(log_beta, torch.arange(len(trace.ids), 0, -1, device=self.device))

    def trace_loss(self, batch: Batch, trace: Trace) -> Tensor:
        sequence, rows = self.sequence_of(trace, self.config.learn_from)
        log_betas: list[Tensor] = []

        def attend(seen: Seen) -> Tensor:
            log_betas.append(self.of_layer(seen.layer, seen.hidden))
            return gated_attention(seen, FORMS[self.config.form], log_betas[-1])

        plain, gated = self.both_logits(sequence.ids, rows, attend)
        teachers = self.dealt(batch, trace, len(rows))
        said = F.cross_entropy(gated.float(), sequence.ids[rows + 1][teachers])
        retained = capacity_loss(torch.cat(log_betas), self.config.budget).mean()
        return divergence(plain[teachers], gated, "forward") + said + self.config.capacity * retained


def uniform(fan_in: int, *shape: int) -> Tensor:
    """Uniform within 1 / sqrt(fan_in) of 0, as torch's Linear begins."""
    return torch.empty(shape).uniform_(-(fan_in**-0.5), fan_in**-0.5)


def worth(log_beta: Tensor, age: Tensor) -> Tensor:
    """Log of what is left of a token; age is t + 1 - i, so that a token just born has 1."""
    return log_beta * age


def added_decay(logits: Tensor, age: Tensor, log_beta: Tensor) -> Tensor:
    """Attention to key i times beta_i^age."""
    return logits + per_row(log_beta) * age.clamp(min=0)


def multiplied_decay(logits: Tensor, age: Tensor, log_beta: Tensor) -> Tensor:
    """The logit of key i times beta_i^age, which draws it towards 0 from either side."""
    return logits * (per_row(log_beta) * age.clamp(min=0)).exp()


FORMS: dict[str, Change] = {"additive": added_decay, "multiplicative": multiplied_decay}


def capacity_loss(log_beta: Tensor, budget: int) -> Tensor:
    """[...] mean over t of max(0, sum of beta_i^(t - i) over i <= t, less budget) / t; log_beta [..., n], t counts from 1."""
    t = torch.arange(1, log_beta.shape[-1] + 1, device=log_beta.device)
    return ((retained(log_beta) - budget).clamp(min=0) / t).mean(-1)


def retained(log_beta: Tensor) -> Tensor:
    """[..., n] tokens that each row still holds, softly counted; some rows at a time, computed again for the gradient."""
    blocks = blocks_of_rows(log_beta.shape[-1], ROWS)
    return torch.cat([recomputed(retained_rows, log_beta[..., : rows.stop], rows) for rows in blocks], -1)


def retained_rows(log_beta: Tensor, rows: range) -> Tensor:
    """[..., R] of a block of rows, over the tokens [..., S] up to its last."""
    at = torch.arange(rows.stop, device=log_beta.device)
    age = at[rows.start :, None] - at  # [R, S]
    left = (log_beta[..., None, :] * age.clamp(min=0)).exp()
    return left.masked_fill(age < 0, 0).sum(-1)
