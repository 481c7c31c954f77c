"""DMS: each token decides whether the one before it may go, and it goes once it leaves a window (arXiv:2506.05345)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkv.gates.base import Batch
from learnkv.gates.distilled import DIRECTIONS, LEARN_FROM, DistilledGate, check_choice, divergence
from learnkv.gates.soft import Seen, gated_attention, per_row
from learnkv.models import BaseModel
from learnkv.observation import Observation
from learnkv.traces.format import Trace

UNDECIDED = 1e9  # worth of a token whose decision has not come: above any that has
EPSILON = 1e-6  # of the norm


@dataclass(frozen=True)
class DMSConfig:
    """Published (NVIDIA/Model-Optimizer, configs/qwen3_8b.yaml): the defaults, with divergence=reverse."""

    window: int = 512  # tokens before the query that attention sees whatever was decided
    temperature: float = 0.1  # tau of the relaxed decision
    scale: float = 100.0  # of the decision logit
    offset: float = 5.0  # taken from it, so that nothing is evicted at first
    ratio: float = 16.0  # compression that the schedule ends at: tokens seen over tokens kept
    ratio_steps: int = 510  # steps until then, linear from 1
    divergence: str = "forward"  # forward is KL(plain || gated), reverse KL(gated || plain)
    learn_from: str = "all"  # next tokens that are distilled: all, those of the continuation, of its answers

    def __post_init__(self) -> None:
        check_choice("divergence", self.divergence, DIRECTIONS)
        check_choice("learn_from", self.learn_from, LEARN_FROM)
        for name in ("window", "ratio_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} counts from 1; give 1 or more")
        if not (self.temperature > 0 and self.scale > 0):
            raise ValueError(f"temperature={self.temperature} and scale={self.scale} must be above 0")
        if self.ratio < 1:
            raise ValueError(f"ratio={self.ratio} is tokens seen over tokens kept; give 1 or more")


class DMS(DistilledGate):
    """Decision logit 100 Linear(RMSNorm(block input)) - 5 per KV head; above 0 the token before goes (arXiv:2506.05345).

    In training a decision is relaxed by logistic noise, z = (logit + noise) / tau, and keys outside the window get log sigmoid(-z) added
    to their attention logits.  Loss: divergence of the next token, and what the share of evictions lacks of a target that rises.
    A policy with the training's window as `num_recent` and Threshold(0) serves it: how many tokens stay is up to the data.

    Differs: adapters only train, as in the authors' code (the paper trains all weights); their norm has no weight of its own, which the
    linear map after it holds.  KL(plain || gated) by default, where the authors' code computes the reverse under the forward's name.
    """

    METHOD = "dms"
    READS = frozenset({"block_input"})
    needs = frozenset({"block_input"})
    memory_size = 1  # the token's worth: less its decision logit, which comes with the next token
    Config = DMSConfig
    config: DMSConfig

    def __init__(self, config: DMSConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        self.weight = nn.Parameter(torch.zeros(base.num_layers, base.hidden_size, base.num_kv_heads))

    def forward(self, block_input: Tensor, layers: slice) -> Tensor:
        """[l, H, R] float32 decision logits that rows [l, R, M] emit, by the weights of `layers`."""
        x = F.rms_norm(block_input.float(), block_input.shape[-1:], eps=EPSILON)
        return self.config.scale * torch.bmm(x, self.weight[layers]).float().mT - self.config.offset

    def of_layer(self, layer: int, block_input: Tensor) -> Tensor:
        """[B, H, T] what one layer's tokens [B, T, M] emit."""
        rows = self(block_input.flatten(0, 1)[None], slice(layer, layer + 1))[0]  # [H, B * T]
        return rows.unflatten(1, block_input.shape[:2]).transpose(0, 1)

    @torch.no_grad()
    def remember(self, obs: Observation) -> Tensor:
        self.check_geometry(obs)
        assert obs.block_input is not None
        return decided(obs, self.of_layer(obs.layer, obs.block_input))[..., None]

    def score(self, obs: Observation) -> Tensor:
        self.check_geometry(obs)
        return obs.memory[..., 0]

    @torch.no_grad()
    def score_trace(self, trace: Trace) -> Tensor:
        emitted = self(self.inputs_of(trace, "block_input"), slice(None))
        return -of_next(emitted, -UNDECIDED)

    def trace_loss(self, batch: Batch, trace: Trace) -> Tensor:
        config = self.config
        sequence, rows = self.sequence_of(trace, config.learn_from)
        noise = logistic_noise(batch, trace, (self.base.num_layers, self.base.num_kv_heads, len(sequence.ids))).to(self.device)
        evicted: list[Tensor] = []

        def attend(seen: Seen) -> Tensor:
            z = (self.of_layer(seen.layer, seen.block_input) + noise[seen.layer]) / config.temperature
            evicted.append(straight_through(z).mean())
            log_kept = F.logsigmoid(-of_next(z, 0.0))  # whatever the last one's is: no later row sees it
            return gated_attention(seen, partial(outside_window, config.window), log_kept)

        plain, gated = self.both_logits(sequence.ids, rows, attend)
        lacking = (self.target(batch.step) - torch.stack(evicted).mean()).clamp(min=0)
        return divergence(plain[self.dealt(batch, trace, len(rows))], gated, config.divergence) + lacking

    def target(self, step: int) -> float:
        """Share of tokens to be evicted: 1 - 1 / ratio, whose ratio rises linearly."""
        ratio = 1 + (self.config.ratio - 1) * min(step / self.config.ratio_steps, 1.0)
        return 1 - 1 / ratio


def of_next(emitted: Tensor, last: float) -> Tensor:
    """[..., n] for each token what the one after it emitted; `last` for the last."""
    return F.pad(emitted[..., 1:], (0, 1), value=last)


def outside_window(window: int, logits: Tensor, age: Tensor, log_kept: Tensor) -> Tensor:
    """The log of how far a key is kept, added where it stands more than `window` tokens before the query."""
    return logits + per_row(log_kept) * (age > window)


def straight_through(z: Tensor) -> Tensor:
    """1 where sigmoid(z) is above a half, else 0, with sigmoid's gradient."""
    p = z.sigmoid()
    return (z > 0).float() - p.detach() + p


def logistic_noise(batch: Batch, trace: Trace, shape: tuple[int, ...]) -> Tensor:
    """Standard logistic draws, the difference of two Gumbel ones."""
    u = torch.rand(shape, generator=batch.generator(trace, "decisions"), dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    return u.logit().float()


def decided(obs: Observation, emitted: Tensor) -> Tensor:
    """[B, H, L] every slot's worth after a step whose tokens emitted [B, H, T] decision logits.

    The step's k-th real token decides on the (k - 1)-th, its first on the last one before the step, where that is still held.
    """
    B, H, T = emitted.shape
    start = obs.num_seen - obs.num_new  # [B]
    k = torch.where(obs.new_positions >= 0, obs.new_positions - start[:, None], T)  # [B, T], T on padding
    by_place = emitted.new_full((B, H, T + 1), -UNDECIDED).scatter(2, k[:, None].expand(B, H, T), emitted)
    by_place = by_place.masked_fill(torch.arange(T + 1, device=k.device) >= obs.num_new[:, None, None], -UNDECIDED)
    place = obs.positions - start[:, None, None] + 1  # of the token that decides on each slot
    found = -by_place.gather(2, place.clamp(0, T).long())
    return torch.where((place >= 0) & obs.filled, found, obs.memory[..., 0])
