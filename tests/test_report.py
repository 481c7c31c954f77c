"""Rows, the file they lie in, the choice on a development split, and the tables and plot made of them."""

import math
from dataclasses import astuple, replace

import pytest

from learnkv.budgets import Ratio
from learnkv.evaluation import report
from learnkv.evaluation.choice import choose_best
from learnkv.evaluation.rows import RowFile, budget_of, read_rows
from tests.comparison_parts import full_row, row


def compared(prompts=12):
    """Two methods and the full cache on prompts of two kinds."""
    rows = []
    for i in range(prompts):
        shared = {"prompt": f"p{i}", "kind": "codes" if i % 2 else "people"}
        rows.append(full_row(**shared, nll=0.1))
        for budget in (0.1, 0.5):
            rows.append(row(**shared, budget=budget, kept_mean=100 * budget, accuracy=float(i % 2), nll=1.0 + i))
            rows.append(row(**shared, budget=budget, kept_mean=100 * budget, line="h2o", method="h2o", scorer="h2o", nll=2.0 + i))
    return rows


# ---- rows


def test_key_depends_on_what_decides_the_figures_only():
    assert row().key == row(line="chosen", run="elsewhere", accuracy=0.0).key
    changes = [{"prompt": "p1"}, {"question": 1}, {"method": "snapkv+adaptive"}, {"gate": "f"}, {"budget": 0.2}, {"budget_form": "tokens"}]
    changes += [
        {"num_sinks": 0},
        {"dtype": "bfloat16"},
        {"weights_hash": "1"},
        {"rope": "1"},
        {"prefill": "chunked"},
        {"question_in_prefix": True},
    ]
    assert len({row(**change).key for change in changes} | {row().key}) == len(changes) + 1


def test_rows_come_back_as_they_were_written(tmp_path):
    file = RowFile(tmp_path / "deep" / "rows.jsonl")
    for written in compared():
        file.append(written)
    assert read_rows(file.path) == compared()
    path = file.path
    del file
    assert list(RowFile(path).done.values()) == compared()


def test_two_do_not_write_into_one_file_at_once(tmp_path):
    first = RowFile(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="another process is writing rows to"):
        RowFile(first.path)
    first.append(row())
    assert len(read_rows(first.path)) == 1


@pytest.mark.parametrize("torn", [b'{"key": "0', b"", b'{"key": "\xff'])
def test_torn_last_line_is_dropped_and_the_file_goes_on(tmp_path, torn):
    path = tmp_path / "rows.jsonl"
    RowFile(path).append(row())
    path.write_bytes(path.read_bytes() + torn)
    RowFile(path).append(row(prompt="p1"))
    assert [r.prompt for r in read_rows(path)] == ["p0", "p1"]


@pytest.mark.parametrize("foreign", [b'{"precious": "data"}', b"notes", b"{}"])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path, foreign):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(foreign)
    with pytest.raises(ValueError, match="is no row of a comparison"):
        RowFile(path)
    assert path.read_bytes() == foreign


def test_an_edited_figure_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    RowFile(path).append(row(nll=0.5))
    path.write_text(path.read_text().replace('"nll": 0.5', '"nll": 0.1'))
    with pytest.raises(ValueError, match="line 1: its figures do not fit its checksum"):
        read_rows(path)


def test_broken_line_inside_the_file_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    for prompt in ("p0", "p1"):
        RowFile(path).append(row(prompt=prompt))
    whole = path.read_text()
    edited = [whole.replace('"prompt": "p0"', '"prompt": "p7"'), whole.replace('"nll"', '"loss"')]
    edited += [whole.replace('"accuracy": 1.0', '"accuracy": "1.0"'), whole.replace('"kept_max": ', '"kept_max": null, "x": ')]
    for broken in (*edited, "[]\n" + whole, "{}\n" + whole, "?\n" + whole):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"line [12]"):
            RowFile(path)
        assert path.read_text() == broken


def test_nan_is_refused_where_the_row_is_made():
    with pytest.raises(ValueError, match=r"prompt p0, snapkv at budget 0\.1: the answer's NLL is nan"):
        row(nll=math.nan)


def test_budget_below_one_is_a_ratio_and_else_tokens():
    assert (budget_of(0.1), budget_of(64.0)) == (Ratio(0.1), 64)
    for value in (0, -1, 1.5, -0.5):
        with pytest.raises(ValueError, match="neither"):
            budget_of(value)


