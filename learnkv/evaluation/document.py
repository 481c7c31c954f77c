"""Document: what a report of a comparison says, section by section, whatever it is written as."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from learnkv.evaluation import claims, figures, report, tables, trained
from learnkv.evaluation.claims import Primary
from learnkv.evaluation.example import Example
from learnkv.evaluation.figures import Cells, Figure
from learnkv.evaluation.history import Entry, gates_in
from learnkv.evaluation.report import ALL, FULL, Summary
from learnkv.evaluation.rows import Row
from learnkv.evaluation.statistics import FEWEST, too_few
from learnkv.evaluation.suspects import suspects
from learnkv.evaluation.view import View, shortened
from learnkv.gates import GATES
from learnkv.prompts.kinds import KINDS
from learnkv.tasks import TASKS

FEW = 100  # prompts: of fewer, intervals are wide enough to be said again


@dataclass(frozen=True)
class Points:
    """A list of sentences; a warning stands out."""

    sentences: list[str]
    warning: bool = False


@dataclass(frozen=True)
class Grid:
    """A table; a folded one is opened by the reader."""

    title: str
    cells: Cells
    folded: bool = False


@dataclass(frozen=True)
class Commands:
    """Lines that may be typed."""

    lines: list[str]


@dataclass(frozen=True)
class Strips:
    """The text of one prompt, as each line left it."""

    example: Example


Block = Points | Grid | Commands | Strips | Figure


@dataclass(frozen=True)
class Section:
    """A heading with what stands under it; `name` is its place on the page."""

    name: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Extras:
    """What a report shows beside the rows.

    notes    what is to be known of how the rows came about
    entries  the runs that made them
    command  that made this report
    example  one prompt that was looked at
    """

    notes: list[str]
    entries: list[Entry]
    command: str
    example: Example | None = None


def title_of(rows: Sequence[Row]) -> str:
    return f"KV-cache eviction on {rows[0].model}: {len({row.line for row in rows}) - 1} methods and controls compared"


def sections(view: View, extras: Extras) -> list[Section]:
    """Everything, in the order in which it is read; what there is nothing to show of is left out."""
    found = [
        Section("about", "What was compared", about(view, extras)),
        Section("scores", f"{view.score.capitalize()} by budget", [f for f in (figures.overall(view), figures.by_topic(view)) if f]),
        Section("needles", "Needles by length and depth", [*figures.needles(view)]),
        Section("costs", "Memory and time", [figures.costs(view)]),
        Section("kept", "What was kept of one prompt", kept(short_example(extras.example, view))),
        Section("training", "How the gates were trained", [f for f in [figures.training(view)] if f]),
        Section("tables", "Tables and claims", [*all_tables(view, extras.entries)]),
        Section("made", "How this was made", made(view, extras)),
    ]
    return [section for section in found if section.blocks]


# ---- what was compared


def about(view: View, extras: Extras) -> list[Block]:
    warnings = [*extras.notes, *suspects(view.rows)]
    return [
        Grid("", facts(view)),
        *([Points(warnings, warning=True)] if warnings else []),
        Grid("In short", in_short(view, declared(view, extras.entries))),
        Points([IN_SHORT]),
        Grid("What this cannot show", [["", ""], *limits(view)]),
    ]


IN_SHORT = (
    "Scores with 95% intervals. no worse, worse: than the full cache; ahead, behind: of the best heuristic; unclear: neither can be said "
    "beside the full cache. How that is decided stands under the tables."
)


def facts(view: View) -> Cells:
    first, rows = view.rows[0], view.rows
    sizes = [row.num_tokens for row in rows]
    topics = Counter(topic for topic, _ in dict.fromkeys((row.topic, row.prompt) for row in rows))
    where = (
        "the question is part of what is compressed"
        if first.question_in_prefix
        else "the context is compressed before the question is known"
    )
    return [
        ["", ""],
        ["model", f"{first.model}, weights {first.weights_hash}, {first.dtype}"],
        ["prompts", f"{len({row.prompt for row in rows})}, split {first.split}, contexts of {min(sizes):,} to {max(sizes):,} tokens"],
        ["tasks" if any(row.task for row in rows) else "kinds", ", ".join(f"{topic} ({count})" for topic, count in topics.items())],
        ["protocol", f"{where}; {first.prefill}; first {first.num_sinks} and last {first.num_recent} tokens always stay"],
        ["judged by", report.judging(rows)],
    ]


def in_short(view: View, primary: Primary) -> Cells:
    """Per budget the full cache, the best gate, the best heuristic and random."""
    spared = [(line, primary.budget) for line in primary.methods] if primary.metric == "accuracy" and not primary.group else []
    cells, heuristics = claims.cells_of(view.rows), claims.best_heuristics(claims.cells_of(view.rows))
    marks = claims.marks(claims.claims_of(view.rows, uncorrected=spared)) if len({row.prompt for row in view.rows}) >= FEWEST else {}
    gates = {line for (line, _), own in cells.items() if own[0].scorer in GATES and not claims.is_control(own)}
    whole = next((s for s in view.summaries if s.line == FULL), None)
    rows = [["budget", "full cache", *(["best gate"] if gates else []), "best heuristic", "random"]]
    for budget in sorted({s.budget for s in view.summaries if s.line != FULL}, reverse=True):
        at = {s.line: s for s in view.summaries if s.budget == budget}
        best = max((s for line, s in at.items() if line in gates), key=lambda s: (s.accuracy.value, -s.nll.value), default=None)
        named = [with_name(best, marks)] if gates else []
        rows.append(
            [
                report.show_budget(budget),
                figure(whole),
                *named,
                with_name(at.get(heuristics.get(budget, "")), marks),
                figure(at.get("random")),
            ]
        )
    return rows


def figure(found: Summary | None) -> str:
    return report.show(found.accuracy) if found else ""


def with_name(found: Summary | None, marks: Mapping[tuple[str, float], str]) -> str:
    """foresight 0.56 [0.46, 0.65], no worse"""
    if found is None:
        return ""
    said = marks.get((found.line, found.budget), "").replace("best heuristic", "").strip(", ")
    return f"{found.line} {report.show(found.accuracy)}" + (f", {said}" if said else "")


def limits(view: View) -> Cells:
    """What a reader may not conclude, each with the figure that says so."""
    return [[name, said] for name, said in limits_of(view)]


def limits_of(view: View) -> Iterator[tuple[str, str]]:
    rows, prompts = view.rows, len({row.prompt for row in view.rows})
    size = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)([mb])\b", rows[0].model.lower())
    parameters = f", of {size[1]} {'million' if size[2] == 'm' else 'billion'} parameters" if size else ""
    yield "one model", f"{rows[0].model}{parameters}: another model may rank the methods otherwise"
    if any(row.kind in KINDS or (row.task and not TASKS[row.task].benchmark) for row in rows):
        yield "generated prompts", "texts made from templates and lists, not what users ask"
    yield (
        "one range of lengths",
        f"contexts of {min(r.num_tokens for r in rows):,} to {max(r.num_tokens for r in rows):,} tokens; nothing is said of longer ones",
    )
    if prompts < FEWEST:
        yield "no intervals", f"{too_few(prompts)}: differences here may be chance"
    elif prompts < FEW:
        yield "few prompts", f"{prompts}: {spread(view)}"
    else:
        yield "chance", spread(view)
    weak = [(t, level) for t in view.topics if t != ALL and (level := view.level(t)) is not None and level < 0.5]
    if weak:
        told = ", ".join(f"{topic} ({level:.2f})" for topic, level in weak)
        yield "what the model cannot do", f"with the full cache it reaches less than 0.5 in {told}: there a method has little to lose"
    if any(len({r.prompt for r in rows if r.topic == t}) < FEWEST for t in view.topics if t != ALL):
        yield "small groups", f"some panels and tables are of fewer than {FEWEST} prompts and have no intervals"
    yield (
        "time",
        "measured once, on the first prompt, beside whatever else the machine did; python -m learnkv.bench overhead measures it in earnest",
    )


def spread(view: View) -> str:
    """How far off a score may be."""
    half = [(s.accuracy.high - s.accuracy.low) / 2 for s in view.summaries]
    return f"a score is known to within {100 * float(np.median(half)):.0f} points in the median, 95 times in 100"


# ---- one prompt


def short_example(example: Example | None, view: View) -> Example | None:
    """The example with its lines called as on the rest of the page."""
    short = {line: name for name, line in view.folders.items()}
    return example and replace(example, kept=[replace(k, line=short.get(k.line, shortened(k.line))) for k in example.kept])


def kept(example: Example | None) -> list[Block]:
    if example is None:
        return []
    where = "with the question in it" if example.question_in_prefix else "before the question was known"
    first = f"A prompt of {example.kind} ({example.prompt}), compressed to {report.show_budget(example.budget)} {where}."
    return [
        Points([first, f"Asked: {example.question}", f"Right answer: {example.answer}"]),
        figures.retention(example),
        Grid("", kept_cells(example)),
        Strips(example),
    ]


def kept_cells(example: Example) -> Cells:
    """What each line kept of the answer and of all else, and how much the heads agree."""
    start, stop = example.span or (0, 0)
    cells = [
        [
            "line",
            *(["kept of the answer"] if example.span else []),
            "kept of the context",
            "tokens that no head kept",
            "that every head kept",
        ]
    ]
    for found in example.kept:
        n = len(found.shares)
        answer = [f"{sum(found.shares[start:stop]) / (stop - start):.0%}"] if example.span else []
        none, every = (sum(share == bound for share in found.shares) / n for bound in (0, 1))
        cells.append([found.line, *answer, f"{sum(found.shares) / n:.0%}", f"{none:.0%}", f"{every:.0%}"])
    return cells


# ---- tables, and how it was made


def declared(view: View, entries: Sequence[Entry]) -> Primary:
    """The endpoint that the last run declared, under short names; none where its lines are not all among the rows."""
    told = entries[-1].primary if entries else {}
    short = {line: name for name, line in view.folders.items()}
    made = Primary(**(told | {"methods": [short.get(line, line) for line in told.get("methods", [])]}))
    there = {(s.line, s.budget) for s in view.summaries}
    return made if all((line, made.budget) in there for line in made.methods) else Primary()


def all_tables(view: View, entries: Sequence[Entry]) -> Iterator[Block]:
    """Every table that the comparison itself writes, under the lines' short names."""
    short = {line: name for name, line in view.folders.items()}
    gates = {short[line]: runs for line, runs in gates_in(entries).items() if line in short}
    groups = {name: kinds for each in entries for name, kinds in each.groups.items()}
    verdicts = trained.verdicts(view.rows, gates) if len({row.prompt for row in view.rows}) > 1 else []
    for number, table in enumerate(tables.tables(view.rows, groups, gates, verdicts, declared(view, entries))):
        yield Grid(table.title, table.cells, folded=number > 0)
    yield Points([*claims.said(view.rows), *trained.said(verdicts)])


def made(view: View, extras: Extras) -> list[Block]:
    commands = [f"python -m learnkv.evaluate {entry.command}  # learnkv {entry.learnkv}" for entry in extras.entries]
    left = [] if commands else [Points(["No run.json lies beside the rows: the commands that made them are not known."])]
    return [*left, Commands([*commands, extras.command]), Grid("Lines", lines_cells(view), folded=True)]


def lines_cells(view: View) -> Cells:
    """What each short name stands for."""
    first = {row.line: row for row in reversed(view.rows)}
    gates = {line: sorted({row.gate for row in view.rows if row.line == line and row.gate}) for line in first}
    header = ["line", "in the rows", "method", "budget rule", "weights"]
    return [
        header,
        *(
            [line, view.folders[line], first[line].method, first[line].allocator, ", ".join(gates[line])]
            for line in [FULL, *view.lines]
            if line in first
        ),
    ]
