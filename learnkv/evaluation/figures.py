"""Figures of a comparison: each a caption, pictures, and a table that holds every number in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from learnkv.counts import size
from learnkv.evaluation import charts, report, training_log
from learnkv.evaluation.charts import Bar, Series, Style
from learnkv.evaluation.example import Example, Kept
from learnkv.evaluation.gather import mean_score
from learnkv.evaluation.picture import Picture
from learnkv.evaluation.report import ALL, FULL, Summary
from learnkv.evaluation.rows import Row
from learnkv.evaluation.view import View

Cells = list[list[str]]
NEEDLE = "needle"  # the task, and how its kinds begin
SAME_LENGTH = 1.15  # prompts of one size differ by less than this


@dataclass(frozen=True)
class Figure:
    """Pictures under one caption.

    name     of its PNG, and of its place on the page
    cells    its numbers, a header first
    columns  of the pictures in the PNG
    narrow   what a phone shows in place of the pictures
    legend   line -> style, where the pictures do not name their lines
    title    stands above it
    shown    how many pictures the page shows before those that the reader unfolds; 0 for all
    """

    name: str
    caption: str
    pictures: tuple[Picture, ...]
    cells: Cells
    columns: int = 1
    narrow: tuple[Picture, ...] = ()
    legend: tuple[tuple[str, Style], ...] = ()
    title: str = ""
    shown: int = 0


# ---- scores over budgets


def overall(view: View) -> Figure:
    """Every line over all prompts, each named at its end; a phone gets the lines in front with a legend."""
    title = f"{view.score.capitalize()}, all prompts"
    series, level, top = series_of(view, ALL), view.level(), ceiling(view, [ALL])
    height = max(400.0, 96 + charts.LINE * (len(series) + 1))
    wide = charts.curves(series, level, title=title, about=told(view, ALL), top=top, width=920, height=height, names=True)
    small = charts.curves(series, level, title=title, about=told(view, ALL), top=top, width=380, height=320, names=False)
    caption = (
        f"{view.score.capitalize()} over the tokens that a KV head keeps, on a logarithmic axis. In colour gates and best heuristic, "
        "with 95% intervals where there are enough prompts; all others in grey, their intervals in the table. Dashed: the full cache."
    )
    return Figure("curves", caption, (wide,), curve_cells(view), narrow=(small,), legend=tuple(view.styles.items()))


def by_topic(view: View) -> Figure | None:
    """A small panel per kind or task, all on one scale; None where there is one kind only."""
    topics = [topic for topic in view.topics if topic != ALL]
    if not topics:
        return None
    top = ceiling(view, topics)
    panels = [
        charts.curves(
            series_of(view, t),
            view.level(t),
            title=f"{t} ({count(view, t)})",
            about=told(view, t),
            top=top,
            width=300,
            height=240,
            names=False,
        )
        for t in topics
    ]
    kinds = "task" if any(row.task for row in view.rows) else "kind of prompt"
    caption = (
        f"The same by {kinds}, number of prompts in brackets; in the table each score with the tokens kept. "
        "Panels with fewer than 10 prompts have no intervals."
    )
    return Figure("curves-by-kind", caption, tuple(panels), topic_cells(view, topics), columns=4, legend=tuple(view.styles.items()))


def series_of(view: View, topic: str) -> list[Series]:
    """Lines at the back first, so that those in front are drawn over them."""
    found = view.topics[topic]
    return [Series(line, points_of(found, line), view.styles.get(line)) for line in reversed(view.lines) if points_of(found, line)]


def points_of(summaries: Sequence[Summary], line: str) -> tuple[tuple[float, report.Interval], ...]:
    own = sorted((s for s in summaries if s.line == line), key=lambda s: s.kept_mean)
    return tuple((s.kept_mean, s.accuracy) for s in own)


def ceiling(view: View, topics: Sequence[str]) -> float:
    """The upper end of the axis: the next tenth above everything that is drawn."""
    most = max(max(s.accuracy.value, 0 if s.accuracy.high != s.accuracy.high else s.accuracy.high) for t in topics for s in view.topics[t])
    tenths = max(2, int(most * 10) + 1)
    return min(1.02, (tenths + (tenths % 2 if tenths > 7 else 0)) / 10)  # where ticks are 0.2 apart, one stands at the top


def count(view: View, topic: str) -> int:
    return next(s.prompts for s in view.topics[topic])


def told(view: View, topic: str) -> str:
    """A picture of curves in words."""
    found = [s for s in view.topics[topic] if s.line != FULL and s.budget == view.budget]
    best = sorted(found, key=lambda s: -s.accuracy.value)[:3]
    level = view.level(topic)
    whole = "" if level is None else f"full cache {level:.2f}; "
    named = ", ".join(f"{s.line} {s.accuracy.value:.2f}" for s in best)
    budget, count = report.show_budget(view.budget), len({s.line for s in found})
    return f"{count} lines of {view.score} over tokens kept; {whole}highest at {budget}: {named}."


def curve_cells(view: View) -> Cells:
    """A row per line: tokens kept, score and NLL at each budget; the full cache's in the first columns."""
    budgets = budgets_of(view)
    names = ("tokens kept", view.score, "NLL")
    found = {(s.line, s.budget): s for s in view.summaries}
    rows = [[line, *(cell for b in budgets for cell in curve_row(found.get((line, b))))] for line in view.lines]
    whole = [[s.line, *curve_row(s), *[""] * 3 * (len(budgets) - 1)] for s in view.summaries if s.line == FULL]
    return [["line", *(f"{report.show_budget(b)} {name}" for b in budgets for name in names)], *whole, *rows]


