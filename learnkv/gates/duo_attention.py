"""DuoAttention: some heads keep everything, the others first and last tokens; which ones is learned (arXiv:2410.10819)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from learnkv.files import write_atomically
from learnkv.gates.base import Batch, describe_geometry
from learnkv.gates.distilled import DistilledGate
from learnkv.gates.soft import Seen, gated_attention, soft_attention
from learnkv.models import BaseModel
from learnkv.observation import Observation
from learnkv.traces.format import Trace

PATTERN, SETTINGS = "full_attention_heads.tsv", "config.json"  # as the authors name them


@dataclass(frozen=True)
class DuoAttentionConfig:
    """Published: the defaults."""

    num_sinks: int = 128  # first tokens that a streaming head sees in training
    num_recent: int = 256  # last tokens, the query's own included
    sparsity: float = 0.5  # share of the heads that stream when the gate is served: those of the least alpha
    weight: float = 0.05  # of mean |alpha|

    def __post_init__(self) -> None:
        if self.num_sinks < 0 or self.num_recent < 1:
            raise ValueError(f"num_sinks={self.num_sinks} and num_recent={self.num_recent} count tokens; give at least 0 and 1")
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity={self.sparsity} is the share of streaming heads; give a number from 0 to below 1")
        if self.weight < 0:
            raise ValueError(f"weight={self.weight} is the weight of a loss; give 0 or more")


class DuoAttention(DistilledGate):
    """One alpha per KV head: attention is alpha full + (1 - alpha) streaming in training (arXiv:2410.10819).

    Loss: mean square of what the last hidden states differ by where answers are predicted, + 0.05 mean |alpha|, alpha clamped to [0, 1].
    Served, the heads of largest alpha share what the budget leaves beside sinks and recent window (`table`).  A head's scores are
    positions, shifted by the rank of its alpha: with one budget over all heads (allocate="adaptive_global"), heads fill in that order
    instead, so that the budget says how many are full.

    Differs: the rows that predict an answer's tokens count, in the authors' code the tokens of questions and answers; of equal alphas
    the first streams, which random noise decides there.
    """

    METHOD = "duo_attention"
    Config = DuoAttentionConfig
    config: DuoAttentionConfig

    def __init__(self, config: DuoAttentionConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        self.alpha = nn.Parameter(torch.ones(base.num_layers, base.num_kv_heads))

    @property
    def ranks(self) -> Tensor:
        """[layers, H] int64, 0 for the least alpha."""
        order = self.alpha.detach().clamp(0, 1).flatten().argsort(stable=True)
        return order.argsort().view_as(self.alpha)

    @property
    def table(self) -> tuple[tuple[float, ...], ...]:
        """[layers][heads] 1 for a full head, 0 for a streaming one, as `budgets.PerHead` takes it."""
        full = self.ranks >= min(round(self.config.sparsity * self.alpha.numel()), self.alpha.numel() - 1)
        return tuple(map(tuple, full.float().tolist()))

    def forward(self, share: Tensor, layers: slice) -> Tensor:
        """[l, H, R] float32 scores of tokens that lie at a share [l, H, R] from 0 to 1 of their sequence."""
        return self.ranks[layers, :, None] + share

    def score(self, obs: Observation) -> Tensor:
        self.check_geometry(obs)
        share = (obs.positions + 1) / (obs.num_seen[:, None, None] + 1)  # [B, H, L], below 1
        rows = share.transpose(0, 1).flatten(1)[None]  # [1, H, B * L]
        return self(rows, slice(obs.layer, obs.layer + 1))[0].unflatten(1, (share.shape[0], -1)).transpose(0, 1)

    def score_trace(self, trace: Trace) -> Tensor:
        n = len(trace.ids)
        share = torch.arange(1, n + 1, device=self.device) / (n + 1)
        return self(share.expand(*self.alpha.shape, n), slice(None))

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            self.alpha.clamp_(0, 1)  # here rather than after the step, as the authors do
        return super().loss(batch)

    def trace_loss(self, batch: Batch, trace: Trace) -> Tensor:
        sequence, rows, teachers = self.sequence_of(batch, trace, "answers")
        run = partial(self.model.get_decoder(), input_ids=sequence.ids[None], use_cache=False)
        with torch.no_grad():
            plain = run().last_hidden_state[0, teachers].float()
        with soft_attention(self.model, self.mixed):
            gated = run().last_hidden_state[0, rows].float()
        return (gated - plain).square().mean() + self.config.weight * self.alpha.abs().mean()

    def mixed(self, seen: Seen) -> Tensor:
        """[B, T, Q, D] of both attentions."""
        streaming = gated_attention(seen, partial(sinks_and_recent, self.config.num_sinks, self.config.num_recent))
        group = seen.queries.shape[1] // seen.keys.shape[1]
        alpha = self.alpha[seen.layer].repeat_interleave(group)[:, None]  # [Q, 1]
        return alpha * seen.plain() + (1 - alpha) * streaming


def sinks_and_recent(num_sinks: int, num_recent: int, logits: Tensor, age: Tensor) -> Tensor:
    """The logits of the first and the last tokens; -inf elsewhere."""
    first = torch.arange(age.shape[1], device=age.device) < num_sinks
    return logits.masked_fill(~(first | (age < num_recent)), -torch.inf)


# ---- the authors' own files


def write_pattern(gate: DuoAttention, folder: Path) -> None:
    """Alphas as the authors' `load_attn_pattern` reads them: a row of tab-separated numbers per layer, the sizes in a json beside."""
    lines = ["\t".join(f"{x:.18e}" for x in row) + "\n" for row in gate.alpha.detach().clamp(0, 1).tolist()]
    sizes = {"model_name": gate.base.name, "sink_size": gate.config.num_sinks, "recent_size": gate.config.num_recent}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PATTERN, lambda to: to.write_text("".join(lines)))
    write_atomically(folder / SETTINGS, lambda to: to.write_text(json.dumps(sizes | {"reg_weight": gate.config.weight}) + "\n"))


def read_pattern(folder: str | Path, base: BaseModel, sparsity: float = DuoAttentionConfig.sparsity) -> DuoAttention:
    """A gate from a published pattern, `full_attention_heads.tsv` and `config.json` in a folder; base is describe(model)."""
    folder = Path(folder)
    try:
        rows = [[float(x) for x in line.split("\t")] for line in (folder / PATTERN).read_text().splitlines() if line.strip()]
        settings = json.loads((folder / SETTINGS).read_text())
        sizes = settings["sink_size"], settings["recent_size"]
        weight = settings.get("reg_weight", DuoAttentionConfig.weight)
        alpha = torch.tensor(rows).clamp(0, 1)
        if not all(type(size) is int for size in sizes) or type(weight) not in (int, float) or not alpha.isfinite().all():
            raise ValueError(f"sizes {sizes}, weight {weight!r}, or alphas that are no numbers")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} holds no pattern of DuoAttention ({error}); give a folder with {PATTERN} and {SETTINGS}") from error
    config = DuoAttentionConfig(*sizes, sparsity=sparsity, weight=weight)
    gate = DuoAttention(config, base)
    if alpha.shape != gate.alpha.shape:
        want = describe_geometry(base.num_layers, base.num_kv_heads, base.head_dim)
        raise ValueError(f"the pattern in {folder} is of {list(alpha.shape)} layers x KV heads, {base.name} has {want}; take its own")
    gate.alpha.data.copy_(alpha)
    return gate.eval().requires_grad_(False)
