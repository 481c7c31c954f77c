"""Gates that train end to end: the frozen base model runs a sequence plainly, then softly gated, and the second run is to say the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from learnkv.gates.base import Batch, Gate, Held
from learnkv.gates.soft import Attend, recomputed, soft_attention
from learnkv.names import unknown
from learnkv.traces.format import Continuation, Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEARN_FROM = ("all", "continuation", "answers")  # whose next-token distributions are distilled
DIRECTIONS = ("forward", "reverse")
ROWS = 256  # rows of logits whose divergence is taken at once


@dataclass(frozen=True)
class Sequence:
    """What the base model runs of a trace: its context, then its questions with their answers, one after the other.

    ids       [T] int64
    n         tokens of the context
    answered  [T] bool, True on tokens of an answer
    """

    ids: Tensor
    n: int
    answered: Tensor

    @classmethod
    def of(cls, trace: Trace, device: torch.device, most: float = math.inf) -> Sequence:
        """As many questions as `most` tokens hold; the model's own response stands for the answer where one was recorded."""
        parts = [(trace.ids, False)]
        for asked in trace.questions:
            more = [(asked.question, False), (answer_of(asked), True)]
            if sum(len(ids) for ids, _ in parts + more) <= most:
                parts += more
        answered = torch.cat([torch.full((len(ids),), is_answer) for ids, is_answer in parts])
        return cls(torch.cat([ids for ids, _ in parts]).to(device), len(trace.ids), answered.to(device))

    def rows(self, learn_from: str) -> Tensor:
        """[R] int64 the rows that predict a token of `learn_from`, see LEARN_FROM."""
        place = torch.arange(1, len(self.ids), device=self.ids.device)
        wanted = {"all": place > 0, "continuation": place >= self.n, "answers": self.answered[1:]}[learn_from]
        return wanted.nonzero()[:, 0]


def answer_of(asked: Continuation) -> Tensor:
    return asked.response if len(asked.response) else asked.answer


class DistilledGate(Gate):
    """A gate whose loss runs its base model twice over each trace's sequence: once as it is, once with the gate in its attention."""

    held: Held | None = None

    def meet(self, model: PreTrainedModel) -> None:
        self.held = Held(model)

    @property
    def model(self) -> PreTrainedModel:
        """The base model, where the gate is."""
        if self.held is None:
            raise ValueError(f"the {self.METHOD} gate trains by running its base model; call gate.meet(model) before")
        return self.held.model.to(self.device)  # type: ignore[arg-type]

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """See `Gate.loss`; one trace after the other, so that none is padded."""
        per_trace = torch.stack([self.trace_loss(batch, trace) for trace in batch.traces])
        return {"loss": per_trace.mean(), "losses": per_trace.detach()}

    def trace_loss(self, batch: Batch, trace: Trace) -> Tensor:
        """[] loss of one trace."""
        raise NotImplementedError

    def sequence_of(self, trace: Trace, learn_from: str) -> tuple[Sequence, Tensor]:
        """The trace's sequence and the rows to learn from; a trace without any is refused by its id."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", math.inf)
        sequence = Sequence.of(trace, self.device, positions)
        rows = sequence.rows(learn_from)
        if not len(rows):
            raise ValueError(f"trace {trace.id} has no rows to learn from (gate.learn_from={learn_from}); record questions with answers")
        return sequence, rows

    def dealt(self, batch: Batch, trace: Trace, count: int) -> slice | Tensor:
        """Which of `count` rows teaches each of them: itself, or where targets are shuffled another, the same in every step."""
        if not batch.shuffled:
            return slice(None)
        order = torch.randperm(count, generator=Batch((), batch.seed, step=0).generator(trace, "shuffled"))
        return order.to(self.device)

    def both_logits(self, ids: Tensor, rows: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """(plain, gated) logits [R, V] of `rows` of a sequence [T]."""
        run = partial(self.model, input_ids=ids[None], use_cache=False, logits_to_keep=rows)
        with torch.no_grad():
            plain = run().logits[0]
        with soft_attention(self.model, attend):
            return plain, run().logits[0]

    def inputs_of(self, trace: Trace, name: str) -> Tensor:
        """[layers, n, M] a field of the trace on the gate's device; a trace that lacks it is refused by its id."""
        inputs: Tensor | None = getattr(trace, name)
        if inputs is None:
            raise ValueError(f"trace {trace.id} holds no {name}, which {self.METHOD} scores by; record with record.also=[{name}]")
        return inputs.to(self.device)


def divergence(plain: Tensor, gated: Tensor, direction: str) -> Tensor:
    """Mean over rows of logits [R, V] of KL(plain || gated), or with direction "reverse" of KL(gated || plain)."""
    blocks = zip(plain.split(ROWS), gated.split(ROWS), strict=True)
    return torch.cat([recomputed(row_divergence, p, g, direction) for p, g in blocks]).mean()


def row_divergence(plain: Tensor, gated: Tensor, direction: str) -> Tensor:
    """[R] of logits [R, V]."""
    p, q = plain.float().log_softmax(-1), gated.float().log_softmax(-1)
    if direction == "reverse":
        p, q = q, p
    return F.kl_div(q, p, log_target=True, reduction="none").sum(-1)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise unknown(name, value, choices)
