"""The server in time: SimPy lets requests arrive, think and be served step by step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import simpy

from learnkv.serving.batcher import Batcher, Counts, Limits
from learnkv.serving.caches import CacheModel
from learnkv.serving.cost import Work
from learnkv.serving.job import Job
from learnkv.serving.requests import Session
from learnkv.serving.shapes import Shape

Events = Generator[simpy.Event, None, None]


class Clock(Protocol):
    """How long a step takes."""

    def seconds(self, work: Work) -> float: ...


@dataclass(frozen=True)
class Run:
    """What came of a workload.

    jobs         that were served, in the order of their ends
    refused      requests that no empty pool could hold, and what would have followed them
    page_seconds pages held, integrated over the time that the server was busy
    busy         seconds
    peak         pages held at once, at most
    """

    jobs: list[Job]
    refused: int
    counts: Counts
    page_seconds: float
    busy: float
    peak: int

    @property
    def begin(self) -> float:
        return min((job.arrived for job in self.jobs), default=0.0)

    @property
    def end(self) -> float:
        return max((job.finished or 0.0 for job in self.jobs), default=0.0)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return self.end - self.begin

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(job.output for job in self.jobs)


def simulate(
    sessions: Sequence[Session],
    shape: Shape,
    cache: CacheModel,
    clock: Clock,
    limits: Limits,
    *,
    finished: Callable[[], object] = lambda: None,
) -> Run:
    """Serves all of it.

    finished  is told of every request that is through, or refused
    """
    return Server(Batcher(shape, cache, limits), clock, finished).run(sessions)


class Server:
    """The processes of one simulation."""

    def __init__(self, batcher: Batcher, clock: Clock, finished: Callable[[], object]) -> None:
        self.env = simpy.Environment()
        self.batcher, self.clock, self.finished = batcher, clock, finished
        self.numbers = count()
        self.jobs: list[Job] = []
        self.refused = 0
        self.page_seconds = self.busy = 0.0
        self.wake = self.env.event()

    def run(self, sessions: Sequence[Session]) -> Run:
        """Until the last request is through."""
        self.env.process(self.arrivals(sessions))
        self.env.process(self.serve())
        self.env.run()
        batcher = self.batcher
        batcher.pool.check()
        assert not batcher.waiting and not batcher.running, "a request was left behind"
        return Run(self.jobs, self.refused, batcher.counts, self.page_seconds, self.busy, batcher.pool.peak)

    def arrivals(self, sessions: Sequence[Session]) -> Events:
        """First turns; the others come when the one before is answered."""
        for session in sessions:
            if session.start > self.env.now:
                yield self.env.timeout(session.start - self.env.now)
            self.arrive(session, 0)

    def think(self, session: Session, turn: int) -> Events:
        yield self.env.timeout(session.turns[turn].think)
        self.arrive(session, turn)

    def arrive(self, session: Session, turn: int) -> None:
        asked = session.turns[turn]
        budget = self.batcher.cache.tokens(asked.prompt)
        job = Job(next(self.numbers), session, turn, self.env.now, budget, asked.prompt, asked.prompt, asked.output)
        if not self.batcher.fits(job):
            self.batcher.forget(session)
            for _ in session.turns[turn:]:
                self.refused += 1
                self.finished()
            return
        self.batcher.waiting.append(job)
        if not self.wake.triggered:
            self.wake.succeed()

    def serve(self) -> Events:
        """Step after step while there is someone to serve."""
        batcher, env = self.batcher, self.env
        while True:
            if not batcher.running and not batcher.waiting:
                self.wake = env.event()
                yield self.wake
            work = batcher.plan(env.now)
            seconds = self.clock.seconds(work)
            held = batcher.pool.used
            yield env.timeout(seconds)
            self.busy += seconds
            self.page_seconds += held * seconds
            for job in batcher.finish_step(env.now):
                self.end(job)

    def end(self, job: Job) -> None:
        self.jobs.append(job)
        self.finished()
        if not job.last_turn:
            self.env.process(self.think(job.session, job.turn + 1))
