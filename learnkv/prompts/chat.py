"""Where a chat's parts lie among its tokens, whatever the model's template: what to pin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from learnkv.prompts.prompt import Tokenizer, token_span

Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]
MARK = "\ue000"  # a letter for private use, in nobody's text


@dataclass(frozen=True)
class ChatSpans:
    """Token spans (start, stop), each None where the chat has no such part: `cache.pin(row, *spans.system)`.

    ids         all tokens of the chat
    system      everything before the first user's text: what the template begins with, system prompt and tool schema included
    tools       what the template makes of the tools
    first_user  the first user's text
    messages    the text of each message, in their order
    """

    ids: list[int]
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
    for i, message in enumerate(messages):
        if not isinstance(message.get("content"), str):
            raise ValueError(f"message {i} ({message.get('role')}) has content of type {type(message.get('content')).__name__}; give text")
    if not messages:
        raise ValueError("a chat without messages has no spans; give one message at least")

    def render(messages: Messages, tools: Sequence[Any] | None) -> str:
        return tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False)  # type: ignore[no-any-return]

    text = render(messages, tools)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)

    def tokens(part: Span | None) -> Span | None:
        return None if part is None else token_span(encoded["offset_mapping"], part, 0)

    texts = [changed(text, render(marked(messages, i), tools)) for i in range(len(messages))]
    first = next((texts[i] for i, message in enumerate(messages) if message["role"] == "user"), None)
    return ChatSpans(
        ids=list(encoded["input_ids"]),
        system=tokens(None if first is None or first[0] == 0 else (0, first[0])),
        tools=tokens(changed(text, render(messages, None)) if tools else None),
        first_user=tokens(first),
        messages=tuple(tokens(part) for part in texts),
    )


def marked(messages: Messages, index: int) -> list[Mapping[str, Any]]:
    """The messages with a letter of its own in the place of one text."""
    return [{**message, "content": MARK} if i == index else message for i, message in enumerate(messages)]


def changed(text: str, other: str) -> Span | None:
    """The characters of `text` between what it begins and what it ends with as `other` does; None where there are none."""
    start = common(text, other)
    stop = len(text) - common(text[start:][::-1], other[start:][::-1])
    return (start, stop) if start < stop else None


def common(one: str, two: str) -> int:
    """How many characters two texts begin with in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
