"""LookaheadKV: learned rows and a LoRA for them alone foresee what the response will attend to (arXiv:2603.10899)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkv.capture import decoder_of
from learnkv.gates.adapter import Adapter, Twin, refuse_lacking
from learnkv.gates.probe_tokens import ProbeTokens, ProbeTokensConfig, Rows
from learnkv.models import BaseModel, PreTrainedModel
from learnkv.observation import Probe

FLOOR = 1e-9  # of a share, inside the logarithm


@dataclass(frozen=True)
class LookaheadKVConfig(ProbeTokensConfig):
    """The defaults are the paper's (section 2; m, r and alpha as its ablations settle them)."""

    rank: int = 8  # of the LoRA
    alpha: float = 32.0  # its scale is alpha / rank

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_tokens < 2:
            raise ValueError(
                f"num_tokens={self.num_tokens}: a single row's attention to itself leaves no trace in the loss; give 2 or more"
            )
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} counts dimensions; give 1 or more")
        if not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha} must be above 0")


class LookaheadKV(ProbeTokens):
    """Rows and LoRA trained so that the rows' attention to the prompt is that of the model's own response (arXiv:2603.10899).

    loss = mean over layers and query heads of KL(response || rows), both normalised over the prompt's tokens; the served score is the
    rows' attention as it was trained, normalised.

    Differs: the adapter lives in a copy of the decoder that shares its weights, so that nothing of the model changes; the last
    evictable layer has it on queries and keys only, which the paper's parameter counts say too.
    """

    METHOD = "lookaheadkv"
    Config = LookaheadKVConfig
    config: LookaheadKVConfig

    def __init__(self, config: LookaheadKVConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        self.adapter = Adapter(base, config.rank, config.alpha)
        self.own = Own()
        self.bound = Bound()

    def meet(self, model: PreTrainedModel) -> None:
        super().meet(model)
        refuse_lacking(decoder_of(model), [path for path, _, _ in self.adapter.targets()])

    def forward(self, rows: Rows) -> Tensor:
        """[l, B, Q, L] float32 as `ProbeTokens.forward`, normalised over the prompt."""
        return normalised(super().forward(rows))

    def distance(self, target: Tensor, shares: Tensor) -> Tensor:
        return divergence(normalised(target), shares)

    def bind(self, model: nn.Module) -> Self:
        decoder = decoder_of(cast(PreTrainedModel, model))
        found = self.bound.get(decoder)
        if found is None or found.own.twin is None or not found.own.twin.follows(decoder):
            found = self.bound[decoder] = self.bound_anew(decoder)
        return cast(Self, found)

    @torch.no_grad()
    def bound_anew(self, decoder: PreTrainedModel) -> LookaheadKV:
        bound = super().bind(decoder)
        bound.own, bound.held = Own(bound.adapter.twin(decoder)), None  # the decoder itself stays free to be collected
        bound.runner()
        return bound

    def runner(self) -> PreTrainedModel:
        if self.own.twin is None:
            self.own.twin = self.adapter.twin(super().runner())
        self.adapter.give(self.own.twin)
        return self.own.twin.decoder

    def probe(self, token_ids: Tensor) -> list[Probe]:
        assert self.own.twin is not None, "bound before it serves"
        return [replace(probe, decoder=self.own.twin.decoder) for probe in super().probe(token_ids)]


@dataclass
class Own:
    """A gate's twin; a copy of the gate makes one of its own, with its own weights."""

    twin: Twin | None = None

    def __deepcopy__(self, memo: dict) -> Own:
        return Own()


class Bound(WeakKeyDictionary[PreTrainedModel, LookaheadKV]):
    """A gate as it serves each decoder; copies of the gate start without."""

    def __deepcopy__(self, memo: dict) -> Bound:
        return Bound()


def normalised(shares: Tensor) -> Tensor:
    """[..., n] divided by their sum."""
    return shares / shares.sum(-1, keepdim=True).clamp(min=FLOOR)


def divergence(target: Tensor, shares: Tensor) -> Tensor:
    """[] KL(target || shares) of distributions [..., n], mean over all but the last dimension."""
    return F.kl_div(shares.clamp(min=FLOOR).log(), target, reduction="none").sum(-1).mean()
