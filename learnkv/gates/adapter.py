"""Probe tokens with an adapter: PEFT's LoRA in a copy of the decoder that shares its weights, so that the decoder itself stays as it is."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from learnkv.capture import decoder_of
from learnkv.gates.base import refuse_below
from learnkv.gates.probe_tokens import ProbeTokens, ProbeTokensConfig
from learnkv.models import BaseModel, PreTrainedModel
from learnkv.observation import Probe

ADAPTER = "rows"
FIRST = 1e-3  # deviation of the second factor at the start


class LowRank(nn.Module):
    """The two factors of one projection in the first `layers` layers: a [layers, r, in], b [layers, out, r]."""

    def __init__(self, layers: int, inner: int, outer: int, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(layers, rank, inner).uniform_(-1 / math.sqrt(inner), 1 / math.sqrt(inner)))
        self.b = nn.Parameter(torch.randn(layers, outer, rank) * FIRST)


class Adapter(nn.Module):
    """LoRA (arXiv:2106.09685) on all seven projections, of the last evictable layer on queries and keys only: nothing after them is read.

    Differs: the second factor starts at noise of 0.001 instead of 0, so that the first one has a gradient from the first step.
    """

    def __init__(self, base: BaseModel, rank: int, alpha: float) -> None:
        super().__init__()
        if not base.layers or not base.intermediate_size:
            raise ValueError(
                f"of model {base.name} it is not known which layers are evictable ({list(base.layers)}) or how wide its MLPs are "
                f"({base.intermediate_size}), which LoRA needs; describe it again with this version of learnkv"
            )
        self.rank, self.alpha, last = rank, alpha, base.layers[-1]
        kinds = {path: (last + path.endswith(("q_proj", "k_proj")), *size) for path, size in projections(base).items()}
        self.paths = [path for path, (layers, _, _) in kinds.items() if layers]
        self.factors = nn.ModuleDict({name_of(path): LowRank(*kinds[path], rank) for path in self.paths})

    def targets(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(path in a decoder, a, b) of every projection."""
        for path in self.paths:
            factors = cast(LowRank, self.factors[name_of(path)])
            for layer, (a, b) in enumerate(zip(factors.a, factors.b, strict=True)):
                yield f"layers.{layer}.{path}", a, b

    def twin(self, decoder: PreTrainedModel) -> Twin:
        """A copy of the decoder with PEFT's layers in it, which wait for their weights."""
        paths = [path for path, _, _ in self.targets()]
        refuse_lacking(decoder, paths)
        shared = tensors_of(decoder)
        twin = copy.deepcopy(decoder, {id(t): cast(Any, t) for t in shared})
        trained = [p for p in decoder.parameters() if p.requires_grad]
        config = LoraConfig(r=self.rank, lora_alpha=cast(int, self.alpha), target_modules=paths)
        inject_adapter_in_model(config, twin, ADAPTER, low_cpu_mem_usage=True)
        for parameter in trained:
            parameter.requires_grad_(True)  # PEFT freezes what it finds
        linears = [cast(Any, twin.get_submodule(path)) for path in paths]
        for linear in linears:
            del linear.lora_A[ADAPTER].weight, linear.lora_B[ADAPTER].weight
        return Twin(twin, linears, shared)

    def give(self, twin: Twin) -> None:
        """The twin's layers take these weights, as they are now."""
        for linear, (path, a, b) in zip(twin.linears, self.targets(), strict=True):
            have, want = (linear.in_features, linear.out_features), (a.shape[1], b.shape[0])
            if have != want:
                raise ValueError(f"this adapter's {path} goes from {want[0]} to {want[1]}, the model's from {have[0]} to {have[1]}")
            device = linear.get_base_layer().weight.device
            linear.lora_A[ADAPTER].weight, linear.lora_B[ADAPTER].weight = a.to(device), b.to(device)


@dataclass(frozen=True)
class Twin:
    """A decoder whose weights are another's, those of its layers that have an adapter, and all tensors that were shared."""

    decoder: PreTrainedModel
    linears: list[Any]
    shared: list[Tensor]

    def follows(self, decoder: PreTrainedModel) -> bool:
        """Whether the other still has what was shared: a model that moves gets new buffers, one that is edited new parameters."""
        its = tensors_of(decoder)
        return len(self.shared) == len(its) and all(a is b for a, b in zip(self.shared, its, strict=True))


def tensors_of(decoder: PreTrainedModel) -> list[Tensor]:
    return [*decoder.parameters(), *decoder.buffers()]


def projections(base: BaseModel) -> dict[str, tuple[int, int]]:
    """(in, out) of each projection of a layer."""
    M, I = base.hidden_size, base.intermediate_size
    queries, keys = base.num_query_heads * base.head_dim, base.num_kv_heads * base.head_dim
    return {
        "self_attn.q_proj": (M, queries),
        "self_attn.k_proj": (M, keys),
        "self_attn.v_proj": (M, keys),
        "self_attn.o_proj": (queries, M),
        "mlp.gate_proj": (M, I),
        "mlp.up_proj": (M, I),
        "mlp.down_proj": (I, M),
    }


def name_of(path: str) -> str:
    return path.rpartition(".")[2]


def refuse_lacking(decoder: PreTrainedModel, paths: list[str]) -> None:
    """Raises a ValueError where the decoder has no such projections."""
    names = {name for name, _ in decoder.named_modules()}
    lacking = [path for path in paths if path not in names]
    if lacking:
        raise ValueError(
            f"{type(decoder).__name__} has no {lacking[0]}; the adapter goes on q, k, v, o, gate, up and down projections of their own"
        )


# ---- rows that have one


@dataclass(frozen=True)
class AdaptedTokensConfig(ProbeTokensConfig):
    """Probe tokens with an adapter."""

    rank: int = 8  # of the LoRA
    alpha: float = 32.0  # its scale is alpha / rank

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_below(1, rank=self.rank)
        if not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha} must be above 0")


class AdaptedTokens(ProbeTokens):
    """Probe tokens whose rows alone run through a LoRA."""

    config: AdaptedTokensConfig

    def __init__(self, config: AdaptedTokensConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        self.adapter = Adapter(base, config.rank, config.alpha)
        self.own = Own()
        self.bound = Bound()

    def meet(self, model: PreTrainedModel) -> None:
        super().meet(model)
        refuse_lacking(decoder_of(model), [path for path, _, _ in self.adapter.targets()])

    def bind(self, model: nn.Module) -> Self:
        decoder = decoder_of(cast(PreTrainedModel, model))
        found = self.bound.get(decoder)
        if found is None or found.own.twin is None or not found.own.twin.follows(decoder):
            found = self.bound[decoder] = self.bound_anew(decoder)
        return cast(Self, found)

    @torch.no_grad()
    def bound_anew(self, decoder: PreTrainedModel) -> AdaptedTokens:
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


class Bound(WeakKeyDictionary[PreTrainedModel, AdaptedTokens]):
    """A gate as it serves each decoder; copies of the gate start without."""

    def __deepcopy__(self, memo: dict) -> Bound:
        return Bound()
