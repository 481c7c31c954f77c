"""Small servers and workloads for the tests of the planner."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from learnkv.serving import caches
from learnkv.serving.batcher import Batcher, Limits
from learnkv.serving.caches import CacheModel
from learnkv.serving.cards import Card
from learnkv.serving.cost import Machine, Work, machine_of
from learnkv.serving.requests import Session, Turn
from learnkv.serving.shapes import Shape
from learnkv.serving.simulate import Run, Server

TINY = Shape("tiny", layers=2, kv_heads=2, group=2, head_dim=8, hidden=32, intermediate=64, vocabulary=128)
HYBRID = Shape("hybrid", layers=1, kv_heads=2, group=2, head_dim=8, hidden=32, intermediate=64, vocabulary=128, sliding=3, window=40)
CARD = Card("card", memory=1e6, bytes=1e7, flops=2e8, link=1e6, source="")


@dataclass(frozen=True)
class Even:
    """Every step takes the same."""

    step: float = 1.0

    def seconds(self, work: Work) -> float:
        return self.step


class Watched:
    """A clock that looks into the pool at every step."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.batcher = machine, None
        self.steps: list[Work] = []

    def seconds(self, work: Work) -> float:
        assert self.batcher
        self.batcher.pool.check()
        assert sum(job.pages for job in self.batcher.running) <= self.batcher.pool.used
        assert work.tokens <= self.batcher.limits.step_tokens and work.rows <= self.batcher.limits.batch
        assert work.tokens, "a step of nothing"
        self.steps.append(work)
        return self.machine.seconds(work)


def watched(sessions: list[Session], shape: Shape, cache: CacheModel, limits: Limits) -> tuple[Run, Watched]:
    """A run whose pages are counted at every step, and none of which is held at its end."""
    clock = Watched(machine_of(shape, CARD, cache, step_s=1e-4))
    server = Server(Batcher(shape, cache, limits), clock, lambda: None)
    clock.batcher = server.batcher
    run = server.run(sessions)
    assert server.batcher.pool.used == 0
    return run, clock


def cache_models(shape: Shape = TINY) -> st.SearchStrategy[CacheModel]:
    budgets = st.one_of(st.integers(1, 60), st.floats(0.05, 1.0))
    evicting = st.builds(lambda budget, interval: caches.evict(shape, budget, interval, 1.05), budgets, st.integers(1, 20))
    return st.one_of(st.just(caches.full(shape)), evicting, st.just(caches.offload(shape, 0.2)), st.just(caches.quantise(shape, 4)))


def workloads() -> st.SearchStrategy[list[Session]]:
    """A few sessions of a few turns, in the order of their starts."""
    turn = st.tuples(st.integers(1, 90), st.integers(1, 40), st.floats(0, 3))
    session = st.tuples(st.floats(0, 4), st.lists(turn, min_size=1, max_size=3))
    return st.lists(session, min_size=1, max_size=7).map(lambda found: [session_of(*one) for one in sorted(found, key=lambda one: one[0])])


def session_of(start: float, turns: list[tuple[int, int, float]]) -> Session:
    before, made = 0, []
    for new, output, think in turns:
        made.append(Turn(before + new, output, think if made else 0.0))
        before += new + output
    return Session(start, tuple(made))


def limits_of() -> st.SearchStrategy[Limits]:
    return st.builds(
        Limits,
        pages=st.integers(4, 90).map(lambda n: 4 * n),
        step_tokens=st.integers(8, 64),
        batch=st.integers(1, 8),
        victim=st.sampled_from(["newest", "lru", "shortest"]),
        refill=st.sampled_from(["recompute", "swap"]),
    )


def fixed(number: int, prompt: int, output: int, gap: float = 0.0) -> list[Session]:
    """Requests of one size, `gap` seconds apart."""
    return [Session(i * gap, (Turn(prompt, output),)) for i in range(number)]
