"""Gate: a scorer with weights, and what training asks of it."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor, nn

from learnkv.models import BaseModel
from learnkv.observation import Observation, Scorer
from learnkv.rope import rotary_frequencies
from learnkv.traces.format import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel


EVERY = slice(None)


@dataclass(frozen=True)
class Batch:
    """The traces of one training step, and what its random draws hang on: never on rank or order of calls.

    shuffled  for a control: what there is to learn is dealt out anew.  Targets of the traces' tokens already were; a loss that learns from
              something else deals it out by `order`
    """

    traces: Sequence[Trace]
    seed: int
    step: int
    shuffled: bool = False

    def generator(self, trace: Trace, purpose: str, device: torch.device | None = None) -> torch.Generator:
        """A generator keyed by (seed, step, trace id) and what it is for."""
        key = hashlib.blake2b(f"{self.seed}/{self.step}/{trace.id}/{purpose}".encode(), digest_size=7).digest()
        return torch.Generator(device or "cpu").manual_seed(int.from_bytes(key))

    def order(self, trace: Trace, count: int) -> Tensor:
        """[count] int64 whose lesson each of `count` tokens or rows of a trace learns: its own, or where `shuffled` another's.

        It is the same in every step.  Nobody keeps its own, but for one alone.
        """
        if not self.shuffled:
            return torch.arange(count)
        drawn = torch.randperm(count, generator=replace(self, step=0).generator(trace, "shuffled"))
        return torch.empty_like(drawn).scatter(0, drawn, drawn.roll(1))  # each learns its neighbour's in the order drawn


@dataclass(frozen=True)
class Held:
    """A base model beside a gate: no part of its weights, and copies of the gate share it."""

    model: PreTrainedModel

    def __deepcopy__(self, memo: dict) -> Held:
        return self


class Gate(Scorer, nn.Module):
    """A scorer whose weights are stacked [layers, H, ...], so that the heads of all layers train at once.

    There is one pure `forward(features, layers)` with a leading layer axis; `score`, `score_trace` and `loss` only call it,
    so a gate cannot score a trace in one way and a live cache in another.

    METHOD  its name in GATES, in gate.json and in METHODS
    Config  the dataclass of its knobs
    READS   what its training reads of a trace beside keys, values, window, mass and utility: names in `learnkv.traces.measure.ALSO`
    LEARNS_FROM_IDS  whether its loss reads nothing of a trace but token ids: to train on, traces of mode=ids are then not recomputed
    """

    METHOD: ClassVar[str]
    Config: ClassVar[type]
    READS: ClassVar[frozenset[str]] = frozenset()
    LEARNS_FROM_IDS: ClassVar[bool] = False

    def __init__(self, config: object, base: BaseModel) -> None:
        super().__init__()
        self.config = config
        self.base = base
        for name, value in self.knobs().items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}={value} is no finite number, which a {self.METHOD} gate's knobs are; give one")

    def knobs(self) -> dict[str, object]:
        """The config as plain values, for gate.json."""
        return {field.name: getattr(self.config, field.name) for field in fields(self.Config)}

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return next(self.parameters()).device

    def bind(self, model: nn.Module) -> Self:
        """The gate on the model's device; a copy where it has to move."""
        device = next(model.parameters()).device
        return self if self.device == device else copy.deepcopy(self).to(device)

    def with_rope_of(self, model: nn.Module) -> Self:
        """A gate that takes RoPE off by its buffer `frequencies`, with the model's own: rope scaling may have changed since training."""
        frequencies = rotary_frequencies(model)[0]
        if torch.equal(frequencies.cpu(), self.get_buffer("frequencies").cpu()):
            return self
        turned = copy.deepcopy(self)
        turned.frequencies = frequencies
        return turned

    def score_trace(self, trace: Trace) -> Tensor:
        """[layers, H, n] float32 scores of a recorded context, as `score` would give them to a live cache."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """What to minimise and what to watch.

        loss    [] differentiable
        losses  [B] one per trace, detached
        reward  [layers] mean normalised reward, detached; only where the gate ranks

        By default the traces run one after the other, so that none is padded, and their mean is minimised.
        """
        losses = torch.stack([self.trace_loss(batch, trace) for trace in batch.traces])
        return {"loss": losses.mean(), "losses": losses.detach()}

    def trace_loss(self, batch: Batch, trace: Trace) -> Tensor:
        """[] loss of one trace."""
        raise NotImplementedError

    def recorded(self, trace: Trace, name: str, layers: slice = EVERY) -> Tensor:
        """[layers, ...] a field of the trace, or its target of that name, on the gate's device; one that lacks it is refused by its id."""
        found: Tensor | None = trace.targets[name] if name in trace.targets else getattr(trace, name, None)
        if found is None:
            key = f"record.also=[{name}]" if name in self.READS else "record.mode=targets"
            raise ValueError(f"trace {trace.id} holds no {name}, which {self.METHOD} reads; record with {key}")
        return found[layers].to(self.device)

    def of_layer(self, layer: int, features: Tensor) -> Tensor:
        """[B, H, T] `forward` of one layer, where it takes rows of features: [B, T, F] of a step's tokens."""
        rows = self(features.flatten(0, 1)[None], slice(layer, layer + 1))[0]  # [H, B * T]
        return rows.unflatten(1, features.shape[:2]).transpose(0, 1)

    def model_tokens(self, n: int) -> int:
        """Tokens that the loss runs through the base model, there and back, on a trace of n with its questions; none by default."""
        return 0

    def meet(self, model: PreTrainedModel) -> None:
        """Told the base model before training; a gate whose loss runs it keeps it in a `Held`, the others do not look."""

    def prepare(self, traces: Sequence[Trace]) -> None:
        """Sets constants from the first traces, before the first step; none by default."""

    def calibrate(self, traces: Sequence[Trace]) -> None:
        """Sets constants from training traces, after the last step; none by default."""

    def check_geometry(self, obs: Observation) -> None:
        """Raises a ValueError with both sides where the cache is not the one this gate was trained for."""
        want = (self.base.num_layers, self.base.num_kv_heads, self.base.head_dim)
        have = (obs.num_layers, obs.slots.lengths.shape[1], obs.slots.key_pages.shape[-1])
        if have != want:
            raise ValueError(
                f"this {self.METHOD} gate was trained for {describe_geometry(*want)} ({self.base.name}), "
                f"the cache has {describe_geometry(*have)}; load a gate for this model"
            )


