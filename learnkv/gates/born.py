"""Gates that score a token once, when it is born; the score lies beside it for as long as it is held."""

from __future__ import annotations

import torch
from torch import Tensor

from learnkv.gates.base import Batch, Gate
from learnkv.observation import Observation
from learnkv.traces.format import Trace


class BornGate(Gate):
    """A gate whose score of a token hangs on that token alone: on what its layer shows of it in the step that brings it.

    Whatever the prefill's chunks and the policy's interval, a token is scored as it comes and never again: decoding needs no buffer of
    past inputs.  A subclass has `forward(features [l, R, F], layers) -> [l, H, R] float32`, and says what the features are.
    """

    memory_size = 1

    def new_features(self, obs: Observation) -> Tensor:
        """[B, T, F] what `forward` reads of this step's tokens; anything where padding is."""
        raise NotImplementedError

    def trace_features(self, trace: Trace) -> Tensor:
        """[layers, n, F] the same of a recorded context."""
        raise NotImplementedError

    @torch.no_grad()
    def remember(self, obs: Observation) -> Tensor:
        self.check_geometry(obs)
        scores = self.of_layer(obs.layer, self.new_features(obs))
        return obs.write_new(scores.masked_fill(obs.new_slots < 0, 0)[..., None])

    def score(self, obs: Observation) -> Tensor:
        return obs.memory[..., 0]

    @torch.no_grad()
    def score_trace(self, trace: Trace) -> Tensor:
        return self(self.trace_features(trace), slice(None))

    def check_width(self, name: str, features: Tensor, want: int) -> None:
        """Raises a ValueError with both sides where the model shows a token otherwise than the one that this gate was trained for."""
        if features.shape[-1] != want:
            raise ValueError(
                f"this {self.METHOD} gate was trained on {want} {name} a token ({self.base.name}), the model has {features.shape[-1]}; "
                "load a gate for this model"
            )


class HiddenGate(BornGate):
    """A BornGate that reads the input of self-attention, after the input layernorm.

    Its config has `tokens`: how many are drawn from a trace in each step, 0 for all of them.
    """

    needs = frozenset({"hidden"})

    def new_features(self, obs: Observation) -> Tensor:
        assert obs.hidden is not None
        self.check_width("hidden numbers", obs.hidden, self.base.hidden_size)
        return obs.hidden

    def trace_features(self, trace: Trace) -> Tensor:
        return self.recorded(trace, "hidden")

    def drawn(self, batch: Batch, trace: Trace, target: str) -> tuple[Tensor, Tensor]:
        """(scores, target) [layers, H, tokens] of the tokens that this step trains on."""
        tokens: int = self.config.tokens  # type: ignore[attr-defined]
        features, wanted = self.trace_features(trace), self.recorded(trace, target)
        if 0 < tokens < len(trace.ids):
            chosen = torch.randperm(len(trace.ids), generator=batch.generator(trace, "tokens"))[:tokens].to(self.device)
            features, wanted = features[:, chosen], wanted[..., chosen]
        return self(features, slice(None)), wanted
