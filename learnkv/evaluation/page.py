"""Page: a document as one HTML file that needs nothing else, or as Markdown beside PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from learnkv.evaluation import charts, report
from learnkv.evaluation.charts import Style
from learnkv.evaluation.document import Block, Commands, Grid, Points, Section, Strips
from learnkv.evaluation.example import Example, Kept
from learnkv.evaluation.figures import Cells, Figure
from learnkv.evaluation.page_style import STEPS, style_sheet
from learnkv.evaluation.picture import Picture, Shape, stacked, svg_of, tiled


def html(title: str, sections: Sequence[Section], links: Sequence[tuple[str, str]] = ()) -> str:
    """The page; `links` are (address, words) of files beside it."""
    places = [*((f"#{s.name}", s.title) for s in sections), *links]
    nav = "".join(f'<a href="{escape(address)}">{escape(words)}</a>' for address, words in places)
    body = "".join(section_html(section) for section in sections)
    script = f"<script>{STRIPS_SCRIPT}</script>" if any(isinstance(b, Strips) for s in sections for b in s.blocks) else ""
    return whole_page(title, f"<header><h1>{escape(title)}</h1><nav>{nav}</nav></header><main>{body}</main>{script}")


def whole_page(title: str, body: str) -> str:
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    head += f"<title>{escape(title)}</title><style>{style_sheet()}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def section_html(section: Section) -> str:
    return f'<section id="{section.name}"><h2>{escape(section.title)}</h2>{"".join(map(block_html, section.blocks))}</section>'


def block_html(block: Block) -> str:
    if isinstance(block, Figure):
        return figure_html(block)
    if isinstance(block, Grid):
        return grid_html(block)
    if isinstance(block, Strips):
        return strips_html(block.example)
    if isinstance(block, Commands):
        return "".join(f'<pre class="scroll" tabindex="0">{escape(line)}</pre>' for line in block.lines)
    if len(block.sentences) == 1 and not block.warning:
        return f"<p>{escape(block.sentences[0])}</p>"
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in block.sentences)
    return f'<ul class="warning" role="note" aria-label="warnings">{items}</ul>' if block.warning else f"<ul>{items}</ul>"


# ---- figures and tables


def figure_html(figure: Figure) -> str:
    first = figure.shown or len(figure.pictures)
    shown = f"<h3>{escape(figure.title)}</h3>" if figure.title else ""
    shown += pictures_html(figure.name, figure.pictures[:first], "wide" if figure.narrow else "")
    if rest := figure.pictures[first:]:
        shown += folded(f"the other {len(rest)}", pictures_html(f"{figure.name}-more", rest, ""))
    shown += pictures_html(f"{figure.name}-narrow", figure.narrow, "narrow") if figure.narrow else ""
    legend = legend_html(figure.legend, "narrow" if figure.narrow else "") if figure.legend else ""
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>"
    numbers = folded("the numbers", table_html(figure.cells, figure.caption))
    return f'<figure id="figure-{figure.name}">{shown}{legend}{caption}{numbers}</figure>'


def pictures_html(name: str, pictures: Sequence[Picture], kind: str) -> str:
    width = max(picture.width for picture in pictures)
    inside = "".join(f'<div style="max-width:{1.25 * p.width:.0f}px">{p.svg(f"{name}-{i}")}</div>' for i, p in enumerate(pictures))
    return f'<div class="pictures {kind}" style="--w:{width:.0f}px">{inside}</div>'


def legend_html(styles: Sequence[tuple[str, Style]], kind: str) -> str:
    items = "".join(f"<li>{small_svg(charts.swatch(style))}{escape(name)}</li>" for name, style in styles)
    return f'<ul class="legend {kind}">{items}<li>{small_svg([charts.LEVEL])}full cache</li></ul>'


def small_svg(shapes: Sequence[Shape]) -> str:
    """What stands before its name, and says no more than it."""
    return f'<svg viewBox="0 0 40 12" aria-hidden="true">{"".join(map(svg_of, shapes))}</svg>'


def grid_html(grid: Grid) -> str:
    if grid.folded:
        return folded(grid.title, table_html(grid.cells, grid.title))
    heading = f"<h3>{escape(grid.title)}</h3>" if grid.title else ""
    return heading + table_html(grid.cells, grid.title or "facts")


def folded(title: str, inside: str, kind: str = "") -> str:
    return f'<details class="{kind}"><summary>{escape(title)}</summary>{inside}</details>'


def table_html(cells: Cells, name: str) -> str:
    """A table that scrolls in a place of its own; a header of empty cells is left out, and its first column is then the header."""
    header, *rows = cells
    kind = "" if any(header) else ' class="facts"'
    head = f"<thead><tr>{row_html('th scope=col', header)}</tr></thead>" if any(header) else ""
    body = "".join(f"<tr>{row_html(head_of(row[0]), row[:1])}{row_html('td', row[1:])}</tr>" for row in rows)
    place = f'<div class="scroll" tabindex="0" role="region" aria-label="table: {escape(name)}">'
    return f"{place}<table{kind}>{head}<tbody>{body}</tbody></table></div>"


def head_of(name: str) -> str:
    """A name that is longer than a phone has room for may be broken."""
    return "th scope=row class=long" if len(name) > LONG else "th scope=row"


LONG = 20  # characters


def row_html(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag[:2]}>" for cell in cells)


# ---- the text of one prompt


def strips_html(example: Example) -> str:
    scale = "".join(f'<span class="k{i}">{i * 100 // STEPS}%</span>' for i in range(0, STEPS + 1, 2))
    legend = f'<p class="scale">share of all heads that kept a token: {scale} <span class="answer">the answer</span></p>'
    hint = "<p>Point at a token, or go to a text and move with the arrow keys, to read its place and its share.</p>"
    return legend + hint + "".join(strip_html(example, kept) for kept in example.kept) + folded("every token", token_table(example), "long")


def strip_html(example: Example, kept: Kept) -> str:
    start, stop = example.span or (0, 0)
    tokens = [
        token_html(i, text, share, start <= i < stop) for i, (text, share) in enumerate(zip(example.tokens, kept.shares, strict=True))
    ]
    label = f'tabindex="0" role="application" aria-label="text as {escape(kept.line)} left it; arrow keys move over its tokens"'
    return (
        f'<h3>{escape(kept.line)}</h3><div class="strip" {label}>{"".join(tokens)}</div><output class="token" aria-live="polite"></output>'
    )


def token_html(position: int, text: str, share: float, answer: bool) -> str:
    shown = escape(text).replace("\n", "⏎\n")
    return f'<span class="k{round(STEPS * share)}{" answer" if answer else ""}" title="token {position}: {share:.0%}">{shown}</span>'


def token_table(example: Example) -> str:
    rows = [[str(i), repr(text)[1:-1], *(f"{kept.shares[i]:.0%}" for kept in example.kept)] for i, text in enumerate(example.tokens)]
    return table_html([["position", "token", *(kept.line for kept in example.kept)], *rows], "share of heads that kept each token")


# shows the answer first; arrow keys, pointing and touching say a token's place and share
STRIPS_SCRIPT = """
document.querySelectorAll(".strip").forEach(strip => {
  const tokens = strip.children, output = strip.nextElementSibling;
  let at = -1;
  const go = to => {
    if (to < 0 || to >= tokens.length) return;
    if (at >= 0) tokens[at].classList.remove("at");
    at = to;
    tokens[at].classList.add("at");
    output.textContent = tokens[at].title + " of heads: \\u201c" + tokens[at].textContent + "\\u201d";
  };
  strip.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20}[event.key];
    if (step) { go(at < 0 ? 0 : at + step); event.preventDefault(); }
  });
  const pointed = event => { if (event.target !== strip) go([...tokens].indexOf(event.target)); };
  const answer = strip.querySelector(".answer");
  if (answer) strip.scrollTop = answer.offsetTop - strip.offsetTop - strip.clientHeight / 2;
  strip.addEventListener("mouseover", pointed);
  strip.addEventListener("click", pointed);
});
"""


# ---- Markdown and PNG


def markdown(title: str, sections: Sequence[Section], folder: str) -> str:
    """The same as Markdown; PNG files are named in `folder`."""
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [part for block in section.blocks for part in block_markdown(block, folder)]
    return "\n\n".join(parts) + "\n"


def block_markdown(block: Block, folder: str) -> list[str]:
    if isinstance(block, Figure):
        about = block.pictures[0].about.replace("]", ")").replace("[", "(")
        return [
            f"![{block.pictures[0].title}: {about}]({folder}/{block.name}.png)",
            block.caption,
            *folded_markdown("the numbers", block.cells),
        ]
    if isinstance(block, Grid):
        if block.folded:
            return folded_markdown(block.title, block.cells)
        return [*([f"### {block.title}"] if block.title else []), report.markdown(block.cells)]
    if isinstance(block, Commands):
        return ["```\n" + "\n".join(block.lines) + "\n```"]
    if isinstance(block, Points):
        return ["\n".join(f"- {'**' if block.warning else ''}{s}{'**' if block.warning else ''}" for s in block.sentences)]
    return ["Which token each line kept is on the page, `index.html`."]


def folded_markdown(title: str, cells: Cells) -> list[str]:
    return [f"<details><summary>{escape(title)}</summary>", report.markdown(cells), "</details>"]


def save_png(figure: Figure, path: Path) -> None:
    """All pictures of a figure in one file, above what tells their lines apart."""
    whole = tiled(figure.pictures, figure.columns) if len(figure.pictures) > 1 else figure.pictures[0]
    needs = figure.legend and not figure.narrow
    (stacked(whole, charts.legend(figure.legend, whole.width)) if needs else whole).save(path)
