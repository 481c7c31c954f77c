"""Diagnosis of a policy: how far its choice lies from the oracle's, what each head keeps, and which text survived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learnkv import ops
from learnkv.evaluation.compare import encode_prompt
from learnkv.evaluation.judge import oracle_utility
from learnkv.models import PreTrainedModel, PreTrainedTokenizerBase
from learnkv.policy import Policy
from learnkv.prompts import Encoded, Prompt
from learnkv.prompts.prompt import asked_inside
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache, prefill_many

Array = NDArray[np.float64]
COLUMNS = 120  # characters of text on a line of the picture


@dataclass(frozen=True)
class Survival:
    """The text of one context: its n tokens, and the share of all KV heads of all layers that kept each, `kept` [n] float64."""

    tokens: tuple[str, ...]
    kept: Array


@dataclass(frozen=True)
class Diagnosis:
    """What a policy kept of each of P prompts, beside the oracle, which knows the attention that question and answer will pay.

    regret     [P, layers, H]  attention to come that a head lost and would have kept, had it kept as many tokens by the oracle's order, as
                               a share of all that its context receives; 0 is the oracle's
    overlap    [P, layers, H]  share of the tokens that the oracle's order keeps which were kept; NaN where there was nothing to choose
    retention  [P, layers, H]  tokens kept / tokens of the context
    texts      per prompt      which text survived

    Sinks, recent window and pins stay in either case: they are in `retention` and `texts`, and out of `overlap`.
    """

    regret: Array
    overlap: Array
    retention: Array
    texts: tuple[Survival, ...]

    def draw(self, path: str | Path) -> None:
        """Regret, overlap and retention by layer and head, mean over prompts, above the first prompt's text, as PNG."""
        from matplotlib.figure import Figure  # a second to import, for pictures only

        lines = text_lines(self.texts[0])
        layers = self.regret.shape[1]
        heights = [2 + 0.12 * layers, LEGEND + LINE_POINTS / 72 * len(lines)]  # inches
        figure = Figure(figsize=(COLUMNS * LETTER_POINTS / 72, sum(heights)), layout="constrained")
        maps, text = cast(NDArray, figure.subfigures(2, 1, height_ratios=heights))
        for axis, (name, values) in zip(maps.subplots(1, 3), self.means().items(), strict=True):
            image = axis.imshow(values, aspect="auto", vmin=0, vmax=1 if name != "regret" else None)
            axis.set(title=name, xlabel="KV head", ylabel="layer")
            maps.colorbar(image, ax=axis)
        draw_text(text, lines, LEGEND / heights[1])
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, format="png")

    def means(self) -> dict[str, Array]:
        """Name -> [layers, H] mean over prompts; NaN where no prompt had anything to choose."""
        named = {"regret": self.regret, "overlap": self.overlap, "retention": self.retention}
        return {name: mean_known(values) for name, values in named.items()}


def mean_known(values: Array) -> Array:
    """[layers, H] mean over the prompts of [P, layers, H] whose value is no NaN."""
    known = ~np.isnan(values)
    count = known.sum(0)
    return np.divide(np.where(known, values, 0).sum(0), count, out=np.full(count.shape, np.nan), where=count > 0)


def diagnose(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    policy: Policy,
    *,
    question: Literal["outside", "inside"] = "outside",
) -> Diagnosis:
    """What the policy keeps of each prompt in one prefill; the oracle foresees all questions of a prompt.

    question  inside: the first question of each prompt is part of what is compressed, and the only one foreseen
    """
    if not prompts:
        raise ValueError("diagnose got no prompts; give one or more")
    found = [of_prompt(model, tokenizer, prompt, policy, question == "inside") for prompt in prompts]
    regret, overlap, retention = (np.stack([figures[i] for figures, _ in found]) for i in range(3))
    return Diagnosis(regret, overlap, retention, tuple(text for _, text in found))


def of_prompt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, policy: Policy, inside: bool
) -> tuple[tuple[Array, Array, Array], Survival]:
    """Regret, overlap and retention [layers, H] of one prompt, and its text."""
    encoded = encode_prompt(model, tokenizer, prompt)
    asked = [asked_inside(encoded[0])] if inside else encoded
    ids = asked[0].context
    utility = oracle_utility(model, asked)
    with attach(model):
        (cache,) = prefill_many(model, ids[None], [policy], pins=asked[0].pins)
    kept = kept_mask(cache, len(ids)).to(utility.device)
    regret, overlap = beside_oracle(kept, utility, protected_mask(policy, asked[0]).to(utility.device))
    share = kept.double().mean((0, 1)).cpu().numpy()
    tokens = tuple(str(tokenizer.decode([token])) for token in ids.tolist())
    return (regret, overlap, kept.double().mean(2).cpu().numpy()), Survival(tokens, share)


