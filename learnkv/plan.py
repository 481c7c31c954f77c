"""Say what eviction buys a server: requests that fit, time per step, and a simulated continuous batcher beside what no schedule beats.

python -m learnkv.plan recipe=plan_chat                                a usual case, and what is recommended for it, with reasons
python -m learnkv.plan plan.model=llama3-8b plan.card=l40s-48gb plan.rate=2
python -m learnkv.plan recipe=plan_datacenter plan.sweep.rate=[2,4,8]  curves; plan.sweep.model and plan.sweep.budget likewise
python -m learnkv.plan plan.trace=mine.jsonl                           a trace of yours: arrival (seconds), prompt, output (tokens)
python -m learnkv.plan recipe=plan_preemption compare=preemption       who should be preempted, over seeds, with intervals

Models: smollm2-135m, llama2-7b, llama2-13b, llama2-70b, llama3-8b, llama3-70b, qwen2.5-7b, qwen3-8b, a hub id or a folder.
Cards: a100-80gb, h100-80gb, h200-141gb, l40s-48gb, rtx4090-24gb, orin-nano-8gb, or a result of `bench kernels`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from learnkv import config
from learnkv.evaluation.cells import aligned
from learnkv.serving import report
from learnkv.serving.cards import card_of
from learnkv.serving.cells import Cell, planned, run_cells, server_of
from learnkv.serving.cost import Impossible
from learnkv.serving.pictures import contest_picture, picture
from learnkv.serving.preemption import contest, contest_cells
from learnkv.serving.recommend import advise
from learnkv.serving.requests import Session, count
from learnkv.serving.settings import PlanSettings
from learnkv.serving.validation import standing

SECONDS_A_TOKEN = 3e-6  # of answers simulated, on one core


@dataclass
class PlanCommand:
    """What `python -m learnkv.plan` reads."""

    recipe: str = ""  # a shipped recipe (plan_chat, ...) or .yaml file
    compare: Literal["policies", "preemption"] = "policies"  # what stands beside what; preemption takes the first of plan.policies
    seeds: int = 10  # of compare=preemption, from plan.seed on
    plan: PlanSettings = field(default_factory=PlanSettings)
    out: str = "data/plans/plan"  # folder of plan.json and plot.png


def run(command: PlanCommand) -> None:
    settings, out = command.plan, Path(command.out)
    card = card_of(settings.card, settings.memory_gb)
    print(standing(card.name))
    print(
        f"card: {settings.cards} x {card.name}, {card.memory / 1e9:.0f} GB, {card.bytes / 1e12:.2f} TB/s, {card.flops / 1e12:.0f} TFLOP/s"
    )
    print(f"of these figures: {card.source}")
    out.mkdir(parents=True, exist_ok=True)
    {"policies": policies, "preemption": preemption}[command.compare](command, settings.sessions(), out)
    print(f"result: {out / 'plan.json'}, {out / 'plot.png'}")
    print("next: python -m learnkv.evaluate recipe=compare")


def policies(command: PlanCommand, sessions: list[Session], out: Path) -> None:
    """Every policy at every point, a table, and what is recommended."""
    settings = command.plan
    print(report.requests_line(sessions))
    facts = fits(settings, sessions)
    print("\n".join(facts))
    runs = len(planned(settings))
    with bar(runs, sessions) as finished:
        cells = run_cells(settings, finished=finished)
    print(aligned(report.table(cells)))
    advice = {title: advise(list(own), settings).lines for title, own in groupby(cells, key=point)}
    for title, lines in advice.items():
        print("\n".join([f"at {title}:", *lines] if len(advice) > 1 else lines))
    name = card_of(settings.card, settings.memory_gb).name
    values = {"settings": asdict(settings), "fits": facts, "cells": report.values_of(cells), "advice": advice}
    report.write_json(out / "plan.json", standing(name), values)
    picture(cells, f"{settings.cards} x {name}; {standing(name)}", out / "plot.png")


def point(cell: Cell) -> str:
    return f"{cell.model}, {cell.rate:g} requests/s"


def fits(settings: PlanSettings, sessions: Sequence[Session]) -> list[str]:
    """A line for each policy, or why it cannot be run."""
    facts = []
    for model in settings.sweep.model or [settings.model]:
        for policy in settings.policies:
            try:
                fact = report.fit_fact(server_of(replace(settings, model=model), policy), sessions)
            except Impossible as error:
                fact = f"{policy}: {error}"
            facts.append(f"{model}, {fact}" if settings.sweep.model else fact)
    return facts


def preemption(command: PlanCommand, sessions: list[Session], out: Path) -> None:
    """Newest-first, LRU and shortest-request-first on the same requests."""
    settings, policy = command.plan, command.plan.policies[0]
    print(report.fit_fact(server_of(settings, policy), sessions))
    with bar(3 * command.seeds, sessions) as finished:
        found = contest(settings, policy, command.seeds, finished=finished)
    told = f"{policy}, {settings.refill}, {command.seeds} seeds of {count(sessions):,} requests"
    print(f"{told}; means, and paired differences with 95% intervals")
    print(aligned(contest_cells(found)))
    name = card_of(settings.card, settings.memory_gb).name
    report.write_json(out / "plan.json", standing(name), {"settings": asdict(settings), **asdict(found)})
    contest_picture(found, f"{policy} on {name}, {command.seeds} seeds; {standing(name)}", out / "plot.png")


@contextmanager
def bar(runs: int, sessions: Sequence[Session]) -> Iterator[Callable[[], object]]:
    """Progress over requests, after a guess of how long it takes."""
    requests, tokens = count(sessions), sum(turn.output for session in sessions for turn in session.turns)
    took = f"about {max(1, round(runs * tokens * SECONDS_A_TOKEN))} s" if runs * tokens * SECONDS_A_TOKEN < 120 else "some minutes"
    print(f"to simulate: {runs} runs of {requests:,} requests, {runs * tokens / 1e6:.1f} M tokens of answers, {took}", flush=True)
    with tqdm(total=runs * requests, desc="plan", unit="request", file=sys.stderr, mininterval=0.5) as shown:
        yield shown.update


if __name__ == "__main__":
    sys.exit(config.main(run, PlanCommand))
