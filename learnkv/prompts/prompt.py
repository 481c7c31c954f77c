"""Prompt: a context, the questions asked about it, and the tokens that both become for a model at hand."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Question:
    """What is asked after the context.

    text        the question, in the user's turn
    prefix      how the assistant's answer begins; generation goes on from here
    answer      what follows the prefix; matched exactly
    span        characters [start, stop) of the context that hold the answer, or None
    references  texts that a task's metric judges a generated answer by; none where the answer says it all
    """

    text: str
    prefix: str
    answer: str
    span: tuple[int, int] | None = None
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One context with at least one question.

    kind   the generator's name
    split  the side its text, keys and values were drawn from
    chat   whether it goes through the model's chat template
    pins   characters [start, stop) of the context that no method may evict
    task   the task that judges a generated answer, a name in learnkv.tasks.TASKS; "" where the answer's tokens are matched
    """

    kind: str
    split: str
    context: str
    questions: tuple[Question, ...]
    chat: bool = True
    pins: tuple[tuple[int, int], ...] = ()
    task: str = ""

    @property
    def id(self) -> str:
        """16 hex digits of the content: equal prompts have equal ids on every machine."""
        content = asdict(self)
        del content["task"]  # which the kind begins with
        if not self.pins:
            del content["pins"]  # prompts without pins had their ids before there were any
        for question in content["questions"]:
            if not question["references"]:  # traces and rows know prompts by ids from before there were any
                del question["references"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Encoded:
    """Token ids of one question on its context: the model sees context + question + answer.

    context, question, answer  [n] int64
    span                       token range of the context that holds the answer, or None
    pins                       token ranges of the context that no method may evict
    """

    context: Tensor
    question: Tensor
    answer: Tensor
    span: tuple[int, int] | None
    pins: tuple[tuple[int, int], ...] = ()


class Tokenizer(Protocol):
    """What we use of a transformers tokenizer, whose own signatures are wider than can be said here."""

    chat_template: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def encode(self, *args: Any, **kwargs: Any) -> Any: ...

    def decode(self, *args: Any, **kwargs: Any) -> Any: ...

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...


def encode(tokenizer: Tokenizer, prompt: Prompt, question: Question) -> Encoded:
    """The prompt through the model's chat template, cut where the context ends.

    The context part holds the template's head and the context, so that it can be compressed before the question is known;
    the question part holds the question, the template's tail and the answer's prefix.  Without a chat template the three
    texts simply follow each other.
    """
    import torch  # seconds, which `learnkv ls` need not wait for

    if prompt.chat and tokenizer.chat_template:
        turn = [{"role": "user", "content": prompt.context + question.text}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) + question.prefix
    else:
        text = prompt.context + " ".join(part for part in (question.text, question.prefix) if part)
    begin = text.find(prompt.context)
    if begin < 0:
        raise ValueError(f"the chat template changes the context {prompt.context[:40]!r}..., so it can't be cut there; use chat=False")
    cut = begin + len(prompt.context)
    context = tokenizer(text[:cut], add_special_tokens=False, return_offsets_mapping=True)
    ids = [torch.tensor(context["input_ids"], dtype=torch.long)]
    for part in (text[cut:], question.answer):
        ids.append(torch.tensor(tokenizer(part, add_special_tokens=False, return_offsets_mapping=False)["input_ids"], dtype=torch.long))
    span, *pins = (token_span(context["offset_mapping"], part, begin) for part in (question.span, *prompt.pins))
    return Encoded(ids[0], ids[1], ids[2], span, tuple(pin for pin in pins if pin))


def asked_inside(e: Encoded) -> Encoded:
    """The question as the end of the context; its last token stays outside, so that the first token of the answer follows the eviction."""
    import torch

    whole = torch.cat([e.context, e.question])
    return replace(e, context=whole[:-1], question=whole[-1:])


def token_span(offsets: list[tuple[int, int]], span: tuple[int, int] | None, shift: int) -> tuple[int, int] | None:
    """The token range that covers characters `span`, which count from `shift`."""
    if span is None:
        return None
    start, stop = span[0] + shift, span[1] + shift
    inside = [i for i, (a, b) in enumerate(offsets) if a < stop and b > start]
    return (inside[0], inside[-1] + 1) if inside else None
