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
from learnkv.geometry import max_positions
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
    """A gate whose loss runs its base model twice over each trace's sequence: once as it is, once with the gate in its attention.

    A twin trained on shuffled lessons (`Batch.shuffled`) has each row learn what the plain model says in another one.
    """

    LEARNS_FROM_IDS = True
    held: Held | None = None

    def meet(self, model: PreTrainedModel) -> None:
        self.held = Held(model)

    def model_tokens(self, n: int) -> int:
        return 3 * n  # the plain run, the gated one and the way back

    @property
    def model(self) -> PreTrainedModel:
        """The base model, where the gate is."""
        if self.held is None:
            raise ValueError(f"the {self.METHOD} gate trains by running its base model; call gate.meet(model) before")
        return self.held.model.to(self.device)  # type: ignore[arg-type]

    def sequence_of(self, batch: Batch, trace: Trace, learn_from: str) -> tuple[Sequence, Tensor, Tensor]:
        """The trace's sequence, its rows [R] that learn and those that each learns from; a trace without any is refused by its id."""
        sequence = Sequence.of(trace, self.device, max_positions(self.model))
        rows = sequence.rows(learn_from)
        if not len(rows):
            raise ValueError(f"trace {trace.id} has no rows to learn from (gate.learn_from={learn_from}); record questions with answers")
        return sequence, rows, rows[batch.order(trace, len(rows)).to(self.device)]

    def both_logits(self, ids: Tensor, rows: Tensor, teachers: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """(plain, gated) logits [R, V] of a sequence [T]: plain ones of the rows `teachers`, gated ones of `rows`."""
        run = partial(self.model, input_ids=ids[None], use_cache=False)
        with torch.no_grad():
            plain = run(logits_to_keep=teachers).logits[0]
        with soft_attention(self.model, attend):
            return plain, run(logits_to_keep=rows).logits[0]


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
