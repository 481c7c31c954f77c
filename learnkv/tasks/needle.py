"""A needle in essays at set depths: with several lengths of prompts it is the grid length x depth of needle-in-a-haystack heat maps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

from learnkv.prompts import Prompt, Question, pools
from learnkv.tasks import ruler_data
from learnkv.tasks.metrics import string_match_all
from learnkv.tasks.task import SPLIT, Size, Task, largest

DEPTHS = tuple(range(0, 101, 10))  # percent of the haystack before the needle


def grid(size: Size, seed: int) -> Iterator[Prompt]:
    """Prompts of the depths in turn; a prompt's kind is needle_000 to needle_100."""
    for index in count():
        rng = Random(f"{seed} needle {index} {size.num_tokens}")
        prompt = hidden_at(DEPTHS[index % len(DEPTHS)], rng, size)
        if prompt is None:
            return
        yield prompt


def hidden_at(depth: int, rng: Random, size: Size) -> Prompt | None:
    """The prompt of one depth that fills the size; None where no sentence of haystack fits."""
    city, number = pools.city(rng, SPLIT), pools.number(1_000_000, 9_999_999)(rng, SPLIT)
    sentences = stretch(rng, size.num_tokens)
    most = largest(lambda n: placed(depth, sentences[:n], city, number), size, len(sentences))
    return placed(depth, sentences[:most], city, number) if most else None


def stretch(rng: Random, num_words: int) -> list[str]:
    """Sentences of essays that follow each other, from a random place on, of `num_words` words."""
    words = ruler_data.essays()
    begin = rng.randrange(max(1, len(words) - num_words))
    _, *whole = ruler_data.sentences(" ".join(words[begin : begin + num_words]))  # the first began before
    return whole


def placed(depth: int, haystack: list[str], city: str, number: str) -> Prompt:
    """The needle after `depth` percent of the sentences."""
    needle = f"The lighthouse keeper of {city} wrote down the number {number}."
    place = round(len(haystack) * depth / 100)
    context = INTRO + " ".join([*haystack[:place], needle, *haystack[place:]]) + "\n\n"
    begin = context.index(needle) + needle.index(number)
    question = Question(
        f"Which number did the lighthouse keeper of {city} write down?",
        f"The lighthouse keeper of {city} wrote down the number",
        f" {number}",
        (begin, begin + len(number)),
    )
    return Prompt(f"needle_{depth:03d}", SPLIT, context, (question,))


INTRO = "Here is a long text. A question about it follows.\n\n"
NEEDLE = Task("needle", grid, string_match_all, 32)
