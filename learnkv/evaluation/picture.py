"""Picture: strokes, areas and labels on a sheet, which become inline SVG on a page and a PNG everywhere else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Literal

Point = tuple[float, float]
CHARACTER = 0.58  # of a font's size: how wide a letter is, on average, in the fonts that browsers and matplotlib have

# on white, on dark; hues far apart, each readable as text on its ground
COLORS = {
    "ink": ("#1c2126", "#e8eaed"),
    "soft": ("#59636e", "#a8b1bb"),
    "grid": ("#d9dee3", "#3a424a"),
    "grey": ("#9aa3ac", "#78828c"),
    "paper": ("#ffffff", "#14181c"),
    "c0": ("#0b5cad", "#6db3ff"),
    "c1": ("#b93a00", "#ff9a66"),
    "c2": ("#00704f", "#4fd1a5"),
    "c3": ("#86359b", "#d99aea"),
    "c4": ("#806000", "#dcb84a"),
    "c5": ("#b0195f", "#ff8fc0"),
    "c6": ("#006a85", "#5ccbe6"),
    "c7": ("#5c4033", "#c9a48f"),
}


@dataclass(frozen=True)
class Stroke:
    """A line through points; color is a name or #rrggbb, `dash` the lengths drawn and left out, `tip` what the pointer shows."""

    points: tuple[Point, ...]
    color: str = "ink"
    width: float = 1.0
    dash: tuple[float, ...] = ()
    tip: str = ""

    def moved(self, x: float, y: float) -> Stroke:
        return replace(self, points=moved(self.points, x, y))


@dataclass(frozen=True)
class Area:
    """A filled polygon."""

    points: tuple[Point, ...]
    color: str = "ink"
    tip: str = ""

    def moved(self, x: float, y: float) -> Area:
        return replace(self, points=moved(self.points, x, y))


@dataclass(frozen=True)
class Label:
    """Text whose baseline begins, has its middle or ends at (x, y); `turned` reads upwards."""

    x: float
    y: float
    text: str
    color: str = "ink"
    size: float = 12
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False
    turned: bool = False

    def moved(self, x: float, y: float) -> Label:
        return replace(self, x=self.x + x, y=self.y + y)


Shape = Stroke | Area | Label


@dataclass(frozen=True)
class Picture:
    """A sheet of width x height pixels; `title` and `about` say in words what it shows."""

    width: float
    height: float
    title: str
    about: str
    shapes: tuple[Shape, ...]

    def svg(self, name: str) -> str:
        """Inline SVG; `name` is one of its own on the page."""
        head = f'<svg viewBox="0 0 {number(self.width)} {number(self.height)}" role="img" aria-labelledby="{name}-t {name}-d">'
        words = f'<title id="{name}-t">{escape(self.title)}</title><desc id="{name}-d">{escape(self.about)}</desc>'
        return head + words + "".join(map(svg_of, self.shapes)) + "</svg>"

    def save(self, path: Path) -> None:
        """PNG at twice the pixels, on white."""
        from matplotlib.figure import Figure  # a second to import, for pictures only

        figure = Figure(figsize=(self.width / 100, self.height / 100))
        axis = figure.add_axes((0, 0, 1, 1))
        axis.set(xlim=(0, self.width), ylim=(self.height, 0))
        axis.set_axis_off()
        for shape in self.shapes:
            paint(axis, shape)
        figure.savefig(path, dpi=200, format="png")