# ---- choice


def test_choice_takes_accuracy_first_then_nll():
    def tried(method, accuracy, nll, scorer="snapkv", **more):
        return [row(split="dev", prompt=p, method=method, scorer=scorer, accuracy=accuracy, nll=nll, **more) for p in ("p0", "p1")]

    rows = tried("snapkv", 0.0, 0.1) + tried("snapkv+adaptive", 1.0, 0.9) + tried("snapkv(kernel_size=3)", 1.0, 0.8)
    rows += tried("h2o", 1.0, 0.5, scorer="h2o") + tried("oracle", 1.0, 0.0, scorer="oracle")
    rows += tried("kvp", 1.0, 0.0, scorer="kvp", gate="f")
    assert choose_best(rows, 0.1) == {"h2o": "h2o", "snapkv": "snapkv(kernel_size=3)"}
    assert next(iter(choose_best(rows, 0.1))) == "h2o"


def test_choice_refuses_unfinished_or_missing_runs():
    rows = [row(split="dev"), row(split="dev", prompt="p1"), row(split="dev", method="h2o", scorer="h2o")]
    with pytest.raises(ValueError, match="h2o was run on 1 questions and snapkv on 2"):
        choose_best(rows, 0.1)
    with pytest.raises(ValueError, match=r"no heuristic was run at budget 0.3 .* \(budgets there: 0.1\)"):
        choose_best(rows, 0.3)


def test_choosing_by_held_out_rows_is_refused():
    with pytest.raises(ValueError, match="heldout split, which must choose nothing"):
        choose_best([row()], 0.1)


# ---- summaries


def test_summary_holds_the_means_and_the_paired_ratio():
    (full, snapkv, *_) = report.summarise(compared())
    assert (full.line, full.accuracy.value, full.nll.value) == ("full cache", 1.0, pytest.approx(0.1))
    assert (snapkv.line, snapkv.budget, snapkv.accuracy.value, snapkv.nll.value) == ("snapkv", 0.1, 0.5, 6.5)
    assert snapkv.ratio.value == 0.5 and snapkv.ratio.low <= 0.5 <= snapkv.ratio.high


def test_questions_of_a_prompt_count_as_one_prompt():
    rows = [row(question=0, accuracy=1.0), row(question=1, accuracy=0.0), row(prompt="p1", accuracy=1.0)]
    (found,) = report.summarise(rows)
    assert found.accuracy.value == 0.75 and found.prompts == 2


def test_training_runs_share_a_line():
    prompts = [f"p{i}" for i in range(10)]
    rows = [full_row(prompt=p) for p in prompts]
    rows += [row(line="kvp:runs/*", gate=g, run=g, prompt=p, accuracy=float(g == "a")) for g in ("a", "b") for p in prompts]
    found = report.summarise(rows)[1]
    assert (found.runs, found.accuracy.value) == (2, 0.5) and found.accuracy.high > found.accuracy.low
    assert "kvp:runs/* (2 runs)" in report.text_table(report.summarise(rows))


def test_kinds_are_summarised_on_their_own():
    found = {s.line: s for s in report.summarise(compared(), kind="codes")}
    assert found["snapkv"].accuracy.value == 1.0 and found["snapkv"].prompts == 6


def test_unfinished_line_is_refused():
    with pytest.raises(ValueError, match=r"h2o at budget 0\.5 lacks 1 of 12 prompts"):
        report.summarise(compared()[:-1])


def test_full_cache_that_answers_nothing_leaves_the_ratio_open():
    rows = [replace(r, accuracy=0.0) for r in compared()]
    assert all(s.ratio is None for s in report.summarise(rows))
    assert "%" in report.text_table(report.summarise(rows))


@pytest.mark.parametrize("prompts", [1, 9])
def test_fewer_than_ten_prompts_give_figures_without_bounds_and_the_reason(prompts):
    table = report.text_table(report.summarise(compared(prompts)))
    assert "[" not in table and "1.00" in table
    assert f"no intervals: {prompts} prompt" in report.protocol(compared(prompts)) and "bootstrap" not in report.protocol(compared(prompts))
    found = report.difference(compared(prompts), "h2o", "snapkv", 0.1)
    assert found.value == 1.0 and math.isnan(found.low) and math.isnan(found.high) and report.verdict(found) == ""


