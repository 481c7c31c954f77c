"""A plan's cells: every policy at every combination that is swept, simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from learnkv.serving import caches
from learnkv.serving.batcher import Limits
from learnkv.serving.bound import bound
from learnkv.serving.caches import CacheModel
from learnkv.serving.cards import Card, card_of
from learnkv.serving.cost import Impossible, Machine, machine_of
from learnkv.serving.figures import Figures, figures_of
from learnkv.serving.requests import Session
from learnkv.serving.settings import PlanSettings
from learnkv.serving.shapes import Shape, shape_of
from learnkv.serving.simulate import simulate


@dataclass(frozen=True)
class Server:
    """A policy on a machine, ready to be run.

    pages  of the pool
    """

    shape: Shape
    card: Card
    cache: CacheModel
    machine: Machine
    limits: Limits

    @property
    def token_bytes(self) -> float:
        """On the card, of one token in all evictable layers' heads."""
        return self.shape.heads * self.cache.slot


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    impossible  why it cannot be run at all, "" where it was
    """

    policy: str
    model: str
    rate: float
    budget: float
    keeps: str
    loss: int
    impossible: str
    figures: Figures | None


def server_of(settings: PlanSettings, policy: str) -> Server:
    """Raises Impossible where weights, cache and machine do not go together, and a ValueError for names that are not known."""
    shape, card = shape_of(settings.model), card_of(settings.card, settings.memory_gb)
    cache = cache_of(shape, settings, policy)
    weights = shape.weights * settings.weight_bits / 8
    there = settings.cards * card.memory * settings.memory_share
    pages = caches.pool_pages(cache, card, settings.cards, settings.memory_share, weights, settings.host_gb * 1e9)
    if not pages:
        raise Impossible(f"{weights / 1e9:.1f} GB of weights leave no page in {there / 1e9:.1f} GB; take plan.cards= or plan.weight_bits=")
    if settings.refill == "swap" and not card.link:
        raise ValueError(f"{card.name} shares its memory with the host: there is nowhere to swap to; take plan.refill=recompute")
    machine = machine_of(shape, card, cache, cards=settings.cards, weight_bits=settings.weight_bits, step_s=settings.step_ms / 1000)
    return Server(shape, card, cache, machine, Limits(pages, settings.step_tokens, settings.batch, settings.victim, settings.refill))


def cache_of(shape: Shape, settings: PlanSettings, policy: str) -> CacheModel:
    kinds = {
        "full": lambda: caches.full(shape),
        "evict": lambda: caches.evict(shape, settings.budget, settings.interval, settings.prefill),
        "offload": lambda: caches.offload(shape, settings.fetched),
        "quantise": lambda: caches.quantise(shape, settings.bits),
    }
    return kinds[policy]()


def points(settings: PlanSettings) -> Iterator[PlanSettings]:
    """The settings of every combination that is swept; budgets move evict alone, which `run_cells` minds."""
    sweep = settings.sweep
    for model in sweep.model or [settings.model]:
        for rate in sweep.rate or [settings.rate]:
            for budget in sweep.budget or [settings.budget]:
                yield replace(settings, model=model, rate=rate, budget=budget)


def planned(settings: PlanSettings) -> list[tuple[PlanSettings, str]]:
    """What is run, in its order: a policy without a budget once for each model and rate."""
    found: dict[tuple[str, str, float, float], tuple[PlanSettings, str]] = {}
    for point in points(settings):
        for policy in point.policies:
            found.setdefault((point.model, policy, point.rate, point.budget if policy == "evict" else 0.0), (point, policy))
    return list(found.values())


def run_cells(settings: PlanSettings, *, finished: Callable[[], object] = lambda: None) -> list[Cell]:
    """Every cell; those of one model and rate serve the same requests."""
    drawn: dict[float, list[Session]] = {}
    cells = []
    for point, policy in planned(settings):
        sessions = drawn.setdefault(point.rate, point.sessions()) if point.rate not in drawn else drawn[point.rate]
        cells.append(cell(point, policy, sessions, finished))
    return cells


def cell(settings: PlanSettings, policy: str, sessions: Sequence[Session], finished: Callable[[], object]) -> Cell:
    cache = cache_of(shape_of(settings.model), settings, policy)
    try:
        figures, impossible = simulated(server_of(settings, policy), sessions, finished), ""
    except Impossible as error:
        figures, impossible = None, str(error)
        for session in sessions:
            for _ in session.turns:
                finished()
    budget = settings.budget if policy == "evict" else 1.0
    return Cell(policy, settings.model, settings.rate, budget, cache.keeps, cache.loss, impossible, figures)


def simulated(server: Server, sessions: Sequence[Session], finished: Callable[[], object]) -> Figures:
    run = simulate(sessions, server.shape, server.cache, server.machine, server.limits, finished=finished)
    limit = bound(sessions, server.shape, server.cache, server.machine, server.limits)
    return figures_of(run, limit, server.cache, server.limits.pages)
