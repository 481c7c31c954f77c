"""Requests that are drawn: arrivals, lengths, turns.  A seed gives the same requests whatever the server does with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from learnkv.serving.requests import Session, Turn

Arrivals = Literal["poisson", "gamma", "even", "burst"]
Lengths = Literal["fixed", "lognormal", "geometric"]


@dataclass(frozen=True)
class Load:
    """What is drawn.

    requests  in all; sessions of `turns` each
    rate      sessions a second times turns: requests a second, were each answered at once
    arrivals  of sessions: poisson, gamma (of coefficient of variation `cv`), even in time, or a burst at 0
    prompt    tokens that each turn adds, mean
    output    tokens of each answer, mean
    lengths   fixed, lognormal with `sigma` of the logarithm, or geometric
    think_s   seconds between an answer and the next turn, exponential, mean
    """

    requests: int
    rate: float
    prompt: int
    output: int
    arrivals: Arrivals = "poisson"
    cv: float = 1.0
    lengths: Lengths = "fixed"
    sigma: float = 1.0
    turns: int = 1
    think_s: float = 0.0


def draw(load: Load, seed: int) -> list[Session]:
    """The sessions, in the order of their starts; each quantity has a generator of its own, so that one of them changes alone."""
    number = -(-load.requests // load.turns)
    times, prompts, outputs, pauses = (np.random.default_rng((seed, kind)) for kind in range(4))
    starts = arrivals(load, number, times)
    asked = lengths(load, load.prompt, number * load.turns, prompts)
    answered = lengths(load, load.output, number * load.turns, outputs)
    thought = pauses.exponential(load.think_s, number * load.turns) if load.think_s else np.zeros(number * load.turns)
    sessions = []
    for i in range(number):
        own = slice(i * load.turns, min((i + 1) * load.turns, load.requests))
        sessions.append(Session(float(starts[i]), turns_of(asked[own].tolist(), answered[own].tolist(), thought[own].tolist())))
    return sessions


def turns_of(added: list[int], outputs: list[int], thought: list[float]) -> tuple[Turn, ...]:
    """Turns whose prompts begin with all that came before."""
    turns: list[Turn] = []
    before = 0
    for new, output, think in zip(added, outputs, thought, strict=True):
        turns.append(Turn(before + new, output, think if turns else 0.0))
        before += new + output
    return tuple(turns)


def arrivals(load: Load, number: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Seconds [number], ascending."""
    gap = load.turns / load.rate
    if load.arrivals == "burst":
        return np.zeros(number)
    if load.arrivals == "even":
        return gap * np.arange(number, dtype=np.float64)
    shape = 1.0 if load.arrivals == "poisson" else load.cv**-2
    return np.cumsum(rng.gamma(shape, gap / shape, number))


def lengths(load: Load, mean: int, number: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Tokens [number], 1 or more."""
    if load.lengths == "fixed":
        return np.full(number, mean)
    if load.lengths == "geometric":
        return rng.geometric(1 / mean, number)
    drawn = rng.lognormal(np.log(mean) - load.sigma**2 / 2, load.sigma, number)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)
