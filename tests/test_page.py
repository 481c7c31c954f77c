"""The page of a comparison: what it says first, its figures with their numbers, and files that need nothing else."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from learnkv.evaluation import charts, document, figures, page, picture
from learnkv.evaluation.claims import Primary
from learnkv.evaluation.document import Extras
from learnkv.evaluation.figures import Figure
from learnkv.evaluation.history import Entry
from learnkv.evaluation.picture import COLORS, Label, Picture, contrast, ink_on, shade
from learnkv.evaluation.report import FULL, Interval
from learnkv.evaluation.view import view
from tests.report_parts import GATE, compared, example, needles

EXTRAS = Extras([], [Entry("recipe=compare evaluate.count=12")], "python -m learnkv.report rows=here")


VOID = ("meta", "link", "input")  # tags without an end


class Outline(HTMLParser):
    """Tags that were left open, addresses that are asked for, and pictures without words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.silent = self.figures = self.tables_in_figures = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self.ids += [given["id"] or ""] if "id" in given else []
        self.silent += tag in ("svg", "img") and not ({"aria-labelledby", "aria-hidden", "alt"} & set(given))
        self.figures += tag == "figure"
        self.tables_in_figures += tag == "table" and "figure" in self.open
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> in {self.open}"
        self.open.pop()


@pytest.fixture(scope="module")
def sections():
    return document.sections(view(compared()), replace(EXTRAS, example=example(), notes=["a note < of ours"]))


@pytest.fixture(scope="module")
def text(sections):
    return page.html("Title <&>", sections, [("sheet.html", "Blind sheet")])


# ---- the page


def test_page_is_well_formed_and_asks_for_nothing_outside(text):
    found = Outline(text)
    assert not found.open and len(set(found.ids)) == len(found.ids)
    assert all(address.startswith(("#", "data:,")) or address == "sheet.html" for address in found.addresses)
    assert not re.search(r"https?://|@import|url\(", text)


def test_every_figure_has_words_and_a_table_of_its_numbers(text):
    found = Outline(text)
    assert found.figures >= 4 and found.tables_in_figures == found.figures and not found.silent


def test_text_of_rows_is_escaped(text):
    assert "Title &lt;&amp;&gt;" in text and "a note &lt; of ours" in text and " &lt;7&gt;" in text and "<7>" not in text


def test_first_lines_say_model_prompts_protocol_and_what_they_cannot_show(sections):
    told = page.markdown("T", sections[:1], "figures")
    for part in (
        "weights 0000000000000000, float32",
        "12, split heldout, contexts of 100 to 100",
        "codes (6), people (6)",
        "before the question is known",
    ):
        assert part in told
    for part in (
        "first 4 and last 16",
        "another model may rank",
        "texts made from templates",
        "nothing is said of longer ones",
        "small groups",
    ):
        assert part in told


def test_size_of_the_model_is_read_from_its_name():
    found = dict(document.limits_of(view([replace(r, model="smollm2-135m") for r in compared()])))
    assert "135 million parameters" in found["one model"]


def test_few_prompts_are_said_to_have_no_intervals():
    found = dict(document.limits_of(view(compared(4))))
    assert "4 prompts, fewer than the 10" in found["no intervals"]


def test_kinds_that_the_full_cache_cannot_do_are_named():
    rows = [replace(r, accuracy=0.0) if r.kind == "people" else r for r in compared()]
    assert "people (0.00)" in dict(document.limits_of(view(rows)))["what the model cannot do"]


def test_in_short_has_the_best_gate_and_the_best_heuristic_at_every_budget():
    header, half, tenth = document.in_short(view(compared()), Primary())
    assert header == ["budget", "full cache", "best gate", "best heuristic", "random"]
    assert (half[0], tenth[0]) == ("50%", "10%") and half[2].startswith("kvp+adaptive 0.") and half[3].startswith("snapkv 0.")


