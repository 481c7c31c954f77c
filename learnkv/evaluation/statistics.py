"""Paired bootstrap over prompts, and over training seeds x prompts: every figure of a comparison with its interval."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
BLOCK_ELEMENTS = 1 << 22  # resampled values held at once: 32 MiB
ROUNDING = 1e-9  # differences of means this near each other are equal
FEWEST = 10  # prompts under an interval: of fewer, resamples are too alike to say how far off their mean may be


@dataclass(frozen=True)
class Interval:
    """A point estimate between its bounds."""

    value: float
    low: float
    high: float


def mean(values: ArrayLike, *, level: float = 0.95, resamples: int = 5000, seed: int = 0) -> Interval:
    """Mean of `values` [prompts] or [runs, prompts] with its interval.

    Prompts are resampled, and runs too where there are several: the interval then speaks for another training seed as well.
    Values that are all equal give an interval of no width, as every percentile bootstrap does.
    """
    return bootstrap(np.positive, checked("values", values), level=level, resamples=resamples, seed=seed)


def difference(values: ArrayLike, other: ArrayLike, *, level: float = 0.95, resamples: int = 5000, seed: int = 0) -> Interval:
    """mean(values) - mean(other), paired: both [prompts] or [runs, prompts], in the same order of prompts; below 0 `values` are smaller."""
    return bootstrap(np.subtract, *paired(values, other), level=level, resamples=resamples, seed=seed)


@dataclass(frozen=True)
class Tested:
    """A paired difference and how likely resamples contradict it.

    gain        mean(values) - mean(other) with its interval
    p           that there is no difference, two-sided
    p_margin    that `values` lie more than the margin below: twice the one-sided share, so that it is below 0.05 where the 95%
                interval lies above -margin
    """

    gain: Interval
    p: float
    p_margin: float


def tested(values: ArrayLike, other: ArrayLike, *, margin: float = 0.0, resamples: int = 5000, seed: int = 0) -> Tested:
    """`difference` at 95%, with the p-values of the same resamples; the least that can be is 2 / (resamples + 1)."""
    sides = paired(values, other)
    drawn = draws(np.subtract, *sides, resamples=resamples, seed=seed)
    below, above = int(np.sum(drawn <= 0)), int(np.sum(drawn >= 0))
    return Tested(
        interval_of(np.subtract, sides, drawn, 0.95),
        twice(min(below, above), resamples),
        twice(int(np.sum(drawn < -margin - ROUNDING)), resamples),
    )


def twice(count: int, resamples: int) -> float:
    """A p-value from how many resamples lie on the wrong side; the sample itself counts as one of them, so it is never 0."""
    return min(1.0, float(2 * (1 + count) / (1 + resamples)))


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for there being several (S. Holm, 1979): below 0.05 all together err in at most 1 of 20 families."""
    adjusted, least = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        least = adjusted[i] = max(least, min(1.0, (len(p) - rank) * p[i]))
    return adjusted


def ratio(values: ArrayLike, full: ArrayLike, *, level: float = 0.95, resamples: int = 5000, seed: int = 0) -> Interval:
    """mean(values) / mean(full), paired over prompts: the share of the full cache's accuracy that a method keeps.

    values  [prompts] or [runs, prompts]
    full    [prompts], not all zero; resamples in which `full` happens to be all zero say nothing and are left out
    """
    sides = paired(values, full)
    if not sides[1].any():
        raise ValueError(f"the full cache answered none of {sides[1].shape[1]} prompts: there is no ratio to it; use prompts it can answer")
    return bootstrap(divide, *sides, level=level, resamples=resamples, seed=seed)


def divide(above: Array, below: Array) -> Array:
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below != 0)


def bootstrap(statistic: Callable[..., Array], *sides: Array, level: float, resamples: int, seed: int) -> Interval:
    """Percentile interval of statistic(mean of each side), the sides [runs, prompts]."""
    return interval_of(statistic, sides, draws(statistic, *sides, resamples=resamples, seed=seed), level)


def interval_of(statistic: Callable[..., Array], sides: Sequence[Array], drawn: Array, level: float) -> Interval:
    """statistic(mean of each side) between the bounds that `level` of its resamples `drawn` [n] lie in."""
    if not 0 < level < 1:
        raise ValueError(f"level={level} is the share of resamples inside the interval; give a number between 0 and 1")
    low, high = np.nanquantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    value = statistic(*(side.mean(keepdims=True) for side in sides)).item()
    return Interval(value, float(low), float(high))


def draws(statistic: Callable[..., Array], *sides: Array, resamples: int, seed: int) -> Array:
    """[resamples] of statistic(mean of each side), the sides [runs, prompts].

    A resample draws prompts once for all sides (the pairing) and the runs of each side on their own.
    """
    if resamples < 1:
        raise ValueError(f"resamples={resamples} counts bootstrap draws; give 1 or more")
    rng = np.random.default_rng(seed)
    return np.concatenate([statistic(*means) for means in resample(sides, resamples, rng)])


def resample(sides: Sequence[Array], count: int, rng: np.random.Generator) -> Iterator[list[Array]]:
    """Blocks of resampled means, one [n] per side; `count` in all."""
    prompts = sides[0].shape[1]
    step = max(1, BLOCK_ELEMENTS // prompts)
    for start in range(0, count, step):
        drawn = rng.integers(prompts, size=(min(step, count - start), prompts))
        yield [resampled_mean(side, drawn, rng) for side in sides]


def resampled_mean(values: Array, drawn: NDArray[np.int64], rng: np.random.Generator) -> Array:
    """[n] means of values [runs, prompts] over the prompts `drawn` [n, prompts] and as many runs, drawn here."""
    runs = len(values)
    weights = rng.multinomial(runs, [1 / runs] * runs, size=len(drawn)) / runs  # [n, runs], how often each run was drawn
    by_run = np.stack([values[r][drawn].mean(1) for r in range(runs)], 1)  # [n, runs]
    return (weights * by_run).sum(1)


def paired(values: ArrayLike, other: ArrayLike) -> tuple[Array, Array]:
    left, right = checked("values", values), checked("the other side", other)
    if left.shape[1] != right.shape[1]:
        raise ValueError(f"paired figures need the same prompts on both sides; got {left.shape[1]} and {right.shape[1]}")
    return left, right


def checked(name: str, values: ArrayLike) -> Array:
    """values as [runs, prompts] float64: finite, FEWEST prompts or more."""
    array = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if array.ndim != 2 or array.shape[0] < 1:
        raise ValueError(f"{name}: figures come as [prompts] or [runs, prompts]; got shape {np.shape(values)}")
    if array.shape[1] < FEWEST:
        raise ValueError(f"{name}: {too_few(array.shape[1])}")
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise ValueError(f"{name}: {bad} of {array.size} figures are NaN or infinite; no comparison can stand on them, find their rows")
    return array


def too_few(prompts: int) -> str:
    """Why there is no interval."""
    return f"{prompts} prompt{'s' * (prompts != 1)}, fewer than the {FEWEST} that an interval needs"
