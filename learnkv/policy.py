"""Policy: a scorer plus budget rules decides which slots stay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from learnkv import budgets, ops
from learnkv.budgets import Allocator, Ratio
from learnkv.counts import check_count
from learnkv.names import given
from learnkv.observation import Observation, Scorer

AFTERWARDS = "earlier layers may have evicted already: reset() the cache, or use a clone from before"
LARGEST = torch.finfo(torch.float32).max / 2  # of a scorer; allocators have room between it and infinity


@dataclass(frozen=True)
class Policy:
    """Which slots stay, and when that is asked.

    scorer      worth of every slot
    budget      tokens per KV head, sinks and recent window included; a Ratio is of the row's own tokens
    allocate    how the budget is split over heads
    num_sinks   first tokens of a row that always stay
    num_recent  last tokens of a row that always stay
    interval    decode steps between evictions
    """

    scorer: Scorer
    budget: int | Ratio
    allocate: Allocator = field(default=budgets.uniform)
    num_sinks: int = 4
    num_recent: int = 32
    interval: int = 1

    def __post_init__(self) -> None:
        check_scorer(self.scorer)
        check_allocator(self.allocate)
        for name in ("num_sinks", "num_recent", "interval"):
            check_count(name, getattr(self, name))
        if self.num_sinks < 0 or self.num_recent < 0:
            raise ValueError(f"num_sinks={self.num_sinks} and num_recent={self.num_recent} count tokens; give 0 or more")
        if self.interval < 1:
            raise ValueError(f"interval={self.interval} counts decode steps; give 1 or more")
        if not isinstance(self.budget, (int, Ratio)) or isinstance(self.budget, bool):
            raise ValueError(f"budget={self.budget!r} is neither a number of tokens (512) nor a fraction of them (Ratio(0.1))")
        if isinstance(self.budget, int):
            check_count("budget", self.budget)
        protected = self.num_sinks + self.num_recent
        if isinstance(self.budget, int) and self.budget < max(protected, 1):
            least = f"num_sinks + num_recent = {protected}" if protected else "1"
            raise ValueError(f"budget={self.budget} is smaller than {least}; raise the budget or shrink the window")

    @property
    def scope(self) -> Literal["layer", "model"]:
        """Whether one layer can be evicted from at once, or the scores of all are wanted first."""
        return "model" if "model" in (self.scorer.scope, self.allocate.scope) else "layer"

    def select(
        self,
        observations: list[Observation],
        pinned: list[Tensor] | None = None,
        *,
        budget: Tensor | None = None,
        scores: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """One keep mask [B, H, L] bool per observation; of all layers together when `scope` is "model".

        pinned  one [B, H, L] bool per observation: slots that stay beside sinks and recent window
        budget  [B] int64, a Ratio's tokens as they were resolved before; resolved now where None
        scores  one [B, H, L] per observation, what the scorer said of them; asked now where None
        Protected slots stay even where they exceed the budget; a row within its budget keeps everything.
        """
        if pinned is None:
            pinned = [torch.zeros_like(obs.filled) for obs in observations]
        if budget is None:
            budget = budgets.resolve(self.budget, observations[0].num_seen)
        if scores is None:
            scores = [self.scorer.score(obs) for obs in observations]
        masked = [self.mask(s, obs, pins) for s, obs, pins in zip(scores, observations, pinned, strict=True)]
        kept = self.split(masked, budget, observations)
        return [self.keep(s, obs, k) for s, obs, k in zip(masked, observations, kept, strict=True)]

    def split(self, scores: list[Tensor], budget: Tensor, observations: list[Observation]) -> list[Tensor]:
        """Tokens kept per head, one [B, H] per layer; an allocator of scope "layer" sees a layer at a time."""
        if self.allocate.scope == "model":
            return self.allocate(scores, budget, observations)
        return [self.allocate([s], budget, [obs])[0] for s, obs in zip(scores, observations, strict=True)]

    def mask(self, scores: Tensor, obs: Observation, pinned: Tensor) -> Tensor:
        """[B, H, L] float32 scores: +inf on protected slots, -inf on empty ones, NaN refused."""
        recent = obs.positions >= (obs.num_seen - self.num_recent)[:, None, None]
        return self.marked(scores, obs, obs.filled & ((obs.positions < self.num_sinks) | recent | pinned))

    def marked(self, scores: Tensor, obs: Observation, protected: Tensor) -> Tensor:
        """What the scorer said, with infinities that are the policy's own; protected [B, H, L] bool."""
        who = type(self.scorer).__name__
        if not isinstance(scores, Tensor) or scores.shape != obs.filled.shape:
            got = f"scores of shape {list(scores.shape)}" if isinstance(scores, Tensor) else f"{type(scores).__name__} for scores"
            raise ValueError(f"{who} gave {got} in layer {obs.layer}; a scorer gives a tensor [B, H, L], here {list(obs.filled.shape)}")
        scores = scores.float()
        if (scores.isnan() & obs.filled).any():
            raise ValueError(f"{who} gave NaN scores in layer {obs.layer}, which keeps all it holds; {AFTERWARDS}")
        scores = scores.clamp(-LARGEST, LARGEST)
        return scores.masked_fill(protected, float("inf")).masked_fill(~obs.filled, float("-inf"))

    def keep(self, scores: Tensor, obs: Observation, kept: Tensor) -> Tensor:
        """[B, H, L] bool: each head's best `kept` [B, H] slots by the scorer's last word, and every protected one."""
        kept, protected = torch.minimum(kept, obs.slots.lengths.long()), scores == float("inf")
        worth = self.marked(self.scorer.refine(scores, kept, obs), obs, protected)
        return obs.filled & (ops.select(worth, obs.positions, kept) | protected)


def check_scorer(scorer: Scorer) -> None:
    """Refuses what is no scorer, and one with a knob beyond what positions can count."""
    if not isinstance(scorer, Scorer):
        raise ValueError(f'scorer is {given(scorer)}, no Scorer; methods.METHODS["snapkv"](budget=512) makes the Policy of a method')
    for name, value in vars(scorer).items():
        if isinstance(value, Scorer):
            check_scorer(value)
        elif isinstance(value, int) and not isinstance(value, bool) and name != "seed":  # a seed counts nothing
            check_count(f"{type(scorer).__name__}: {name}", value)


def check_allocator(allocate: Allocator) -> None:
    """Refuses what splits no budget."""
    if not callable(allocate) or not hasattr(allocate, "scope") or not hasattr(allocate, "spans"):
        raise ValueError(f'allocate is {given(allocate)}, no Allocator; give one, as budgets.ALLOCATORS["adaptive"] is')
