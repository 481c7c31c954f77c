"""Where a chat's parts lie among its tokens, whatever the model's template: what to pin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from learnkv.prompts.make import refuse_half_characters
from learnkv.prompts.prompt import Tokenizer, token_span

Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]
MARK = "\ue000"  # a letter for private use, in nobody's text


@dataclass(frozen=True)
class ChatSpans:
    """Token spans (start, stop), each None where the chat has no such part: `cache.pin(row, *spans.system)`.

    ids         all tokens of the chat
    system      everything before the first user's text: what the template begins with, system prompt and tool schema included; where the
                template puts the system prompt elsewhere, its text alone
    tools       what the template makes of the tools
    first_user  the first user's text
    messages    the text of each message, in their order
    """

    ids: list[int] = field(repr=False)
    system: Span | None
    tools: Span | None
    first_user: Span | None
    messages: tuple[Span | None, ...]


def chat_spans(
    tokenizer: Tokenizer, messages: Messages, tools: Sequence[Any] | None = None, add_generation_prompt: bool = True
) -> ChatSpans:
    """The chat as `apply_chat_template` renders and tokenises it, and where its parts lie.

    A part is found as what changes in the rendered text when the part is another one.  Raises ValueError where there is no template,
    no message, or a message whose content is no text.
    """
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template, so a chat has no spans; pin by positions of your own")
    if not messages:
        raise ValueError("a chat without messages has no spans; give one message at least")
    for i, message in enumerate(messages):
        refuse_odd_message(i, message)

    def render(messages: Messages, tools: Sequence[Any] | None) -> str:
        given: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt, "tokenize": False}
        try:
            return str(tokenizer.apply_chat_template(list(messages), **given))
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this chat ({error}); pin by positions of your own") from error

    text = render(messages, tools)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)

    def tokens(part: Span | None) -> Span | None:
        return None if part is None else token_span(encoded["offset_mapping"], part, 0)

    changes = [changed(text, render(marked(messages, i), tools)) for i in range(len(messages))]
    texts = [once(text, part, message["content"]) for part, message in zip(changes, messages, strict=True)]
    first = next((texts[i] for i, message in enumerate(messages) if message["role"] == "user"), None)
    own = texts[0] if messages[0]["role"] == "system" else None
    return ChatSpans(
        ids=list(encoded["input_ids"]),
        system=tokens(system_of(own, first)),
        tools=tokens(changed(text, render(messages, None)) if tools else None),
        first_user=tokens(first),
        messages=tuple(tokens(part) for part in texts),
    )


def refuse_odd_message(index: int, message: Mapping[str, Any]) -> None:
    """Raises a ValueError for a message that has no role or no text."""
    content = message.get("content")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"message {index} has no role; give one, such as user")
    if not isinstance(content, str):
        raise ValueError(f"message {index} ({message['role']}) has content of type {type(content).__name__}; give text")
    refuse_half_characters(content, f"message {index}")


def system_of(own: Span | None, first: Span | None) -> Span | None:
    """The characters before the first user's text, if the system prompt `own` lies there or there is none; else those of `own`."""
    if first is None:
        return None if own is None else (0, own[1])
    if own is not None and own[1] > first[0]:
        return own
    return (0, first[0]) if first[0] else None


def marked(messages: Messages, index: int) -> list[Mapping[str, Any]]:
    """The messages with letters of its own, as many, in the place of one text."""
    return [{**message, "content": MARK * max(1, len(message["content"]))} if i == index else message for i, message in enumerate(messages)]


def once(text: str, part: Span | None, content: str) -> Span | None:
    """The first place of a message that the template says several times."""
    said = content.strip()
    if part is None or not said or not text.startswith(said, part[0]):
        return part
    return part[0], part[0] + len(said)


def changed(text: str, other: str) -> Span | None:
    """The characters of `text` between what it begins and what it ends with as `other` does; None where there are none."""
    start = common(text, other)
    stop = len(text) - common(text[start:][::-1], other[start:][::-1])
    return (start, stop) if start < stop else None


def common(one: str, two: str) -> int:
    """How many characters two texts begin with in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
