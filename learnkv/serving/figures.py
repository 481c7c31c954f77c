"""A run in figures: what it gave, how long users waited, what it held, and how near it came to the bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learnkv.serving.bound import Bound
from learnkv.serving.caches import CacheModel
from learnkv.serving.simulate import Run


@dataclass(frozen=True)
class Figures:
    """Of one simulation; seconds, tokens, bytes.  NaN where nothing was served.

    tokens_s     of answers, from the first arrival to the last token; most_tokens_s is what no schedule beats
    ttft_s, tpot_s, latency_s    time to first token, per token after it, and of the whole answer, means; _p95 their 95th percentiles
    least_*      what no schedule beats
    preemptions  a request, mean
    recomputed   tokens that preemptions made the server compute again, of all that it computed
    swapped      bytes, both ways
    reused       tokens of prompts found in the cache, of all tokens of prompts
    held, peak   bytes of pages, mean over busy time and most; of the pool: `filled`
    batch        requests in a step, mean
    busy         share of the time
    """

    served: int
    refused: int
    seconds: float
    tokens_s: float
    most_tokens_s: float
    requests_s: float
    ttft_s: float
    ttft_p95: float
    least_ttft_s: float
    tpot_s: float
    tpot_p95: float
    least_tpot_s: float
    latency_s: float
    latency_p95: float
    least_latency_s: float
    preemptions: float
    recomputed: float
    swapped: float
    reused: float
    held: float
    peak: float
    filled: float
    batch: float
    busy: float


def figures_of(run: Run, bound: Bound, cache: CacheModel, pages: int) -> Figures:
    jobs, counts = run.jobs, run.counts
    first = [(job.first_token or 0.0) - job.arrived for job in jobs]
    whole = [(job.finished or 0.0) - job.arrived for job in jobs]
    paces = [((job.finished or 0.0) - (job.first_token or 0.0)) / (job.output - 1) for job in jobs if job.output > 1]
    computed, prompts = counts.prefilled + counts.decoded, sum(job.prompt for job in jobs)
    return Figures(
        served=len(jobs),
        refused=run.refused,
        seconds=run.seconds,
        tokens_s=share(run.tokens, run.seconds),
        most_tokens_s=bound.tokens_s,
        requests_s=share(len(jobs), run.seconds),
        ttft_s=mean(first),
        ttft_p95=p95(first),
        least_ttft_s=bound.ttft_s,
        tpot_s=mean(paces),
        tpot_p95=p95(paces),
        least_tpot_s=bound.tpot_s,
        latency_s=mean(whole),
        latency_p95=p95(whole),
        least_latency_s=bound.latency_s,
        preemptions=share(counts.preemptions, len(jobs)),
        recomputed=share(counts.recomputed, computed),
        swapped=(counts.pages_in + counts.pages_out) * cache.page,
        reused=share(counts.reused, prompts),
        held=share(run.page_seconds, run.busy) * cache.page,
        peak=run.peak * cache.page,
        filled=share(run.peak, pages),
        batch=share(counts.running, counts.steps),
        busy=share(run.busy, run.seconds),
    )


def share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def p95(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95)) if values else math.nan
