"""A plan as lines, a table, JSON and a picture; each begins with whether the simulator was validated."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from learnkv.files import write_atomically
from learnkv.serving.cells import Cell, Server
from learnkv.serving.fits import at_once
from learnkv.serving.recommend import name_of
from learnkv.serving.requests import Session, count

HEAD = [
    "policy",
    "tokens/s",
    "of the bound",
    "TTFT mean, p95 (s)",
    "TPOT mean, p95 (ms)",
    "preempted a request",
    "recomputed",
    "pages, mean and peak (GiB)",
    "pool",
    "batch",
    "refused",
]


def fit_fact(server: Server, sessions: Sequence[Session]) -> str:
    """What the pool holds, before anything is simulated."""
    token, pool = server.token_bytes, server.limits.pages * server.cache.page
    return f"{server.cache.name}: {token / 2**10:.1f} KiB a token, a pool of {pool / 2**30:.1f} GiB; {at_once(server, sessions)}"


def table(cells: Sequence[Cell]) -> list[list[str]]:
    """A head and a row per cell; model and rate are columns where they differ."""
    several = {name: len({getattr(cell, name) for cell in cells}) > 1 for name in ("model", "rate")}
    head = [name for name, more in several.items() if more]
    return [[*head, *HEAD], *([*(f"{getattr(cell, name)}" for name in head), *row(cell)] for cell in cells)]


def row(cell: Cell) -> list[str]:
    found = cell.figures
    if found is None or not found.served:
        return [
            name_of(cell),
            "impossible" if found is None else "nothing fits",
            *[""] * (len(HEAD) - 3),
            f"{found.refused}" if found else "",
        ]
    return [
        name_of(cell),
        f"{found.tokens_s:,.0f}",
        f"{100 * found.tokens_s / found.most_tokens_s:.0f}%",
        f"{found.ttft_s:.2f}, {found.ttft_p95:.2f}",
        "" if math.isnan(found.tpot_s) else f"{1000 * found.tpot_s:.1f}, {1000 * found.tpot_p95:.1f}",
        f"{found.preemptions:.2f}",
        f"{100 * found.recomputed:.1f}%",
        f"{found.held / 2**30:.1f}, {found.peak / 2**30:.1f}",
        f"{100 * found.filled:.0f}%",
        f"{found.batch:.1f}",
        f"{found.refused}",
    ]


def write_json(path: Path, standing: str, values: dict) -> None:
    """Figures that are not a number become null, which every reader of JSON takes."""
    text = json.dumps(finite({"standing": standing, **values}), indent=1)
    write_atomically(path, lambda to: to.write_text(text + "\n"))


def finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def values_of(cells: Sequence[Cell]) -> list[dict]:
    return [asdict(cell) for cell in cells]


def requests_line(sessions: Sequence[Session]) -> str:
    """What is asked of the server."""
    turns = [turn for session in sessions for turn in session.turns]
    prompts, outputs = [turn.prompt for turn in turns], [turn.output for turn in turns]
    last = max(session.start for session in sessions)
    return (
        f"requests: {count(sessions):,} in {len(sessions):,} sessions that start within {last:,.1f} s; "
        f"prompts of {min(prompts):,} to {max(prompts):,} tokens, answers of {min(outputs):,} to {max(outputs):,}"
    )
