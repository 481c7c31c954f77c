"""What no schedule can beat, with the same pool, the same cost of a step and the same requests.

Take any schedule that serves the requests, preemptive or not, that knows the future or not.

1. Work.  Request i has to put at least prompt - reused + output - 1 tokens through the weights, sample `output` rows, and its token at
   position p attends at least min(p, b) slots, b its session's smallest budget so far: a chunk attends to what is held before it and
   to itself, and nobody evicts below b.  A preempted request may get its next token from a refill instead of a decode step, and reads
   nothing then; but it writes all its p - 1 earlier tokens again, and attends for each of them.  So `cheapest` takes, of what a decode
   step does to an earlier slot, what a refill does to it where that is less.
2. Steps.  A step samples one row of a request at most, and a request from which a step samples holds at least pages(min(p, b)) pages in
   it.  The pool holds P pages, a step takes `step_tokens` tokens and `batch` requests.  So the number of steps is at least each of
   page-steps / P, tokens / step_tokens, rows / batch: the relaxation in which requests may be cut into fractions of tokens and steps.
3. Time.  A step costs max(weights, linear) + max(moved, attended) + host, or its link where that is longer; each part is linear in the
   step's work.  A sum of maxima is at least the maximum of sums, so the time of all steps is at least Machine.seconds of the summed
   work with the least number of steps.
4. Arrivals.  What arrives at time a or later is worked on after a only: for each a the end is at least a + the time of 3 for those
   requests.  A turn cannot arrive before its session's start, the pauses and the least service of the turns before.
5. Chains.  A request alone takes ceil(tokens / step_tokens) steps or more to its first token, and output - 1 more: Machine.seconds of
   that is a bound for its latency, whoever else is served.

Throughput is at most all tokens over the largest of these ends, less the first arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from learnkv.serving.batcher import Batcher, Limits, capped
from learnkv.serving.caches import PAGE, CacheModel
from learnkv.serving.cost import Machine, Work
from learnkv.serving.job import Job
from learnkv.serving.requests import Session
from learnkv.serving.shapes import Shape


@dataclass(frozen=True)
class Bound:
    """Limits of any schedule.

    seconds    from the first arrival to the last token, at least
    tokens_s   tokens of answers a second, at most
    ttft_s     time to first token, its mean at least; tpot_s of the time per token after it, latency_s of both together
    """

    seconds: float
    tokens_s: float
    ttft_s: float
    tpot_s: float
    latency_s: float


@dataclass(frozen=True)
class Least:
    """The least that one request takes.

    arrival     earliest, seconds
    work        all of it; its `steps` are page-steps
    prefill     of its first token
    """

    arrival: float
    ttft: float
    tpot: float | None
    work: Work
    output: int

    @property
    def latency(self) -> float:
        return self.ttft + (self.tpot or 0.0) * (self.output - 1)


def bound(sessions: Sequence[Session], shape: Shape, cache: CacheModel, machine: Machine, limits: Limits) -> Bound:
    """Of the requests that the pool can hold at all."""
    server, machine = Batcher(shape, cache, limits), cheapest(machine)
    least = [one for session in sessions for one in chain(session, server, machine)]
    if not least:
        return Bound(math.inf, 0.0, math.nan, math.nan, math.nan)
    begin = min(one.arrival for one in least)
    end = max(max(one.arrival + one.latency for one in least), worked(least, machine, limits))
    paces = [one.tpot for one in least if one.tpot is not None]
    return Bound(
        seconds=end - begin,
        tokens_s=sum(one.output for one in least) / (end - begin),
        ttft_s=float(np.mean([one.ttft for one in least])),
        tpot_s=float(np.mean(paces)) if paces else 0.0,
        latency_s=float(np.mean([one.latency for one in least])),
    )


def cheapest(machine: Machine) -> Machine:
    """See 1."""
    cache = machine.cache
    least = replace(
        cache,
        read=min(cache.read, cache.slot),
        fetched=min(cache.fetched, cache.stored),
        attended=min(cache.attended, cache.prefill),
    )
    return replace(machine, cache=least)


def worked(least: Sequence[Least], machine: Machine, limits: Limits) -> float:
    """The end, by 4: over all arrivals, that arrival and the work that comes with it or after it."""
    ordered = sorted(least, key=lambda one: -one.arrival)
    names = [field.name for field in fields(Work)]
    sums = np.cumsum([[getattr(one.work, name) for name in names] for one in ordered], axis=0)
    ends = []
    for one, row in zip(ordered, sums, strict=True):
        work = Work(**dict(zip(names, row.tolist(), strict=True)))
        work.steps = max(work.steps / limits.pages, work.tokens / limits.step_tokens, work.rows / limits.batch)
        ends.append(one.arrival + machine.seconds(work))
    return max(ends)


def chain(session: Session, server: Batcher, machine: Machine) -> list[Least]:
    """A session's turns, one after the other at their least; it ends before a turn that no pool can hold."""
    arrival, floor, found = session.start, math.inf, []
    for turn, asked in enumerate(session.turns):
        budget = server.cache.tokens(asked.prompt)
        arrival += asked.think if turn else 0.0
        job = Job(0, session, turn, arrival, budget, asked.prompt, asked.prompt, asked.output)
        if not server.fits(job):
            break
        floor = min(floor, budget)
        found.append(least_of(job, int(floor), server, machine))
        arrival += found[-1].latency
    return found


