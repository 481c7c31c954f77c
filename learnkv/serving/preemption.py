"""Who should be preempted: the same requests, served with each victim, over several seeds, paired."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from learnkv.evaluation import statistics
from learnkv.evaluation.statistics import Interval
from learnkv.serving.cells import server_of, simulated
from learnkv.serving.figures import Figures
from learnkv.serving.settings import PlanSettings
from learnkv.serving.victims import VICTIMS, Victim

MEASURES = {
    "tokens_s": "tokens/s",
    "ttft_s": "s to first token, mean",
    "ttft_p95": "s to first token, p95",
    "tpot_s": "s a token, mean",
    "latency_s": "s an answer, mean",
    "latency_p95": "s an answer, p95",
    "preemptions": "preemptions a request",
    "recomputed": "computed again, share",
}


@dataclass(frozen=True)
class Contest:
    """Figures by victim, one per seed in the same order."""

    policy: str
    figures: dict[Victim, list[Figures]]

    def values(self, victim: Victim, measure: str) -> list[float]:
        return [getattr(found, measure) for found in self.figures[victim]]

    def difference(self, measure: str, victim: Victim, other: Victim = "newest") -> Interval:
        """victim - other, paired over seeds, 95%."""
        return statistics.difference(self.values(victim, measure), self.values(other, measure))


def contest(settings: PlanSettings, policy: str, seeds: int, *, finished: Callable[[], object] = lambda: None) -> Contest:
    """Raises a ValueError of fewer seeds than an interval needs."""
    if seeds < statistics.FEWEST:
        raise ValueError(f"seeds={seeds}: an interval needs {statistics.FEWEST} or more")
    figures: dict[Victim, list[Figures]] = {victim: [] for victim in VICTIMS}
    for seed in range(settings.seed, settings.seed + seeds):
        sessions = replace(settings, seed=seed).sessions()
        for victim, found in figures.items():
            found.append(simulated(server_of(replace(settings, victim=victim), policy), sessions, finished))
    return Contest(policy, figures)


def contest_cells(found: Contest) -> list[list[str]]:
    """Rows: a figure, its mean with each victim, and what the others differ from newest-first by."""
    victims = list(found.figures)
    others = [victim for victim in victims if victim != "newest"]
    rows = [["", *victims, *(f"{victim} - newest" for victim in others)]]
    for measure, title in MEASURES.items():
        means = [f"{statistics.mean(found.values(victim, measure)).value:.4g}" for victim in victims]
        rows.append([title, *means, *(show(found.difference(measure, victim)) for victim in others)])
    return rows


def show(gap: Interval) -> str:
    return f"{gap.value:+.3g} [{gap.low:+.3g}, {gap.high:+.3g}]"