def test_paired_difference_of_nll_between_lines():
    assert astuple(report.difference(compared(), "h2o", "snapkv", 0.1)) == pytest.approx((1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match=r"no rows of both lines 'kvp' and 'snapkv' at budget 0\.1"):
        report.difference(compared(), "kvp", "snapkv", 0.1)


def test_paired_difference_over_all_budgets_is_that_of_the_means():
    rows = [replace(r, nll=r.nll + 1) if r.line == "h2o" and r.budget == 0.5 else r for r in compared()]
    assert astuple(report.difference(rows, "h2o", "snapkv")) == pytest.approx((1.5, 1.5, 1.5))
    rest = [r for r in rows if not (r.line == "snapkv" and r.budget == 0.5)]
    assert astuple(report.difference(rest, "h2o", "snapkv")) == pytest.approx((1.0, 1.0, 1.0)), "only what both were run at"


def test_gaps_hold_accuracy_and_nll_at_each_budget_and_over_all_and_name_what_is_significant():
    rows = [replace(r, accuracy=0.0) if r.line == "snapkv" else r for r in compared()]
    header, snapkv = report.gaps(rows, "h2o", ["snapkv"])
    assert header[0] == "h2o minus" and header[1:] == [f"{b} {f}" for b in ("50%", "10%", "all budgets") for f in ("accuracy", "NLL")]
    assert snapkv == ["snapkv", *["1.00 [1.00, 1.00] ahead", "1.00 [1.00, 1.00] behind"] * 3]
    rest = [r for r in rows if not (r.line == "snapkv" and r.budget == 0.5)]
    assert report.gaps(rest, "h2o", ["snapkv"])[1][1:3] == ["", ""]


def test_an_interval_that_holds_zero_says_nothing():
    gains = [report.Interval(0.1, 0.01, 0.2), report.Interval(0.1, -0.1, 0.2), report.Interval(-0.1, -0.2, -0.01)]
    assert [report.verdict(gain) for gain in gains] == [" ahead", "", " behind"]


# ---- tables and plot


def test_text_table_has_a_line_per_method_and_a_group_of_columns_per_budget():
    lines = report.text_table(report.summarise(compared())).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["method", "full cache", "snapkv", "h2o"]
    assert lines[0].split()[1:4] == ["50%", "accuracy", "50%"]
    assert "0.25 s (50%)" in lines[2] and "6.50" in lines[2] and "50% [" in lines[2]


def test_markdown_table_is_rectangular():
    lines = report.markdown_table(report.summarise(compared())).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and set(lines[1]) == set("|- ")


def test_marks_are_the_last_column_of_their_budget():
    header, full, snapkv, h2o = report.table(report.summarise(compared()), {("snapkv", 0.1): "no worse"})
    assert header[-2:] == ["10% claim", "extra time"] and header.count("50% claim") == 1
    assert (snapkv[-2], h2o[-2], full[-2]) == ("no worse", "", "") and snapkv[header.index("50% claim")] == ""


def test_a_method_missing_at_a_budget_leaves_its_cells_empty():
    rows = [r for r in compared() if not (r.line == "h2o" and r.budget == 0.5)]
    assert len(report.markdown_table(report.summarise(rows)).splitlines()) == 5


def test_what_a_budget_leaves_beside_the_protected_is_a_column():
    rows = [row(prompt=f"p{i}", num_tokens=n, budget=0.05, num_sinks=4, num_recent=16) for i, n in enumerate((399, 400, 500))]
    assert [r.free for r in rows] == [0, 0, 5] and row(budget=64.0, budget_form="tokens").free == 44
    assert row(budget=640.0, budget_form="tokens").free == 80, "no more than the context has"
    (found,) = report.summarise(rows)
    assert found.free == pytest.approx(5 / 3)
    header, line = report.table([found])
    assert line[header.index("5% free")] == "2"


def test_token_budgets_show_as_tokens():
    rows = [replace(r, budget=64.0, budget_form="tokens") for r in compared() if r.budget == 0.5]
    assert "64 accuracy" in report.text_table(report.summarise(rows))


def test_protocol_says_what_flips_rankings():
    said = report.protocol(compared())
    for part in ("12 prompts", "codes", "heldout", "one-shot without the question", "first 4 and last 16", "tiny in float32"):
        assert part in said


@pytest.mark.parametrize("span", [0.75, None])
def test_plot_is_a_png(tmp_path, span):
    report.plot(report.summarise([replace(r, span_kept=span) for r in compared()]), tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