def tiled(pictures: Sequence[Picture], columns: int, gap: float = 16) -> Picture:
    """Pictures beside and under one another as one, which says what the first says."""
    width, height = (max(getattr(p, side) for p in pictures) + gap for side in ("width", "height"))
    places = [(i % columns * width, i // columns * height) for i in range(len(pictures))]
    shapes = [shape.moved(x, y) for p, (x, y) in zip(pictures, places, strict=True) for shape in p.shapes]
    rows = math.ceil(len(pictures) / columns)
    return replace(pictures[0], width=min(columns, len(pictures)) * width, height=rows * height, shapes=tuple(shapes))


def stacked(above: Picture, below: Picture) -> Picture:
    """One picture over another, which says what the upper says."""
    shapes = [*above.shapes, *(shape.moved(0, above.height) for shape in below.shapes)]
    return replace(above, width=max(above.width, below.width), height=above.height + below.height, shapes=tuple(shapes))


def box(x: float, y: float, width: float, height: float, color: str, tip: str = "") -> Area:
    return Area(((x, y), (x + width, y), (x + width, y + height), (x, y + height)), color, tip)


def moved(points: Sequence[Point], x: float, y: float) -> tuple[Point, ...]:
    return tuple((a + x, b + y) for a, b in points)


def width_of(text: str, size: float) -> float:
    """Pixels that a text takes, about."""
    return CHARACTER * size * len(text)


# ---- SVG


def svg_of(shape: Shape) -> str:
    if isinstance(shape, Label):
        return label_svg(shape)
    tip = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
    path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in shape.points)
    if isinstance(shape, Area):
        return f'<path d="{path}Z" fill="{css(shape.color)}">{tip}</path>'
    dash = f' stroke-dasharray="{" ".join(map(number, shape.dash))}"' if shape.dash else ""
    return f'<path d="{path}" fill="none" stroke="{css(shape.color)}" stroke-width="{number(shape.width)}"{dash}>{tip}</path>'


def label_svg(label: Label) -> str:
    x, y = number(label.x), number(label.y)
    more = f' text-anchor="{label.anchor}"' if label.anchor != "start" else ""
    more += ' font-weight="600"' if label.bold else ""
    more += f' transform="rotate(-90 {x} {y})"' if label.turned else ""
    return f'<text x="{x}" y="{y}" font-size="{number(label.size)}" fill="{css(label.color)}"{more}>{escape(label.text)}</text>'


def css(color: str) -> str:
    return color if color.startswith("#") else f"var(--{color})"


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# ---- PNG


def paint(axis, shape: Shape) -> None:  # type: ignore[no-untyped-def]
    """A shape on matplotlib's axis, whose unit is the pixel of SVG."""
    color = COLORS[shape.color][0] if shape.color in COLORS else shape.color
    if isinstance(shape, Area):
        axis.fill(*zip(*shape.points, strict=True), color=color, linewidth=0)
    elif isinstance(shape, Stroke):
        (line,) = axis.plot(*zip(*shape.points, strict=True), color=color, linewidth=POINT * shape.width, solid_capstyle="butt")
        if shape.dash:
            line.set_dashes([length / shape.width for length in shape.dash])
    else:
        where = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        weight, turn = ("bold" if shape.bold else "normal"), (90 if shape.turned else 0)
        text = shape.text.replace("$", r"\$")  # matplotlib sets what stands between two as a formula
        axis.text(
            shape.x, shape.y, text, color=color, fontsize=POINT * shape.size, ha=where, va="baseline", weight=weight, rotation=turn,
            rotation_mode="anchor",
        )  # fmt: skip


POINT = 0.72  # points in a pixel, of which an inch has 100


# ---- shades of a share


def shade(share: float) -> str:
    """#rrggbb for a share from 0 (near white) to 1 (dark blue), ever darker, so that it survives being printed in grey."""
    at = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in zip(RAMP[low], RAMP[low + 1], strict=True))


RAMP = ((247, 250, 253), (198, 219, 239), (107, 166, 208), (33, 103, 168), (8, 40, 92))


def ink_on(ground: str) -> str:
    """Black or white, whichever reads better on #rrggbb."""
    return "#ffffff" if luminance(ground) < 0.179 else "#000000"


def luminance(color: str) -> float:
    """Relative luminance as WCAG has it, 0 to 1."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """WCAG's contrast of two colors, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