def test_commands_that_made_rows_and_report_are_on_the_page(text):
    assert "python -m learnkv.evaluate recipe=compare evaluate.count=12  # learnkv" in text and "python -m learnkv.report rows=here" in text


def test_the_declared_endpoint_has_its_table_under_the_lines_short_name():
    entry = Entry("recipe=compare", primary={"methods": [GATE], "budget": 0.1, "metric": "accuracy", "group": ""})
    (first, *_) = document.all_tables(view(compared()), [entry])
    assert isinstance(first, document.Grid) and first.title == "primary endpoint: accuracy, 10%, all prompts"
    assert [row[0] for row in first.cells] == ["method", "kvp+adaptive"]
    (first, *_) = document.all_tables(view(compared()), [replace(entry, primary=entry.primary | {"methods": ["gone"]})])
    assert isinstance(first, document.Grid) and first.title == "all kinds"


def test_rows_without_a_run_file_are_said_to_have_none():
    assert "No run.json" in page.html("T", document.sections(view(compared()), replace(EXTRAS, entries=[])))


def test_markdown_tables_are_rectangular_and_name_the_figures(sections):
    told = page.markdown("T", sections, "figures")
    assert "(figures/curves.png)" in told and "(figures/costs.png)" in told and told.startswith("# T\n")
    for block in re.findall(r"(?:^\|.*\|\n)+", told, re.MULTILINE):
        assert len({line.replace(r"\|", "").count("|") for line in block.splitlines()}) == 1


# ---- figures


def test_curves_hold_every_line_and_its_numbers_are_in_the_table():
    found = figures.overall(view(compared()))
    names = [shape.text for shape in found.pictures[0].shapes if isinstance(shape, Label)]
    assert {"kvp+adaptive", "snapkv", "h2o", "random", FULL} <= set(names)
    assert [row[0] for row in found.cells] == ["line", FULL, "kvp+adaptive", "snapkv", "random", "h2o"]
    assert found.cells[2][1:3] == ["50", "0.92 [0.75, 1.00]"] and found.cells[1][1:3] == ["100", "1.00 [1.00, 1.00]"]


def test_gates_and_the_best_heuristic_stand_in_front_unless_others_are_named():
    assert list(view(compared()).styles) == ["kvp+adaptive", "snapkv"]
    assert list(view(compared(), ["h2o", GATE]).styles) == ["h2o", "kvp+adaptive"]
    with pytest.raises(ValueError, match="unknown line 'h20'; nearest: h2o"):
        view(compared(), ["h20"])


def test_lines_in_front_differ_in_color_dashes_and_marker():
    for part in ("color", "dash", "mark"):
        assert len({getattr(style, part) for style in charts.STYLES}) == len(charts.STYLES)


def test_lines_of_one_method_from_two_folders_keep_their_folders_apart():
    rows = compared() + [replace(r, line="kvp+adaptive:elsewhere/other", gate="e" * 16) for r in compared() if r.line == GATE]
    assert {"kvp+adaptive (kvp-seed*)", "kvp+adaptive (other)"} <= set(view(rows).lines)


def test_budget_that_is_not_among_the_rows_is_refused():
    assert view(compared()).budget == 0.1 and view(compared(), budget=0.5).budget == 0.5
    with pytest.raises(ValueError, match=r"budget=0.2 is not among the rows; there are 0.1, 0.5"):
        view(compared(), budget=0.2)


def test_a_panel_per_kind_and_none_where_there_is_one():
    assert [p.title for p in figures.by_topic(view(compared())).pictures] == ["codes (6)", "people (6)"]  # type: ignore[union-attr]
    assert figures.by_topic(view(compared(kinds=("codes",)))) is None