def budgets_of(view: View) -> list[float]:
    return sorted({s.budget for s in view.summaries if s.line != FULL}, reverse=True)


def curve_row(s: Summary | None) -> list[str]:
    return [f"{s.kept_mean:.0f}", report.show(s.accuracy), report.show(s.nll)] if s else [""] * 3


def topic_cells(view: View, topics: Sequence[str]) -> Cells:
    """A row per line and budget, a column per kind or task."""
    found = {(t, s.line, s.budget): s for t in topics for s in view.topics[t]}
    keys = dict.fromkeys((line, s.budget) for line in [FULL, *view.lines] for s in view.summaries if s.line == line)
    rows = [
        [line, "" if line == FULL else report.show_budget(b), *(topic_cell(found.get((t, line, b))) for t in topics)] for line, b in keys
    ]
    return [["line", "budget", *topics], *rows]


def topic_cell(s: Summary | None) -> str:
    return f"{report.show(s.accuracy)} with {s.kept_mean:.0f}" if s else ""


# ---- needles


def needles(view: View) -> list[Figure]:
    """A map of length and depth per line, a figure per budget, the full cache first in each; none without rows of the needle task."""
    rows = [row for row in view.rows if row.task == NEEDLE]
    if not rows:
        return []
    budgets = sorted({row.budget for row in rows if row.line != FULL}, reverse=True)
    return [needle_figure(view, rows, lengths_of(rows), budget) for budget in budgets]


def needle_figure(view: View, rows: Sequence[Row], lengths: Sequence[tuple[int, int]], budget: float) -> Figure:
    depths = sorted({row.kind for row in rows})
    maps: list[Picture] = []
    cells = [["line", "depth", *(f"{length_name(l)} tokens" for l in lengths)]]
    for line in [FULL, *view.lines]:
        own = [row for row in rows if row.line == line and (line == FULL or row.budget == budget)]
        values = [[mean_of([r for r in own if r.kind == d and l[0] <= r.num_tokens <= l[1]]) for l in lengths] for d in depths]
        if own:
            maps.append(needle_map(line, values, lengths, depths))
            cells += [
                [line, depth_name(d), *("" if v is None else f"{v:.0%}" for v in found)] for d, found in zip(depths, values, strict=True)
            ]
    caption = (
        f"Needles found at a budget of {report.show_budget(budget)}, percent of the prompts of a cell: how deep the needle lay in the text "
        "(100 is its end), and how long the text was; white is none, dark blue all. The full cache comes first: what it does not find, no "
        "method can be blamed for."
    )
    name, shown = report.show_budget(budget), 1 + sum(line in view.styles for line in {row.line for row in rows})
    return Figure(f"needle-{name.replace('%', 'pc')}", caption, tuple(maps), cells, 5, title=f"Budget {name}", shown=shown)


def needle_map(line: str, values: list[list[float | None]], lengths: Sequence[tuple[int, int]], depths: Sequence[str]) -> Picture:
    known = [v for found in values for v in found if v is not None]
    return charts.heat(
        values,
        [length_name(l) for l in lengths],
        [depth_name(d) for d in depths],
        title=line,
        about=f"{line}: {sum(known) / len(known):.0%} of the needles found, mean over {len(known)} cells of length and depth.",
        labels=("context, tokens", "depth, %"),
        cell=(max(34.0, 150 / len(lengths)), 19),
        numbers=True,
    )


def mean_of(rows: Sequence[Row]) -> float | None:
    return mean_score(rows) if rows else None


def depth_name(kind: str) -> str:
    return str(int(kind.removeprefix(f"{NEEDLE}_")))


