"""Rows of a comparison -> figures with intervals -> a table as text or Markdown, and a plot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learnkv.evaluation import statistics
from learnkv.evaluation.cells import aligned, markdown
from learnkv.evaluation.rows import Row
from learnkv.evaluation.statistics import Interval
from learnkv.tasks import TASKS

FULL = "full cache"
ALL = "all"
Marks = Mapping[tuple[str, float], str]


@dataclass(frozen=True)
class Summary:
    """One line of the table at one budget, on one kind of prompt or all.

    accuracy, nll        means with 95% intervals over prompts (and runs); bounds are NaN with fewer than FEWEST prompts
    ratio                accuracy / the full cache's accuracy, paired; None where that is 0 or not among the rows
    free                 tokens per KV head that the budget leaves beside the protected ones, mean
    span_kept, kept_mean, kept_max, bytes_held, extra_seconds, prefill_seconds    means (kept_max: the maximum)
    """

    line: str
    budget: float
    kind: str
    prompts: int
    runs: int
    accuracy: Interval
    nll: Interval
    ratio: Interval | None
    free: float
    span_kept: float | None
    kept_mean: float
    kept_max: int
    bytes_held: float
    extra_seconds: float
    prefill_seconds: float


def summarise(rows: Sequence[Row], *, kind: str = ALL) -> list[Summary]:
    """Every line at every budget, lines and budgets in the order of the rows; a prompt's questions are averaged first.

    Raises ValueError where a line lacks prompts that another has: the figures could not be compared.
    """
    chosen = [row for row in rows if kind in (ALL, row.topic)]
    groups: dict[tuple[str, float], list[Row]] = defaultdict(list)
    for row in chosen:
        groups[row.line, row.budget].append(row)
    prompts = list(dict.fromkeys(row.prompt for row in chosen))
    full = [by_prompt(found, prompts, "accuracy") for (line, _), found in groups.items() if line == FULL]
    return [summary(line, budget, kind, found, prompts, full[0] if full else None) for (line, budget), found in groups.items()]


def summary(line: str, budget: float, kind: str, rows: list[Row], prompts: list[str], full: NDArray | None) -> Summary:
    accuracy, nll = by_prompt(rows, prompts, "accuracy"), by_prompt(rows, prompts, "nll")
    spans = [row.span_kept for row in rows if row.span_kept is not None]
    return Summary(
        line=line,
        budget=budget,
        kind=kind,
        prompts=len(prompts),
        runs=len(accuracy),
        accuracy=interval(statistics.mean, np.positive, accuracy),
        nll=interval(statistics.mean, np.positive, nll),
        ratio=interval(statistics.ratio, np.divide, accuracy, full) if full is not None and full.any() else None,
        free=float(np.mean([row.free for row in rows])),
        span_kept=float(np.mean(spans)) if spans else None,
        kept_mean=float(np.mean([row.kept_mean for row in rows])),
        kept_max=max(row.kept_max for row in rows),
        bytes_held=float(np.mean([row.bytes_held for row in rows])),
        extra_seconds=float(np.mean([row.extra_seconds for row in rows])),
        prefill_seconds=float(np.mean([row.prefill_seconds for row in rows])),
    )


def interval(statistic: Callable[..., Interval], point: Callable[..., float], *sides: NDArray) -> Interval:
    """The statistic of sides [runs, prompts], or of fewer than FEWEST prompts point(mean of each side) without bounds."""
    if sides[0].shape[1] >= statistics.FEWEST:
        return statistic(*sides)
    return Interval(float(point(*(side.mean() for side in sides))), math.nan, math.nan)


def by_prompt(rows: Sequence[Row], prompts: Sequence[str], figure: str) -> NDArray[np.float64]:
    """[runs, prompts] of a figure, the mean over each prompt's questions."""
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        cells[row.gate, row.prompt].append(getattr(row, figure))
    runs = list(dict.fromkeys(row.gate for row in rows))
    missing = [prompt for prompt in prompts for run in runs if (run, prompt) not in cells]
    if missing:
        raise ValueError(
            f"{rows[0].line} at budget {rows[0].budget:g} lacks {len(missing)} of {len(prompts) * len(runs)} prompts "
            f"that other lines have, {missing[0]} for one; run the comparison to its end first"
        )
    return np.array([[np.mean(cells[run, prompt]) for prompt in prompts] for run in runs])


