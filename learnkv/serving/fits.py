"""How many requests of a length fit the pool at once, before anything is simulated."""

from __future__ import annotations

from collections.abc import Sequence

from learnkv.serving.batcher import Batcher
from learnkv.serving.cells import Server
from learnkv.serving.requests import Session


def at_once(server: Server, sessions: Sequence[Session]) -> str:
    """In words."""
    longest = max((turn.prompt + turn.output for session in sessions for turn in session.turns), default=0)
    found, pages = request_pages(server, sessions), server.limits.pages
    mean = sum(found) / len(found)
    return f"{pages / mean:,.1f} requests of mean size at their ends, {pages / max(found):,.1f} of the longest ({longest:,} tokens)"


def request_pages(server: Server, sessions: Sequence[Session]) -> list[int]:
    """Pages that each request holds at its end."""
    batcher = Batcher(server.shape, server.cache, server.limits)
    turns = [turn for session in sessions for turn in session.turns]
    sizes = [(turn.prompt + turn.output, server.cache.tokens(turn.prompt) + server.cache.interval) for turn in turns]
    return [batcher.pages(min(total, most), total) for total, most in sizes]
