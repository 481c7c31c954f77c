"""How many tokens stay, per KV head: uniform, by layer, or adaptive over the heads of a layer or of the whole model."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from learnkv import ops
from learnkv.observation import Observation


@dataclass(frozen=True)
class Ratio:
    """A budget as the fraction of the row's own tokens that is kept: `Ratio(0.1)` keeps a tenth."""

    kept: float

    def __post_init__(self) -> None:
        if isinstance(self.kept, bool) or not isinstance(self.kept, int | float) or not 0 < self.kept <= 1:
            raise ValueError(f"budget ratio {self.kept!r} is the fraction of tokens kept; give a number above 0, up to 1")


def resolve(budget: int | Ratio, num_seen: Tensor) -> Tensor:
    """Tokens per KV head for each row: num_seen [B] -> [B] int64.  The one place where a fraction becomes tokens."""
    if isinstance(budget, Ratio):
        share = Fraction(budget.kept).limit_denominator(10**6)  # 0.57 is 57 in 100, whatever a float makes of it
        return (num_seen * share.numerator // share.denominator).clamp(min=1)
    return torch.full_like(num_seen, budget)


class Allocator(Protocol):
    """Splits a budget over the heads it is shown.

    scores        one [B, H, L] float32 per layer: +inf on protected slots, -inf on empty ones
    budget        [B] int64 tokens per KV head
    observations  one per layer, beside the scores
    returns       one [B, H] int64 per layer, tokens kept per head; sums to H * budget over what it was shown where that many are filled
    scope         "model" where it must see all layers at once
    spans         "model" where the layers share one budget, so that a layer may hold more than its part while others hold less;
                  "nothing" where scores decide how many stay, so that a selection may be due within the budget
    """

    @property
    def scope(self) -> Literal["layer", "model"]: ...

    @property
    def spans(self) -> Literal["layer", "model", "nothing"]: ...

    def __call__(self, scores: list[Tensor], budget: Tensor, observations: list[Observation]) -> list[Tensor]: ...


@dataclass(frozen=True)
class Uniform:
    """Every head keeps `budget` tokens."""

    scope: Literal["layer", "model"] = "layer"
    spans: ClassVar[Literal["layer", "model"]] = "layer"

    def __call__(self, scores: list[Tensor], budget: Tensor, observations: list[Observation]) -> list[Tensor]:
        return [budget[:, None].expand(s.shape[:2]) for s in scores]


@dataclass(frozen=True)
class Adaptive:
    """Heads compete for one budget: within a layer (Ada-KV, arXiv:2407.11550) or over the whole model (KVzip, arXiv:2505.23416).

    floor  fraction of the budget that every head keeps whatever the others score (Ada-KV's alpha, 0.2; KVzip's global threshold has 0)

    Differs: the floor is a hard minimum and the sum is exact; official Ada-KV shrinks linearly and drifts by rounding.
    """

    floor: float = 0.2
    scope: Literal["layer", "model"] = "layer"

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor={self.floor} is the fraction of the budget every head is sure of; give a number from 0 to 1")

    @property
    def spans(self) -> Literal["layer", "model"]:
        return self.scope

    def __call__(self, scores: list[Tensor], budget: Tensor, observations: list[Observation]) -> list[Tensor]:
        positions = [obs.positions for obs in observations]
        low = (budget.double() * self.floor + 1e-9).long()
        raised = [raise_top(s, p, low) for s, p in zip(scores, positions, strict=True)]
        heads = [s.shape[1] for s in scores]
        flat = torch.cat([s.flatten(1) for s in raised], 1)  # [B, N]
        order = torch.cat([p.flatten(1) for p in positions], 1)
        keep = ops.select(flat, order, budget * sum(heads))  # [B, N]
        parts = keep.split([s[0].numel() for s in scores], 1)
        return [part.view(s.shape).sum(-1) for part, s in zip(parts, scores, strict=True)]


def raise_top(scores: Tensor, positions: Tensor, count: Tensor) -> Tensor:
    """scores [B, H, L] with each head's best `count` [B] entries raised to +inf, above what is protected beyond them."""
    best = ops.select(scores, positions, count[:, None].expand(scores.shape[:2]))
    return scores.clamp(max=torch.finfo(scores.dtype).max).masked_fill(best, float("inf"))


@dataclass(frozen=True)
class Pyramid:
    """Lower layers keep more, upper layers less, in even steps (PyramidKV, arXiv:2406.02069).

    Of the budget's C tokens the p protected ones stay in every layer.  Beside them the first layer keeps (2 - 1 / beta) (C - p), the
    last (C - p) / beta, the others evenly between.  What a layer cannot hold goes to the others, and tokens are rounded so that all
    layers together keep exactly as many as under `uniform`.

    direction  "up" gives upper layers more, as some descriptions have it
    official   KVCache-Factory's arithmetic: whole steps, which overspend small budgets, and uniform where the prompt is under 2 (C - p)
    """

    beta: float = 20.0
    direction: Literal["down", "up"] = "down"
    official: bool = False

    scope: ClassVar[Literal["layer", "model"]] = "layer"
    spans: ClassVar[Literal["layer", "model"]] = "model"

    def __post_init__(self) -> None:
        if not self.beta > 1:
            raise ValueError(f"beta={self.beta} divides the budget of the smallest layer; give a number above 1")
        if self.direction not in ("down", "up"):
            raise ValueError(f"direction={self.direction!r} is neither 'down' (lower layers keep more) nor 'up'")

    def __call__(self, scores: list[Tensor], budget: Tensor, observations: list[Observation]) -> list[Tensor]:
        return [self.of_layer(s, budget, obs) for s, obs in zip(scores, observations, strict=True)]

    def of_layer(self, scores: Tensor, budget: Tensor, obs: Observation) -> Tensor:
        """[B, H] tokens per head of the layer that `obs` shows."""
        layer = obs.layer if self.direction == "down" else obs.num_layers - 1 - obs.layer
        kept = [p + self.by_layer(past, available, obs.num_layers)[layer] for p, past, available in unprotected(scores, budget, obs)]
        return torch.tensor(kept, device=scores.device)[:, None].expand(scores.shape[:2])

    def by_layer(self, past: int, available: int, num_layers: int) -> list[int]:
        """Unprotected tokens per layer, the first layer first: of a mean of `past`, where every layer has `available`."""
        if past >= available or num_layers == 1 or (self.official and available < 2 * past):
            return [min(past, available)] * num_layers
        if self.official:
            low = int(past // self.beta)
            high = 2 * past - low
            if high >= available:
                high, low = available, 2 * past - available
            step = (high - low) // (num_layers - 1)
            return [high - layer * step for layer in range(num_layers)]
        least, most = past / self.beta, past * (2 - 1 / self.beta)
        return rounded(filled([most - layer * (most - least) / (num_layers - 1) for layer in range(num_layers)], available))


@dataclass(frozen=True)
class PerHead:
    """A fixed share of the model's budget for every KV head, from a table made before (HeadKV, arXiv:2410.19258).

    Of the budget's C tokens the p protected ones stay in every head.  Of the C - p others each head is sure of (1 - 1 / beta); the rest
    of all heads is one pool, split by the table.  What a head cannot hold goes to the others, and tokens are rounded so that all heads
    together keep exactly as many as under `uniform`.

    table  [layers][heads] worth of each head, 0 or more; of KV heads, or of query heads, whose groups are averaged
    beta   how much is shared out: 1 pools everything, large values approach `uniform`; the paper tries 1.005 to 10

    With beta 1, a table of 1 for retrieval heads and 0 for streaming heads is DuoAttention's pattern (arXiv:2410.10819): streaming heads
    keep what is protected, retrieval heads all that is left of the budget, and what they cannot hold goes to the streaming heads.

    Differs: the sum is exact, and heads are KV heads; the official code keeps a cache for each query head.
    """

    table: tuple[tuple[float, ...], ...]
    beta: float = 1.01

    scope: ClassVar[Literal["layer", "model"]] = "layer"
    spans: ClassVar[Literal["layer", "model"]] = "model"

    def __post_init__(self) -> None:
        if not self.beta >= 1:
            raise ValueError(f"beta={self.beta} divides what a head is sure of; give 1 or more")
        widths = sorted({len(row) for row in self.table})
        if len(widths) != 1 or widths == [0]:
            raise ValueError(f"a table of heads has one number for each head of each layer; this one has rows of {widths or 'no'} numbers")
        if not all(0 <= x < math.inf for row in self.table for x in row) or not any(x for row in self.table for x in row):
            raise ValueError("a table of heads holds numbers from 0 on, one above 0 at least; this one holds others")

    @classmethod
    def read(cls, path: str | Path, beta: float = 1.01) -> PerHead:
        """A table from JSON, as rows of numbers or as HeadKV's {"layer-head": scores}, or the tensor `heads` of a safetensors file."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path} is no file; give a table of heads, .json or .safetensors, one row of numbers per layer")
        try:
            rows = load_file(path)["heads"].tolist() if path.suffix == ".safetensors" else json_table(json.loads(path.read_text()))
            found = cls(tuple(tuple(number(x) for x in row) for row in rows))
        except (SafetensorError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no table of heads ({error}); give rows of numbers, one row per layer") from error
        return replace(found, beta=beta)

    def __repr__(self) -> str:
        """Rows of a comparison carry it: other numbers in the same file are another measurement."""
        numbers = hashlib.sha256(repr(self.table).encode()).hexdigest()[:8]
        return f"PerHead({numbers} of {len(self.table)} x {len(self.table[0])} heads, beta={self.beta:g})"

    def __call__(self, scores: list[Tensor], budget: Tensor, observations: list[Observation]) -> list[Tensor]:
        return [self.of_layer(s, budget, obs) for s, obs in zip(scores, observations, strict=True)]

    def of_layer(self, scores: Tensor, budget: Tensor, obs: Observation) -> Tensor:
        """[B, H] tokens of each head of the layer that `obs` shows."""
        worth = self.worth(obs.num_layers, scores.shape[1])
        kept = [
            [p + extra for extra in self.by_head(past, available, worth)[obs.layer]]
            for p, past, available in unprotected(scores, budget, obs)
        ]
        return torch.tensor(kept, device=scores.device)

    def worth(self, num_layers: int, num_heads: int) -> list[list[float]]:
        """[layers][H] shares that sum to 1, query heads averaged over their group."""
        have = len(self.table), len(self.table[0])
        if have[0] != num_layers or have[1] % num_heads:
            raise ValueError(f"the table of heads is {have[0]} layers x {have[1]} heads, the model has {num_layers} x {num_heads} KV heads")
        group = have[1] // num_heads
        means = [[sum(row[h * group : (h + 1) * group]) for h in range(num_heads)] for row in self.table]
        total = sum(map(sum, means))
        return [[x / total for x in row] for row in means]

    def by_head(self, past: int, available: int, worth: list[list[float]]) -> list[list[int]]:
        """[layers][H] unprotected tokens: of a mean of `past`, where every head has `available`."""
        heads = [x for row in worth for x in row]
        sure, pool = past * (1 - 1 / self.beta), past * len(heads) / self.beta
        counts = rounded(filled([sure + pool * x for x in heads], available))
        H = len(worth[0])
        return [counts[start : start + H] for start in range(0, len(counts), H)]


def json_table(values: object) -> list[list[float]]:
    """Rows of numbers out of JSON; HeadKV's keys are "layer-head", its values one score or several that are averaged."""
    if not isinstance(values, dict):
        return values  # type: ignore[return-value]  # PerHead looks at it
    found = {tuple(map(int, key.split("-"))): x for key, x in values.items()}
    layers, heads = (1 + max(key[i] for key in found) for i in (0, 1))
    return [[mean(found[layer, head]) for head in range(heads)] for layer in range(layers)]


def mean(scores: float | list[float]) -> float:
    return sum(map(number, scores)) / len(scores) if isinstance(scores, list) else scores


def number(x: object) -> float:
    """x as a float; raises TypeError for what is no number."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise TypeError(f"{x!r} is no number")
    return float(x)


@dataclass(frozen=True)
class Threshold:
    """Every head keeps the tokens that score `least` or more, however many they are; the budget is the most that it keeps."""

    least: float

    scope: ClassVar[Literal["layer", "model"]] = "layer"
    spans: ClassVar[Literal["nothing"]] = "nothing"

    def __call__(self, scores: list[Tensor], budget: Tensor, observations: list[Observation]) -> list[Tensor]:
        return [(s >= self.least).sum(-1).minimum(budget[:, None]) for s in scores]


def unprotected(scores: Tensor, budget: Tensor, obs: Observation) -> list[tuple[int, int, int]]:
    """Per row: tokens protected in a head, the budget past them, and the tokens that it can be spent on."""
    protected = (scores == float("inf")).sum(-1).amax(1)  # [B]
    return [(p, max(0, c - p), max(0, n - p)) for c, p, n in zip(budget.tolist(), protected.tolist(), obs.num_seen.tolist(), strict=True)]


def filled(wanted: list[float], most: int) -> list[float]:
    """No more than `most` of each; what is cut off goes to the others in equal parts, until all of it is placed or all are full."""
    given, rest = [0.0] * len(wanted), wanted
    while any(g + r > most + 1e-9 for g, r in zip(given, rest, strict=True)):
        given = [g + r for g, r in zip(given, rest, strict=True)]
        excess = sum(max(0.0, g - most) for g in given)
        given = [min(g, float(most)) for g in given]
        room = [g < most for g in given]
        rest = [excess / sum(room) if free else 0.0 for free in room] if any(room) else [0.0] * len(wanted)
    return [g + r for g, r in zip(given, rest, strict=True)]


def rounded(wanted: list[float]) -> list[int]:
    """Whole numbers of the same sum: the largest remainders are rounded up, of equal ones the first."""
    whole = [math.floor(w + 1e-9) for w in wanted]
    by_remainder = sorted(range(len(wanted)), key=lambda i: whole[i] - wanted[i])
    for i in by_remainder[: round(sum(wanted)) - sum(whole)]:
        whole[i] += 1
    return whole


uniform = Uniform()
pyramid = Pyramid()
adaptive = Adaptive()
adaptive_global = Adaptive(floor=0.0, scope="model")

ALLOCATORS: dict[str, Allocator] = {"uniform": uniform, "pyramid": pyramid, "adaptive": adaptive, "adaptive_global": adaptive_global}
