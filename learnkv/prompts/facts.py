"""Facts: sentences with a key and a value that are hidden in text, asked for afterwards, and what kinds of prompts are built of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from learnkv.prompts.haystack import Split, Style, passage
from learnkv.prompts.pools import Pool
from learnkv.prompts.prompt import Prompt, Question

Build = Callable[[Random, Split, int], Prompt]

INTROS = (
    "Read the following text.\n",
    "Here is a text. Questions about it come later.\n",
    "Study this document with care.\n",
    "The text below holds a few facts. Keep them in mind.\n",
    "Below is an excerpt from a longer document.\n",
)


@dataclass(frozen=True)
class Fact:
    """A sentence with {key} and {value}, and how it is asked for; the answer follows `prefix`."""

    statement: str
    question: str
    prefix: str
    key: Pool
    value: Pool


@dataclass(frozen=True)
class Placed:
    """A fact in its final words: the sentence, its question, and where in the sentence the answer lies."""

    sentence: str
    question: str
    prefix: str
    answer: str

    def ask(self, context: str) -> Question:
        """The question about `context`, with the span of the answer in it."""
        begin = context.index(self.sentence) + self.sentence.rindex(self.answer)
        return Question(self.question, self.prefix, " " + self.answer, (begin, begin + len(self.answer)))


def place(fact: Fact, rng: Random, split: Split) -> Placed:
    """A fact with a key and a value of the split."""
    key, value = fact.key(rng, split), fact.value(rng, split)
    return Placed(fact.statement.format(key=key, value=value), fact.question.format(key=key), fact.prefix.format(key=key), value)


def hide(rng: Random, split: Split, num_chars: int, sentences: list[str], style: Style = "prose") -> str:
    """A passage of about `num_chars` characters with `sentences` at random places between its own, after an introduction."""
    intro = rng.choice(INTROS)
    room = num_chars - len(intro) - sum(map(len, sentences)) - len(sentences)
    body = passage(rng, style, split, max(0, room))
    for sentence in sentences:
        body.insert(rng.randint(0, len(body)), sentence)
    return intro + (" " if style != "code" else "\n").join(body) + "\n"


def facts(kind: str, variants: tuple[Fact, ...], counts: tuple[int, ...]) -> Build:
    """A kind that hides some facts of one variant (all different keys and values) and asks for each."""

    def build(rng: Random, split: Split, num_chars: int) -> Prompt:
        placed = distinct(rng, split, [rng.choice(variants)] * rng.choice(counts))
        return ask_for_all(kind, rng, split, num_chars, placed, ("prose", "docstrings"))

    return build


def mixture(kind: str, variants: tuple[Fact, ...], counts: tuple[int, ...]) -> Build:
    """A kind that hides facts of several variants in one text and asks for each: the many-sided training context."""

    def build(rng: Random, split: Split, num_chars: int) -> Prompt:
        placed = distinct(rng, split, rng.sample(variants, rng.choice(counts)))
        return ask_for_all(kind, rng, split, num_chars, placed, ("prose", "docstrings", "code"))

    return build


def ask_for_all(kind: str, rng: Random, split: Split, num_chars: int, placed: list[Placed], styles: tuple[Style, ...]) -> Prompt:
    """The facts hidden in a passage of one of the styles, each of them asked for."""
    context = hide(rng, split, num_chars, [p.sentence for p in placed], rng.choice(styles))
    return Prompt(kind, split, context, tuple(p.ask(context) for p in shuffled(rng, placed)))


def distinct(rng: Random, split: Split, wanted: list[Fact]) -> list[Placed]:
    """One placed fact for each wanted, no two with the same answer or the same question."""
    placed: list[Placed] = []
    for fact in wanted:
        tries = (place(fact, rng, split) for _ in range(1000))
        placed.append(next(new for new in tries if all(new.answer != p.answer and new.question != p.question for p in placed)))
    return placed


def shuffled(rng: Random, items: list[Placed]) -> list[Placed]:
    """The items in random order."""
    return rng.sample(items, len(items))


def several(pool: Pool, count: int, rng: Random, split: Split) -> list[str]:
    """`count` different entries of a pool, in the order they were drawn."""
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += [entry for entry in [pool(rng, split)] if entry not in drawn]
    return drawn


def listed(entries: list[str]) -> str:
    """Three entries as a sentence lists them."""
    return f"{entries[0]}, {entries[1]} and {entries[2]}"


def hide_in_order(rng: Random, split: Split, num_chars: int, sentences: list[str]) -> str:
    """As `hide`, the sentences kept in their order."""
    intro = rng.choice(INTROS)
    body = passage(rng, rng.choice(("prose", "docstrings")), split, max(0, num_chars - len(intro) - sum(map(len, sentences))))
    places = sorted(rng.randint(0, len(body)) for _ in sentences)
    for shift, (where, sentence) in enumerate(zip(places, sentences, strict=True)):
        body.insert(where + shift, sentence)
    return intro + " ".join(body) + "\n"