def test_needles_are_a_map_of_length_and_depth_with_the_full_cache_first():
    (found,) = figures.needles(view(needles()))
    assert [p.title for p in found.pictures] == [FULL, "snapkv", "random"] and found.name == "needle-10pc"
    assert found.cells[0] == ["line", "depth", "500 tokens", "1000 tokens"] and [row[1] for row in found.cells[1:4]] == ["0", "50", "100"]
    assert {row[0]: row[2] for row in found.cells[1:]}[FULL] == "100%" and len(found.cells) == 1 + 3 * 3
    numbers = [shape.text for shape in found.pictures[1].shapes if isinstance(shape, Label)]
    assert numbers.count("100") + numbers.count("50") + numbers.count("0") >= 6
    assert figures.needles(view(compared())) == []


def test_retention_maps_hold_every_layer_and_head():
    found = figures.retention(example())
    assert len(found.pictures) == 2 and found.cells[3] == [GATE, "0", "20%", "40%", "10%"]
    tips = [shape.tip for shape in found.pictures[1].shapes if isinstance(shape, picture.Area)]
    assert "KV head 1, layer 2: 70%" in tips and len(tips) == 6


def test_costs_show_bytes_at_one_budget_and_time(sections):
    (found,) = [b for s in sections for b in s.blocks if isinstance(b, Figure) and b.name == "costs"]
    assert "1.0 KiB" in [s.text for s in found.pictures[0].shapes if isinstance(s, Label)]
    assert [row[2] for row in found.cells if row[:2] == ["snapkv", "10%"]] == ["1,000"]


def test_tokens_stand_in_a_strip_with_their_place_and_share(text):
    assert '<span class="k8 answer" title="token 2: 75%"> is</span>' in text and '<span class="k2 answer" title="token 3: 25%">' in text
    assert text.count('class="strip"') == 2 and "⏎" in text


def test_what_was_kept_of_the_answer_is_a_number_too():
    cells = document.kept_cells(example())
    assert cells[1] == ["snapkv", "12%", "40%", "20%", "20%"] and cells[2][1] == "50%"


# ---- drawing


def test_labels_are_moved_apart_in_their_order_and_not_below_the_frame():
    places = charts.apart([10, 11, 12, 80], 13, 90)
    assert all(b - a >= 13 - 1e-9 for a, b in pairwise(places)) and places[1] == pytest.approx(11)
    assert max(charts.apart([100, 100, 100], 13, 101)) <= 101


def test_ticks_are_few_and_round():
    assert charts.ticks(0, 0.7) == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7] or len(charts.ticks(0, 0.7)) <= 8
    for low, high in ((0, 1.02), (0, 1200), (-16.2, -1.4)):
        assert 3 <= len(charts.ticks(low, high)) <= 8


def test_figures_without_bounds_are_drawn_without_intervals():
    style = charts.STYLES[0]
    known, unknown = (charts.Series("a", ((10, Interval(0.5, bound, bound)),), style) for bound in (0.4, math.nan))
    frame = charts.Frame(0, 0, 100, 100, (5, 0), (20, 1), log=True)
    assert len(charts.bounds(frame, known, 0)) == 1 and not charts.bounds(frame, unknown, 0)


def test_colors_read_on_their_ground_and_shades_grow_darker():
    for name, (light, dark) in COLORS.items():
        if name not in ("grid", "grey", "paper"):
            assert contrast(light, "#ffffff") >= 4.5 and contrast(dark, COLORS["paper"][1]) >= 4.5, name
    steps = [shade(i / 20) for i in range(21)]
    assert all(contrast(ink_on(color), color) >= 4.5 for color in steps)
    assert sorted(steps, key=picture.luminance, reverse=True) == steps


def test_a_picture_is_a_png_and_an_svg_of_the_same_shapes(tmp_path: Path):
    shapes = (picture.box(0, 0, 10, 5, "c0", "a <box>"), picture.Stroke(((0, 0), (9, 9)), "ink", 1, (3, 2)), Label(2, 8, "$5 & more"))
    made = Picture(40, 20, "A title", "About it", shapes)
    made.save(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    svg = made.svg("x")
    assert (
        "<title>a &lt;box&gt;</title>" in svg and "$5 &amp; more" in svg and 'id="x-d">About it' in svg and 'stroke-dasharray="3 2"' in svg
    )