def least_of(job: Job, floor: int, server: Batcher, machine: Machine) -> Least:
    """See 1, 2 and 5."""
    reused = job.session.reused(job.turn)
    first = prefill_work(server, reused, job.prompt, floor)
    then = decode_work(server, job.prompt, job.output - 1, floor)
    ttft = machine.seconds(Work(**vars(first) | {"steps": -(-(job.prompt - reused) // server.limits.step_tokens)}))
    pace = machine.seconds(Work(**vars(then) | {"steps": job.output - 1})) / (job.output - 1) if job.output > 1 else None
    work = Work(**{name: value + getattr(then, name) for name, value in vars(first).items()})
    return Least(job.arrived, ttft, pace, work, job.output)


def prefill_work(server: Batcher, reused: int, prompt: int, floor: int) -> Work:
    """Of one request; `steps` are page-steps."""
    tokens, window = prompt - reused, server.shape.window
    attended = server.heads * (capped(prompt, floor) - capped(reused, floor))
    attended += server.side * (capped(prompt, window) - capped(reused, window)) if server.side else 0
    new = tokens * (server.heads + server.side)
    pages = server.pages(min(prompt, floor), prompt)
    return Work(steps=pages, tokens=tokens, prefilled=tokens, rows=1, prefill_slots=attended, new_slots=new)


def decode_work(server: Batcher, prompt: int, tokens: int, floor: int) -> Work:
    """Of the tokens after the first, likewise: token k goes through the model as number prompt + k, and finds the slots before it."""
    last, window = prompt + tokens, server.shape.window
    attended = server.heads * (capped(last, floor) - capped(prompt, floor))
    attended += server.side * (capped(last, window) - capped(prompt, window)) if server.side else 0
    pages = sum_of_pages(server.heads, prompt, last, floor) + (sum_of_pages(server.side, prompt, last, window) if server.side else 0)
    new = tokens * (server.heads + server.side)
    return Work(steps=pages, tokens=tokens, rows=tokens, decode_slots=attended - new, new_slots=new)


def sum_of_pages(heads: int, begin: int, end: int, most: int) -> int:
    """Pages over the steps in which begin + 1 to end tokens were seen, `most` of them held."""
    return heads * (paged(end, most) - paged(begin, most))


def paged(tokens: int, most: int) -> int:
    """The sum of ceil(min(i, most) / 16) over i from 1 to tokens."""
    inside = min(tokens, most)
    whole, rest = divmod(inside, PAGE)
    return PAGE * whole * (whole + 1) // 2 + rest * (whole + 1) + (tokens - inside) * -(-most // PAGE)