def kept_mask(cache: EvictionCache, num_tokens: int) -> Tensor:
    """[layers, H, n] bool which tokens of its only row a cache holds."""
    positions = [layer[0].long() for layer in cache.kept_positions()]  # [H, L], -1 past a head's last
    held = torch.zeros(len(positions), len(positions[0]), num_tokens + 1, dtype=torch.bool, device=positions[0].device)
    for mask, found in zip(held, positions, strict=True):
        mask.scatter_(1, found.where(found >= 0, num_tokens), True)
    return held[..., :num_tokens]


def protected_mask(policy: Policy, encoded: Encoded) -> Tensor:
    """[n] bool the context's tokens that no choice of the policy's touches: sinks, recent window, pins."""
    at, n = torch.arange(len(encoded.context)), len(encoded.context)
    pinned = [(at >= start) & (at < stop) for start, stop in encoded.pins]
    return torch.stack([at < policy.num_sinks, at >= n - policy.num_recent, *pinned]).any(0)


def beside_oracle(kept: Tensor, utility: Tensor, protected: Tensor) -> tuple[Array, Array]:
    """Regret and overlap [layers, H] float64 of a choice, beside the same number of tokens per head by the order of `utility`.

    kept       [layers, H, n] bool, every protected token among them
    utility    [layers, H, n] float32, 0 or more
    protected  [n] bool
    """
    free = ~protected.expand_as(kept)
    count = (kept & free).sum(-1)  # [layers, H] tokens that were chosen
    positions = torch.arange(kept.shape[-1], dtype=torch.int32, device=kept.device).expand(kept.shape)
    wanted = ops.select(utility.masked_fill(~free, float("-inf")), positions, count)
    lost = (utility * wanted).double().sum(-1) - (utility * (kept & free)).double().sum(-1)
    regret = lost / utility.double().sum(-1).clamp(min=torch.finfo(torch.float64).tiny)
    overlap = (wanted & kept).sum(-1).double() / count  # 0 / 0 is NaN
    return regret.cpu().numpy(), overlap.cpu().numpy()


# ---- the text as a picture

LETTER_POINTS = 3.84  # a letter of DejaVu Sans Mono, which matplotlib brings along, is 8 pixels wide at this size and 150 dpi
FONT_POINTS = 6.0
LINE_POINTS = 9.0
LEGEND = 0.7  # inches above the text
Line = list[tuple[str, float]]  # letters, each with the share that its token was kept with


def text_lines(text: Survival) -> list[Line]:
    """The text in lines of COLUMNS letters; what breaks a line stands as a space."""
    letters = [
        (letter if letter.isprintable() else " ", float(share))
        for token, share in zip(text.tokens, text.kept, strict=True)
        for letter in token
    ]
    return [letters[start : start + COLUMNS] for start in range(0, len(letters), COLUMNS)] or [[]]


def draw_text(figure, lines: list[Line], legend: float) -> None:  # type: ignore[no-untyped-def]
    """Letters on the share that their tokens were kept with, as wide as the figure, whose upper `legend` (a share of it) explains them."""
    shares = np.full((len(lines), COLUMNS), np.nan)
    for row, line in zip(shares, lines, strict=True):
        row[: len(line)] = [share for _, share in line]
    axis = figure.add_axes((0, 0, 1, 1 - legend))
    image = axis.imshow(shares, aspect="auto", cmap="YlGn", alpha=0.6, vmin=0, vmax=1, extent=(0, COLUMNS, len(lines), 0))
    for y, line in enumerate(lines):
        text = "".join(letter for letter, _ in line).replace("$", r"\$")  # matplotlib sets what stands between two as a formula
        axis.text(0, y + 0.5, text, family="monospace", fontsize=FONT_POINTS, va="center")
    axis.set_axis_off()
    bar = figure.add_axes((0.3, 1 - 0.9 * legend, 0.4, 0.15 * legend))
    figure.colorbar(image, cax=bar, label="share of heads that kept it", orientation="horizontal", ticklocation="top")
