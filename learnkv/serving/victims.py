"""Who is preempted when a decode step lacks pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from learnkv.serving.job import Job

Victim = Literal["newest", "lru", "shortest"]


def newest(running: Sequence[Job]) -> Job:
    """Newest-first (NRF): who was admitted last, vLLM's choice."""
    return running[-1]


def least_recent(running: Sequence[Job]) -> Job:
    """LRU: who got a token longest ago.  A batch is served in order, so that among those that decode it is the one admitted first."""
    return min(running, key=lambda job: job.touched)


def shortest(running: Sequence[Job]) -> Job:
    """Shortest-request-first (SRF, arXiv:2411.07447): whose refill costs least, by its tokens seen; of equals the newest.

    Differs: the authors count computed tokens, which here are those seen and not those held: what an evicting cache must compute again
    is not what it frees.
    """
    return min(reversed(running), key=lambda job: job.seen)


VICTIMS: dict[Victim, Callable[[Sequence[Job]], Job]] = {"newest": newest, "lru": least_recent, "shortest": shortest}
