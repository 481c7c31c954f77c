"""Prompts that are drawn at random, one after another, with a randomness of their own each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from random import Random

from learnkv.prompts import Prompt
from learnkv.tasks.task import Make, Size, largest

TRIES = 20  # draws in a row that give no prompt, after which there is none

Build = Callable[[Random, Size], Prompt | None]
"""A prompt that fits the size, or None where this draw gives none."""


def endless(name: str, build: Build) -> Make:
    """Prompts drawn with a randomness of their own each; a draw that gives none is left out, TRIES in a row are the end."""

    def make(size: Size, seed: int) -> Iterator[Prompt]:
        missing = 0
        for index in count():
            prompt = build(Random(f"{seed} {name} {index} {size.num_tokens}"), size)
            missing = 0 if prompt else missing + 1
            if missing == TRIES:
                return
            if prompt:
                yield prompt

    return make


def filled(build: Callable[[int], Prompt], size: Size, least: int, most: int) -> Prompt | None:
    """The largest of the prompts that fits; None where it has fewer than `least` parts."""
    n = largest(build, size, most)
    return build(n) if n >= least else None
