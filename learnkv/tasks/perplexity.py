"""Perplexity after eviction: how likely what follows in an essay is, on what is left of the text before it.  A task of our own.

The essays of asset `ruler` are for evaluation only, no gate was trained on them.  The text goes on without a question or a template, and
breaks before a blank, which is where most tokenizers begin a token; one that doesn't (SentencePiece) reads the two parts a little otherwise
than the whole.
"""

from __future__ import annotations

from random import Random

from learnkv.prompts import Prompt, Question
from learnkv.tasks import ruler_data
from learnkv.tasks.drawn import endless
from learnkv.tasks.task import SPLIT, Size, Task, largest


def continued(rng: Random, size: Size) -> Prompt | None:
    """The text before a random place, from as far back as fits, and what follows; None where the essays begin too close before."""
    words = ruler_data.essays()
    place = rng.randrange(1, len(words) - size.max_new_tokens)
    following = size.beginning(" " + " ".join(words[place : place + size.max_new_tokens]))

    def build(n: int) -> Prompt:
        return Prompt("perplexity", SPLIT, " ".join(words[place - n : place]), (Question("", "", following),), chat=False)

    most = min(place, size.num_tokens)
    n = largest(build, size, most)
    return build(n) if 0 < n < most else None


PERPLEXITY = Task("perplexity", endless("perplexity", continued), None, 128, chat=False)