def lengths_of(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """(fewest, most) tokens of each size of prompts: sizes are what lies clearly apart."""
    found: list[tuple[int, int]] = []
    for tokens in sorted({row.num_tokens for row in rows}):
        if found and tokens <= SAME_LENGTH * found[-1][0]:
            found[-1] = (found[-1][0], tokens)
        else:
            found.append((tokens, tokens))
    return found


def length_name(length: tuple[int, int]) -> str:
    return f"{length[1]}"


# ---- what it costs


def costs(view: View) -> Figure:
    """Bytes held at one budget, and what a line adds to a prefill."""
    found = [s for line in [FULL, *view.lines] if (s := view.at(line))]
    held = [Bar(s.line, s.bytes_held, size(int(s.bytes_held)), color_of(view, s.line)) for s in found]
    evicting = [s for s in found if s.line != FULL]
    extra = [
        Bar(s.line, s.extra_seconds, f"{s.extra_seconds:.2f} s ({s.extra_seconds / s.prefill_seconds:.0%})", color_of(view, s.line))
        for s in evicting
    ]
    budget = report.show_budget(view.budget)
    wide, narrow = (
        (
            charts.bars(held, title=f"Bytes held at {budget}", about=extremes("bytes held", held), width=width),
            charts.bars(extra, title="Time added to a prefill", about=extremes("time added", extra), width=width),
        )
        for width in (520, 380)
    )
    caption = (
        f"What a cache holds after eviction to {budget}, mean over prompts, and what scoring, extra passes and eviction add to a prefill, "
        "measured on the first prompt only, beside whatever else the machine did; in brackets as a share of the full cache's prefill."
    )
    cells = [["line", "budget", "bytes held", "tokens kept, mean", "most in a head", "time added", "prefill"]]
    cells += [cost_row(s) for line in [FULL, *view.lines] for s in view.summaries if s.line == line]
    return Figure("costs", caption, wide, cells, columns=2, narrow=narrow)


def color_of(view: View, line: str) -> str:
    return "ink" if line == FULL else view.styles[line].color if line in view.styles else "grey"


def extremes(what: str, found: Sequence[Bar]) -> str:
    least, most = min(found, key=lambda bar: bar.value), max(found, key=lambda bar: bar.value)
    return f"{len(found)} bars of {what}: least {least.name}, {least.shown}; most {most.name}, {most.shown}."


def cost_row(s: Summary) -> list[str]:
    budget = "" if s.line == FULL else report.show_budget(s.budget)
    extra = "" if s.line == FULL else f"{s.extra_seconds:.2f} s"
    return [s.line, budget, f"{s.bytes_held:,.0f}", f"{s.kept_mean:.1f}", f"{s.kept_max}", extra, f"{s.prefill_seconds:.2f} s"]


# ---- one prompt


def retention(example: Example) -> Figure:
    """Which share of the context's tokens each head kept."""
    maps = tuple(retention_map(kept) for kept in example.kept)
    layers = range(len(example.kept[0].retention))
    cells = [["line", "head", *(f"layer {layer}" for layer in layers)]]
    for kept in example.kept:
        for head in range(len(kept.retention[0])):
            cells.append([kept.line, str(head), *(f"{kept.retention[layer][head]:.0%}" for layer in layers)])
    budget = report.show_budget(example.budget)
    caption = (
        f"Share of the {len(example.tokens)} tokens of one prompt that each KV head kept at a budget of {budget}; white is none, "
        "dark blue all. A rule that gives all heads as much is one colour; an adaptive one shows which layers and heads it favours."
    )
    return Figure("retention", caption, maps, cells, columns=2)


def retention_map(kept: Kept) -> Picture:
    layers, heads = len(kept.retention), len(kept.retention[0])
    values: list[list[float | None]] = [[kept.retention[layer][head] for layer in range(layers)] for head in range(heads)]
    flat = [(share, layer, head) for layer, shares in enumerate(kept.retention) for head, share in enumerate(shares)]
    most, least = max(flat), min(flat)
    about = f"Shares from {least[0]:.0%} (layer {least[1]}, head {least[2]}) to {most[0]:.0%} (layer {most[1]}, head {most[2]})."
    names = [str(i) for i in range(layers)], [str(i) for i in range(heads)]
    cell = (max(11.0, 380 / layers), max(14.0, 60 / heads))
    return charts.heat(values, *names, title=kept.line, about=about, labels=("layer", "KV head"), cell=cell, numbers=False)


# ---- training


def training(view: View) -> Figure | None:
    """What the gates' runs logged; None where no run lies beside these rows."""
    runs = {line: sorted({row.run for row in view.rows if row.line == line and row.run}) for line in view.lines}
    found = {line: logs for line, folders in runs.items() if (logs := [log for f in folders if (log := training_log.read(Path(f)))])}
    if not found:
        return None
    panels = [training_panel(line, logs) for line, logs in found.items()]
    cells = [["line", "run", "figure", "steps", "first", "last"]]
    cells += [
        [line, log.run, log.name, f"{log.points[-1][0]:g}", f"{log.points[0][1]:.3f}", f"{log.points[-1][1]:.3f}"]
        for line, logs in found.items()
        for log in logs
    ]
    caption = (
        "What the gates' training runs logged: the reward on held-out traces, the oracle's being -1, or the loss where none was measured."
    )
    return Figure("training", caption, tuple(panels), cells, columns=3)


def training_panel(line: str, logs: Sequence[training_log.Log]) -> Picture:
    runs = [charts.smooth_enough(log.points) for log in logs]
    about = f"{logs[0].name} of {len(logs)} runs of {line}, at the end {', '.join(f'{run[-1][1]:.3f}' for run in runs)}."
    return charts.training(runs, title=f"{line}: {logs[0].name}", about=about, width=380, height=260)
