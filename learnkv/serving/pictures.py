"""Plots of a plan: with a swept rate curves over it, else bars, each beside the bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from learnkv.files import write_atomically
from learnkv.serving.cells import Cell
from learnkv.serving.figures import Figures
from learnkv.serving.preemption import MEASURES, Contest
from learnkv.serving.recommend import name_of

PANELS = [
    ("tokens/s", "tokens_s", "most_tokens_s", 1.0),
    ("time to first token (s), mean", "ttft_s", "least_ttft_s", 1.0),
    ("time per token (ms), mean", "tpot_s", "least_tpot_s", 1000.0),
    ("preemptions a request", "preemptions", "", 1.0),
    ("pages held (GiB), peak", "peak", "", 2.0**-30),
]


def picture(cells: Sequence[Cell], title: str, path: Path) -> None:
    """Writes a PNG."""
    write_atomically(path, lambda to: draw([cell for cell in cells if cell.figures and cell.figures.served], title, to))


def draw(cells: Sequence[Cell], title: str, path: Path) -> None:
    from matplotlib.figure import Figure  # a second to import, for plots only

    figure = Figure(figsize=(4.2 * len(PANELS), 4.6), layout="constrained")
    curves = len({cell.rate for cell in cells}) > 1
    for axis, (label, name, limit, scale) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        (lines if curves else bars)(axis, cells, name, limit, scale)
        axis.set_title(label, fontsize="medium")
        axis.set_axisbelow(True)
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize="small")
    if curves:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=120, format="png")


def label_of(cell: Cell, cells: Sequence[Cell]) -> str:
    return f"{cell.model}\n{name_of(cell)}" if len({other.model for other in cells}) > 1 else name_of(cell)


def lines(axis, cells: Sequence[Cell], name: str, limit: str, scale: float) -> None:  # type: ignore[no-untyped-def]
    """A curve over the rate for each policy; dashed what no schedule beats."""
    for label in dict.fromkeys(label_of(cell, cells) for cell in cells):
        own = [(cell.rate, cell.figures) for cell in cells if label_of(cell, cells) == label and cell.figures]
        rates = [rate for rate, _ in own]
        (drawn,) = axis.plot(rates, [value(found, name, scale) for _, found in own], marker="o", label=label.replace("\n", ", "))
        if limit:
            axis.plot(rates, [value(found, limit, scale) for _, found in own], linestyle="--", color=drawn.get_color(), alpha=0.6)
    axis.set_xlabel("requests/s" + (" (dashed: bound)" if limit else ""))
    axis.set_ylim(bottom=0)


def bars(axis, cells: Sequence[Cell], name: str, limit: str, scale: float) -> None:  # type: ignore[no-untyped-def]
    """A bar for each policy; a black line what no schedule beats."""
    found = [cell.figures for cell in cells if cell.figures]
    axis.bar(range(len(found)), [value(one, name, scale) for one in found], color=[f"C{i % 10}" for i in range(len(found))])
    if limit:
        for i, one in enumerate(found):
            axis.hlines(value(one, limit, scale), i - 0.4, i + 0.4, color="black", linestyle="--")
        axis.set_xlabel("dashed: bound")
    axis.set_xticks(range(len(found)), [label_of(cell, cells) for cell in cells], rotation=30, ha="right", fontsize="small")


def value(found: Figures, name: str, scale: float) -> float:
    return getattr(found, name) * scale


def contest_picture(found: Contest, title: str, path: Path) -> None:
    """A dot for each seed and victim, a line at their mean."""
    write_atomically(path, lambda to: draw_contest(found, title, to))


def draw_contest(found: Contest, title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    shown = ["tokens_s", "ttft_s", "latency_s", "preemptions", "recomputed"]
    figure = Figure(figsize=(4.2 * len(shown), 4.2), layout="constrained")
    for axis, measure in zip(figure.subplots(1, len(shown)), shown, strict=True):
        columns = [found.values(victim, measure) for victim in found.figures]
        for seed in zip(*columns, strict=True):
            axis.plot(range(len(columns)), seed, color="grey", alpha=0.4, marker="o", markersize=3)
        for i, column in enumerate(columns):
            axis.hlines(sum(column) / len(column), i - 0.25, i + 0.25, color=f"C{i}", linewidth=3)
        axis.set_xticks(range(len(columns)), list(found.figures))
        axis.set_title(MEASURES[measure], fontsize="medium")
        axis.grid(alpha=0.3)
    figure.suptitle(f"{title} (grey: one seed each)", fontsize="small")
    figure.savefig(path, dpi=120, format="png")