def by_line(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of every line, lines in the order of the rows."""
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        lines[row.line].append(row)
    return dict(lines)


def difference(rows: Sequence[Row], line: str, other: str, budget: float | None = None, figure: str = "nll") -> Interval:
    """Paired difference line - other of a figure ("nll", "accuracy") with its interval; below 0 `line` is smaller.

    budget  None takes the mean over all budgets that both were run at
    """
    budgets = {name: {row.budget for row in rows if row.line == name} for name in (line, other)}
    shared = budgets[line] & budgets[other] & ({budget} if budget is not None else budgets[line])
    if not shared:
        at, lines = "" if budget is None else f" at budget {budget:g}", ", ".join(by_line(rows))
        raise ValueError(f"no rows of both lines {line!r} and {other!r}{at}; lines: {lines}")
    found = {name: [row for row in rows if row.line == name and row.budget in shared] for name in (line, other)}
    prompts = list(dict.fromkeys(row.prompt for row in found[line] + found[other]))
    return interval(statistics.difference, np.subtract, *(by_prompt(found[name], prompts, figure) for name in (line, other)))


# ---- tables


def text_table(summaries: Sequence[Summary]) -> str:
    """The table in columns of equal width."""
    return aligned(table(summaries))


def markdown_table(summaries: Sequence[Summary]) -> str:
    """The table in GitHub's Markdown."""
    return markdown(table(summaries))


def table(summaries: Sequence[Summary], marks: Marks | None = None) -> list[list[str]]:
    """Rows of cells: a header, then one line per method; a group of columns per budget, the full cache's figures in the first.

    marks  (line, budget) -> what may be claimed of that line, the last column of each group; without it there is none
    """
    budgets = sorted({s.budget for s in summaries if s.line != FULL}, reverse=True) or [1.0]
    found = {(s.line, s.budget): s for s in summaries}
    spans = any(s.span_kept is not None for s in summaries)
    figures = ["accuracy", "NLL", "of full", *(["span"] if spans else []), "free", *(["claim"] if marks else [])]
    header = ["method"] + [f"{show_budget(b)} {name}" for b in budgets for name in figures] + ["extra time"]
    lines = []
    for line in dict.fromkeys(s.line for s in summaries):
        own = [s for s in summaries if s.line == line]
        shown = [own[0] if line == FULL and i == 0 else found.get((line, b)) for i, b in enumerate(budgets)]
        cells = [cell for b, s in zip(budgets, shown, strict=True) for cell in [*figures_of(s, spans), *marked(marks, line, b)]]
        lines.append([name_of(own[0]), *cells, show_extra(own)])
    return [header, *lines]


def marked(marks: Marks | None, line: str, budget: float) -> list[str]:
    return [marks.get((line, budget), "")] if marks else []


def gaps(rows: Sequence[Row], line: str, others: Sequence[str]) -> list[list[str]]:
    """Rows of cells: accuracy and NLL of `line` minus those of others, paired, at each budget and over all; significant ones are named."""
    lines = by_line(rows)
    budgets = sorted({row.budget for row in lines[line]}, reverse=True)
    columns: list[float | None] = [*budgets, *([None] if len(budgets) > 1 else [])]
    names = ["all budgets" if b is None else show_budget(b) for b in columns]
    header = [f"{line} minus", *(f"{name} {figure}" for name in names for figure in ("accuracy", "NLL"))]
    found = [[other, *(cell for b in columns for cell in gap([*lines[line], *lines[other]], line, other, b))] for other in others]
    return [header, *found]


def gap(rows: Sequence[Row], line: str, other: str, budget: float | None) -> list[str]:
    """Accuracy and NLL of `line` minus those of `other`; empty where they do not meet."""
    met = {row.budget for row in rows if row.line == line} & {row.budget for row in rows if row.line == other}
    if not met or budget not in (None, *met):
        return ["", ""]
    accuracy, nll = (difference(rows, line, other, budget, figure) for figure in ("accuracy", "nll"))
    return [show(accuracy) + verdict(accuracy), show(nll) + verdict(Interval(-nll.value, -nll.high, -nll.low))]


def verdict(gain: Interval) -> str:
    """What an interval that leaves out 0 says."""
    return " ahead" if gain.low > 0 else " behind" if gain.high < 0 else ""


def name_of(first: Summary) -> str:
    return f"{first.line} ({first.runs} runs)" if first.runs > 1 else first.line


def figures_of(found: Summary | None, spans: bool) -> list[str]:
    if found is None:
        return [""] * (5 if spans else 4)
    ratio = show(found.ratio, 100, 0, "%") if found.ratio and found.line != FULL else ""
    span = [] if not spans else ["" if found.span_kept is None else f"{found.span_kept:.2f}"]
    free = "" if found.line == FULL else f"{found.free:.0f}"
    return [show(found.accuracy), f"{found.nll.value:.2f}", ratio, *span, free]


def show(figure: Interval, scale: float = 1, digits: int = 2, unit: str = "") -> str:
    """0.72 [0.66, 0.78]"""
    value, low, high = (f"{scale * x:.{digits}f}" for x in (figure.value, figure.low, figure.high))
    return f"{value}{unit}" if math.isnan(figure.low) else f"{value}{unit} [{low}, {high}]"


def show_budget(budget: float) -> str:
    """10% for 0.1, 64 for 64 tokens."""
    return f"{100 * budget:g}%" if budget < 1 else f"{budget:g}"


def show_extra(own: Sequence[Summary]) -> str:
    """Seconds that scoring and eviction add to one prefill, and as a share of it."""
    if own[0].line == FULL:
        return ""
    extra, prefill = max(s.extra_seconds for s in own), own[0].prefill_seconds
    return f"{extra:.2f} s ({100 * extra / prefill:.0f}%)"


def protocol(rows: Sequence[Row]) -> str:
    """What the rows share and a reader must know before he compares them with others: one sentence."""
    first, prompts = rows[0], {row.prompt for row in rows}
    sizes = [row.num_tokens for row in rows]
    question = "with" if first.question_in_prefix else "without"
    few = len(prompts) < statistics.FEWEST
    bounds = f"no intervals: {statistics.too_few(len(prompts))}" if few else "95% intervals by paired bootstrap"
    return (
        f"{len(prompts)} prompts ({', '.join(dict.fromkeys(row.topic for row in rows))}; {first.split}), "
        f"contexts of {min(sizes)} to {max(sizes)} tokens compressed {first.prefill} {question} the question; "
        f"first {first.num_sinks} and last {first.num_recent} tokens always kept; "
        f"{first.model} in {first.dtype}; {judging(rows)}; {bounds}"
    )


def judging(rows: Sequence[Row]) -> str:
    """How the answers were had."""
    generated = {bool(row.task) and TASKS[row.task].metric is not None for row in rows}
    if len(generated) > 1:
        return "generated answers where a task judges them, teacher-forced ones elsewhere"
    return "generated answers" if generated == {True} else "teacher-forced answers"


# ---- plot


def plot(summaries: Sequence[Summary], path: Path) -> None:
    """Accuracy, and span survival where it is known, over the tokens kept: a line per method with its 95% band, as PNG."""
    from matplotlib.figure import Figure  # a second to import, for plots only

    spans = any(s.span_kept is not None for s in summaries)
    figure = Figure(figsize=(15 if spans else 9, 5), layout="constrained")
    axes = figure.subplots(1, 2 if spans else 1, squeeze=False)[0]
    draw(axes[0], summaries, lambda s: s.accuracy, "accuracy")
    if spans:
        known = [s for s in summaries if s.span_kept is not None]
        draw(axes[1], known, lambda s: Interval(s.span_kept or 0.0, math.nan, math.nan), "share of the answer's tokens kept")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")


def draw(axis, summaries: Sequence[Summary], figure: Callable[[Summary], Interval], label: str) -> None:  # type: ignore[no-untyped-def]
    """One panel; the full cache is a dashed level."""
    from matplotlib import colormaps

    axis.set_prop_cycle(color=colormaps["tab20"](range(20)))
    for line in dict.fromkeys(s.line for s in summaries):
        own = sorted((s for s in summaries if s.line == line), key=lambda s: s.kept_mean)
        shown, x = [figure(s) for s in own], [s.kept_mean for s in own]
        if line == FULL:
            axis.axhline(shown[0].value, color="black", linestyle="--", label=line)
            continue
        (drawn,) = axis.plot(x, [i.value for i in shown], marker="o", markersize=4, label=line)
        axis.fill_between(x, [i.low for i in shown], [i.high for i in shown], color=drawn.get_color(), alpha=0.15, linewidth=0)
    axis.set(xlabel="tokens kept per KV head (mean)", ylabel=label, xscale="log", ylim=(-0.02, 1.02))
    ticks = sorted({round(s.kept_mean) for s in summaries if s.line != FULL})
    axis.set_xticks(ticks, labels=map(str, ticks))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
