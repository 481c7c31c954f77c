"""Gate: a scorer with weights, and what training asks of it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor, nn

from learnkv.models import BaseModel
from learnkv.observation import Observation, Scorer
from learnkv.rope import rotary_frequencies
from learnkv.traces.format import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Batch:
    """The traces of one training step, and what its random draws hang on: never on rank or order of calls.

    shuffled  whether what the traces teach was dealt out anew: a gate that learns from its base model's outputs does so itself
    """

    traces: Sequence[Trace]
    seed: int
    step: int
    shuffled: bool = False

    def generator(self, trace: Trace, purpose: str, device: torch.device | None = None) -> torch.Generator:
        """A generator keyed by (seed, step, trace id) and what it is for."""
        key = hashlib.blake2b(f"{self.seed}/{self.step}/{trace.id}/{purpose}".encode(), digest_size=7).digest()
        return torch.Generator(device or "cpu").manual_seed(int.from_bytes(key))


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
    """

    METHOD: ClassVar[str]
    Config: ClassVar[type]
    READS: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: object, base: BaseModel) -> None:
        super().__init__()
        self.config = config
        self.base = base

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
        """
        raise NotImplementedError

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