def describe_geometry(num_layers: int, num_kv_heads: int, head_dim: int) -> str:
    return f"{num_layers} layers x {num_kv_heads} KV heads of {head_dim} dimensions"


def refuse_below(least: int, **knobs: int) -> None:
    """Raises a ValueError for the first knob that is below `least`."""
    for name, value in knobs.items():
        if value < least:
            raise ValueError(f"{name}={value} is below {least}; give {least} or more")


def positions_of(scores: Tensor) -> Tensor:
    """[..., n] int32 of a trace's scores [..., n]: of its tokens none was evicted."""
    return torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device).expand(scores.shape)


def refuse_infinite(traces: Sequence[Trace], name: str) -> None:
    """A single value would spoil the statistics."""
    for trace in traces:
        if not getattr(trace, name).isfinite().all():
            raise ValueError(f"trace {trace.id}: its {name} are not all finite; record it again or leave it out")


def uniform(fan_in: int, *shape: int) -> nn.Parameter:
    """Weights within 1 / sqrt(fan_in) of 0, as nn.Linear draws them."""
    return nn.Parameter(torch.empty(shape).uniform_(-(fan_in**-0.5), fan_in**-0.5))


def stacked_linear(num_layers: int, size: int, width: int) -> nn.Parameter:
    """[layers, size, width] weights of one linear map per layer."""
    return uniform(size, num_layers, size, width)
