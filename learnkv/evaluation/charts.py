"""Charts: curves over tokens kept, heat maps, bars and training curves as pictures; they know figures, and nothing of comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from learnkv.evaluation.picture import Area, Label, Picture, Point, Shape, Stroke, box, ink_on, shade, width_of
from learnkv.evaluation.statistics import Interval

SMALL = 11.5  # pixels: the smallest text
LINE = 13.5  # pixels between labels under one another


@dataclass(frozen=True)
class Style:
    """How a line is told from the others: by color, dashes and marker, any one of which is enough."""

    color: str
    dash: tuple[float, ...]
    mark: str


STYLES = (
    Style("c0", (), "circle"),
    Style("c1", (7, 3), "square"),
    Style("c2", (2, 2), "triangle"),
    Style("c3", (9, 3, 2, 3), "diamond"),
    Style("c4", (4, 2), "cross"),
    Style("c5", (12, 3), "down"),
    Style("c6", (2, 4), "star"),
    Style("c7", (6, 2, 2, 2, 2, 2), "bar"),
)
MARKS = {  # corners, as angles in degrees and shares of the radius
    "circle": [(a, 1.0) for a in range(0, 360, 24)],
    "square": [(a, 1.25) for a in (45, 135, 225, 315)],
    "triangle": [(a, 1.35) for a in (270, 30, 150)],
    "down": [(a, 1.35) for a in (90, 210, 330)],
    "diamond": [(a, 1.35) for a in (0, 90, 180, 270)],
    "star": [(a, 1.5 if a % 72 == 18 else 0.65) for a in range(18, 378, 36)],
    "cross": [(a + b, r) for a in (0, 90, 180, 270) for b, r in ((-20, 1.4), (20, 1.4), (45, 0.6))],
    "bar": [(20, 1.5), (160, 1.5), (200, 1.5), (340, 1.5)],
}


@dataclass(frozen=True)
class Series:
    """One line: (x, figure) from left to right; without a style it stands in the background."""

    name: str
    points: tuple[tuple[float, Interval], ...]
    style: Style | None = None


@dataclass(frozen=True)
class Frame:
    """Where the plot lies on its picture, and which values its sides are; `log` is of x."""

    left: float
    top: float
    right: float
    bottom: float
    low: tuple[float, float]
    high: tuple[float, float]
    log: bool = False

    def at(self, x: float, y: float) -> Point:
        scale: Callable[[float], float] = math.log if self.log else float
        share = (scale(x) - scale(self.low[0])) / ((scale(self.high[0]) - scale(self.low[0])) or 1.0)
        rise = (y - self.low[1]) / ((self.high[1] - self.low[1]) or 1.0)
        return self.left + share * (self.right - self.left), self.bottom - rise * (self.bottom - self.top)


# ---- curves


def curves(
    series: Sequence[Series], level: float | None, *, title: str, about: str, top: float, width: float, height: float, names: bool
) -> Picture:
    """Scores over tokens kept, on a logarithmic axis, from 0 to `top`; a dashed level for the full cache.

    names  each line's name stands at its right end; without them the panel is for a legend elsewhere
    """
    x = sorted({at for s in series for at, _ in s.points})
    margin = max((width_of(s.name, SMALL) for s in series), default=0) + 34 if names else 12
    frame = Frame(44, 30, width - margin, height - 42, (x[0] / 1.18, 0.0), (x[-1] * 1.18, top), log=True)
    shapes = [*axes(frame, ticks(0, top), thinned(x, frame), title, "tokens kept per KV head"), *level_of(frame, level)]
    front = [s for s in series if s.style]
    for s in series:
        shapes += background(frame, s) if not s.style else []
    step = min(5.0, 0.075 * (frame.right - frame.left) / max(len(front), 1))
    aside = [(i - (len(front) - 1) / 2) * step for i in range(len(front))]  # so that intervals do not hide each other
    for draw in (bounds, foreground):
        shapes += [shape for s, place in zip(front, aside, strict=True) for shape in draw(frame, s, place)]
    return Picture(width, height, title, about, tuple(shapes + (end_labels(frame, series, level) if names else [])))


def level_of(frame: Frame, level: float | None) -> list[Shape]:
    if level is None:
        return []
    y = frame.at(frame.high[0], level)[1]
    return [Stroke(((frame.left, y), (frame.right, y)), "ink", 1.5, (6, 4), f"full cache: {level:.2f}")]


def background(frame: Frame, series: Series) -> list[Shape]:
    points = tuple(frame.at(x, y.value) for x, y in series.points)
    lines: list[Shape] = [Stroke(points, "grey", 1, tip=series.name)] if len(points) > 1 else []
    return lines + [
        marked(point, "circle", "grey", 1.7, tip_of(series.name, x, y)) for point, (x, y) in zip(points, series.points, strict=True)
    ]


def bounds(frame: Frame, series: Series, aside: float) -> list[Shape]:
    """The intervals of a line, moved `aside` by a few pixels."""
    assert series.style
    known = [(frame.at(x, y.value)[0] + aside, y) for x, y in series.points if not math.isnan(y.low)]
    return [Stroke(((x, frame.at(1.0, y.low)[1]), (x, frame.at(1.0, y.high)[1])), series.style.color, 0.9) for x, y in known]


def foreground(frame: Frame, series: Series, aside: float) -> list[Shape]:
    """Line and markers, over their intervals."""
    assert series.style
    color = series.style.color
    points = [(px + aside, py) for px, py in (frame.at(x, y.value) for x, y in series.points)]
    shapes: list[Shape] = [Stroke(tuple(points), color, 2.2, series.style.dash, series.name)] if len(points) > 1 else []
    return shapes + [
        marked(point, series.style.mark, color, 4, tip_of(series.name, x, y)) for point, (x, y) in zip(points, series.points, strict=True)
    ]


def tip_of(name: str, x: float, figure: Interval) -> str:
    bounds = "" if math.isnan(figure.low) else f" [{figure.low:.2f}, {figure.high:.2f}]"
    return f"{name}: {figure.value:.2f}{bounds} with {x:.0f} tokens kept"


def marked(at: Point, mark: str, color: str, radius: float, tip: str = "") -> Area:
    corners = [(math.radians(angle), radius * share) for angle, share in MARKS[mark]]
    return Area(tuple((at[0] + r * math.cos(a), at[1] + r * math.sin(a)) for a, r in corners), color, tip)


def end_labels(frame: Frame, series: Sequence[Series], level: float | None) -> list[Shape]:
    """The names to the right, moved apart where they would touch, each led to the end of its line."""
    ends = [(frame.at(s.points[-1][0], s.points[-1][1].value), s) for s in series]
    whole = [((frame.right, frame.at(1.0, level)[1]), None)] if level is not None else []
    found: list[tuple[Point, Series | None]] = sorted([*ends, *whole], key=lambda end: end[0][1])
    shapes: list[Shape] = []
    for ((x, y), s), place in zip(found, apart([end[1] for end, _ in found], LINE, frame.bottom), strict=True):
        color = "ink" if s is None else s.style.color if s.style else "soft"
        leader = ((x + 6, y), (frame.right + 8, place), (frame.right + 14, place))
        shapes.append(Stroke(leader, "grid" if s is None or not s.style else color, 0.8))
        name = s.name if s else "full cache"
        shapes.append(Label(frame.right + 18, place + 4, name, color, SMALL, bold=s is None or s.style is not None))
    return shapes


def apart(wanted: Sequence[float], gap: float, most: float) -> list[float]:
    """Ascending places as near to `wanted` as may be, each `gap` below the one before, none lower than `most` where there is room."""
    groups: list[list[float]] = []  # of places that push each other: their middle, how many they are
    for place in wanted:
        groups.append([place, 1])
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < gap * (groups[-1][1] + groups[-2][1]) / 2:
            middle, count = groups.pop()
            before, other = groups[-1]
            groups[-1] = [(middle * count + before * other) / (count + other), count + other]
    places = [middle + gap * (i - (count - 1) / 2) for middle, count in groups for i in range(int(count))]
    over = max(0.0, places[-1] - most) if places else 0.0
    limits = [most - gap * (len(places) - 1 - i) for i in range(len(places))]
    return [min(place, limit) if over else place for place, limit in zip(places, limits, strict=True)]


# ---- legends

LEVEL = Stroke(((0, 6), (40, 6)), "ink", 1.5, (6, 4))  # the full cache's piece of a line


def swatch(style: Style) -> list[Shape]:
    """A piece of a line, 40 pixels wide and 12 high."""
    return [Stroke(((0, 6), (40, 6)), style.color, 2.2, style.dash), marked((20, 6), style.mark, style.color, 4)]


def legend(styles: Sequence[tuple[str, Style]], width: float) -> Picture:
    """Every name behind a piece of its line, in lines that break at `width`."""
    shapes: list[Shape] = []
    x, y = 0.0, 6.0
    for name, style in styles:
        room = 48 + width_of(name, SMALL) + 20
        x, y = (0.0, y + 18) if x and x + room > width else (x, y)
        shapes += [*(shape.moved(x, y) for shape in swatch(style)), Label(x + 48, y + 10, name, size=SMALL)]
        x += room
    return Picture(width, y + 20, "legend", ", ".join(name for name, _ in styles), tuple(shapes))


# ---- axes


def axes(frame: Frame, y_ticks: Sequence[float], x_ticks: Sequence[float], title: str, x_label: str) -> list[Shape]:
    shapes: list[Shape] = [Label(frame.left - 32, 16, title, size=13, bold=True)]
    for y in y_ticks:
        at = frame.at(frame.high[0], y)[1]
        shapes += [Stroke(((frame.left, at), (frame.right, at)), "grid"), Label(frame.left - 6, at + 4, f"{y:g}", "soft", SMALL, "end")]
    for x in x_ticks:
        at = frame.at(x, 0)[0]
        shapes += [
            Stroke(((at, frame.bottom), (at, frame.bottom + 4)), "soft"),
            Label(at, frame.bottom + 17, short(x), "soft", SMALL, "middle"),
        ]
    middle = (frame.left + frame.right) / 2
    return [*shapes, Label(middle, frame.bottom + 34, x_label, "soft", SMALL, "middle")]


def short(x: float) -> str:
    """750, 4k, 12.5k"""
    return f"{x / 1000:.3g}k" if x >= 10_000 else f"{x:.0f}"


def thinned(x: Sequence[float], frame: Frame) -> list[float]:
    """Those that are far enough from the one before for their numbers not to touch."""
    kept = [x[0]]
    for value in x[1:]:
        if frame.at(value, 0)[0] - frame.at(kept[-1], 0)[0] > width_of(short(value), SMALL) + 12:
            kept.append(value)
    return kept


def ticks(low: float, high: float) -> list[float]:
    """Four to seven round values from low to high."""
    span = (high - low) or 1.0
    size = 10 ** math.floor(math.log10(span))
    step = next(step for step in (size / 5, size / 2, size, 2 * size) if span / step <= 7)
    return [round(i * step, 10) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


# ---- maps


def heat(
    values: Sequence[Sequence[float | None]],
    across: Sequence[str],
    down: Sequence[str],
    *,
    title: str,
    about: str,
    labels: tuple[str, str],
    cell: tuple[float, float],
    numbers: bool,
) -> Picture:
    """Shares from 0 to 1 as cells, a line per name in `down`; None is left empty.

    labels   what across and down are
    cell     width and height, pixels
    numbers  whether each cell holds its share in percent
    """
    left, top = max(width_of(name, SMALL) for name in down) + 28, 30.0
    width, height = left + cell[0] * len(across) + 10, top + cell[1] * len(down) + 38
    shapes: list[Shape] = [Label(0, 16, title, size=13, bold=True)]
    shapes += [Label(left - 6, top + cell[1] * (i + 0.5) + 4, name, "soft", SMALL, "end") for i, name in every(down, cell[1])]
    shapes += [
        Label(left + cell[0] * (i + 0.5), top + cell[1] * len(down) + 15, name, "soft", SMALL, "middle")
        for i, name in spaced(across, cell[0])
    ]
    shapes.append(Label(left + cell[0] * len(across) / 2, height - 6, labels[0], "soft", SMALL, "middle"))
    shapes.append(Label(11, top + cell[1] * len(down) / 2, labels[1], "soft", SMALL, "middle", turned=True))
    for row, (line, name) in enumerate(zip(values, down, strict=True)):
        for column, (value, other) in enumerate(zip(line, across, strict=True)):
            if value is not None:
                tip = f"{labels[1]} {name}, {labels[0]} {other}: {value:.0%}"
                shapes += cell_of(left + cell[0] * column, top + cell[1] * row, cell, value, tip, numbers)
    return Picture(max(width, width_of(title, 13) + 12), height, title, about, tuple(shapes))


def cell_of(x: float, y: float, cell: tuple[float, float], value: float, tip: str, numbers: bool) -> list[Shape]:
    color = shade(value)
    shapes: list[Shape] = [box(x + 0.5, y + 0.5, cell[0] - 1, cell[1] - 1, color, tip)]
    middle = (x + cell[0] / 2, y + cell[1] / 2 + 4)
    return [*shapes, Label(*middle, f"{100 * value:.0f}", ink_on(color), SMALL, "middle")] if numbers else shapes


def every(names: Sequence[str], room: float) -> list[tuple[int, str]]:
    """(index, name) of as many names as have room under one another."""
    step = max(1, math.ceil(LINE / room))
    return [(i, name) for i, name in enumerate(names) if i % step == 0]


def spaced(names: Sequence[str], room: float) -> list[tuple[int, str]]:
    """(index, name) of as many names as have room beside one another."""
    step = max(1, math.ceil((max(width_of(name, SMALL) for name in names) + 6) / room))
    return [(i, name) for i, name in enumerate(names) if i % step == 0]


# ---- bars


@dataclass(frozen=True)
class Bar:
    """One bar; `shown` is its figure in words."""

    name: str
    value: float
    shown: str
    color: str


def bars(found: Sequence[Bar], *, title: str, about: str, width: float) -> Picture:
    """Horizontal bars from 0, each with its figure behind it."""
    left = max(width_of(bar.name, SMALL) for bar in found) + 8
    right = width - max(width_of(bar.shown, SMALL) for bar in found) - 10
    most = max(bar.value for bar in found) or 1.0
    shapes: list[Shape] = [Label(0, 16, title, size=13, bold=True)]
    for i, bar in enumerate(found):
        y, long = 28 + 20 * i, max(1.0, bar.value / most * (right - left))
        shapes += [
            Label(left - 6, y + 12, bar.name, size=SMALL, anchor="end"),
            box(left, y, long, 15, bar.color, f"{bar.name}: {bar.shown}"),
            Label(left + long + 5, y + 12, bar.shown, "soft", SMALL),
        ]
    return Picture(width, 36 + 20 * len(found), title, about, tuple(shapes))


# ---- training


def training(runs: Sequence[Sequence[Point]], *, title: str, about: str, width: float, height: float) -> Picture:
    """A figure over the steps of one or several runs."""
    x, y = ([point[i] for run in runs for point in run] for i in (0, 1))
    room = 0.05 * (max(y) - min(y) or 1.0)
    frame = Frame(58, 30, width - 12, height - 42, (min(x), min(y) - room), (max(x), max(y) + room))
    shapes = axes(frame, ticks(frame.low[1], frame.high[1]), ticks(min(x), max(x)), title, "training step")
    for i, run in enumerate(runs):
        style = STYLES[i % len(STYLES)]
        points = tuple(frame.at(*point) for point in run)
        shapes += [Stroke(points, style.color, 1.8, style.dash)] if len(points) > 1 else []
        shapes += [marked(points[-1], style.mark, style.color, 3.5, f"step {run[-1][0]:g}: {run[-1][1]:.3f}")]
    return Picture(width, height, title, about, tuple(shapes))


def smooth_enough(points: Sequence[Point], most: int = 200) -> list[Point]:
    """At most `most` of a curve's points, evenly over it, the last among them."""
    if len(points) <= most:
        return list(points)
    wanted = [round(i * (len(points) - 1) / (most - 1)) for i in range(most)]
    return [points[b] for a, b in pairwise([-1, *wanted]) if a != b]
