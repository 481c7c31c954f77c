"""Faults that comparisons are known to have had, planted in rows: the report refuses them in one line, or says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from learnkv import config
from learnkv.evaluation import gather
from learnkv.evaluation.rows import Row
from learnkv.evaluation.suspects import suspects
from learnkv.report import ReportCommand, run
from tests.report_parts import GATE, compared, laid


def reported(folder: Path, rows: Iterable[Row], capsys: pytest.CaptureFixture) -> tuple[int, str, str]:
    """Exit status, what was printed, the one line of an error."""
    status = config.main(run, ReportCommand, [f"rows={laid(folder, rows)}"])
    said = capsys.readouterr()
    assert status == 0 or said.err.count("\n") == 1
    return status, said.out, said.err


def page_of(folder: Path) -> str:
    return (folder / "report" / "index.html").read_text()


def test_rows_of_other_weights_in_the_file_are_refused_with_both_hashes(tmp_path, capsys):
    rows = [replace(r, weights_hash="1" * 16) if r.line == "h2o" else r for r in compared()]
    status, _, error = reported(tmp_path, rows, capsys)
    assert (
        status == 2
        and "the rows are of two models" in error
        and "weights 0000000000000000" in error
        and "weights 1111111111111111" in error
    )
    assert not (tmp_path / "report").exists()


def test_another_chat_template_for_one_line_is_refused_by_its_prompts(tmp_path, capsys):
    """A prompt without a template has another id."""
    rows = [replace(r, prompt=f"plain-{r.prompt}") if r.line == "h2o" else r for r in compared()]
    status, _, error = reported(tmp_path, rows, capsys)
    assert status == 2 and "were asked different prompts: 12 and 12 that the other was not" in error


def test_another_chat_template_for_one_line_is_refused_by_its_tokens(tmp_path, capsys):
    """The same prompt with another head has other tokens."""
    rows = [replace(r, num_tokens=121) if r.line == "h2o" else r for r in compared()]
    status, _, error = reported(tmp_path, rows, capsys)
    assert status == 2 and "has 100 tokens for full cache and 121 tokens for h2o: another chat template or tokenizer" in error


def test_another_chat_template_of_as_many_tokens_is_refused_by_their_hash(tmp_path, capsys):
    rows = [replace(r, tokens={"h2o": "0b", "random": ""}.get(r.line, "0a")) for r in compared()]
    status, _, error = reported(tmp_path, rows, capsys)
    assert status == 2 and "has 100 tokens (hash 0a) for full cache and 100 tokens (hash 0b) for h2o" in error


def test_a_method_that_never_evicts_is_named(tmp_path, capsys):
    rows = [replace(r, kept_mean=100.0, kept_max=100) if r.line == "snapkv" else r for r in compared()]
    status, *_ = reported(tmp_path, rows, capsys)
    assert status == 0 and "snapkv at 10%, 50%: every token was kept, so nothing was evicted" in page_of(tmp_path)


def test_a_budget_that_is_not_kept_is_named():
    rows = [replace(r, kept_mean=30.0) if r.line == "h2o" and r.budget == 0.1 else r for r in compared()]
    assert suspects(rows) == ["h2o at 10%: more tokens were kept than the budget holds (pins, or a budget that is not respected)"]


def test_reversed_scores_are_named(tmp_path, capsys):
    """A method that keeps what it should evict does worse than chance."""
    rows = [replace(r, nll=9.0) if r.line == GATE else r for r in compared()]
    status, *_ = reported(tmp_path, rows, capsys)
    assert status == 0 and "kvp+adaptive at 10%, 50%: below random: scores may be reversed" in page_of(tmp_path)


def test_sound_rows_raise_no_suspicion():
    assert suspects(compared()) == []


def test_a_nan_score_is_refused_with_its_line(tmp_path, capsys):
    laid(tmp_path, compared())
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    lines[2] = lines[2].replace('"accuracy": 0.0', '"accuracy": NaN')
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    assert config.main(run, ReportCommand, [f"rows={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "rows.jsonl, line 3: prompt p0, random at budget 0.5: the answer's score is nan; row refused" in error and error.count("\n") == 1


def test_three_prompts_have_no_interval_and_claim_nothing(tmp_path, capsys):
    status, *_ = reported(tmp_path, compared(3), capsys)
    text = page_of(tmp_path)
    assert status == 0 and "3 prompts, fewer than the 10 that an interval needs" in text and "nothing is claimed" in text
    body = text.partition("</style>")[2].partition("<script>")[0]
    assert "0.67 [" not in body and "1.00 [" not in body


def test_a_stopped_comparison_says_what_it_lacks_and_shows_what_all_have(tmp_path, capsys):
    rows = [r for r in compared(14) if not (r.line == "h2o" and r.prompt in ("p12", "p13")) and not (r.line == GATE and r.prompt == "p13")]
    status, out, _ = reported(tmp_path, rows, capsys)
    said = "of 14 questions, h2o at 10% lacks 2; h2o at 50% lacks 2; kvp+adaptive:checkpoints/runs/kvp-seed* at 10% lacks 1"
    assert status == 0 and said in out and said in page_of(tmp_path) and "All figures are of the 12 that every line has" in out


def test_kinds_on_which_the_full_cache_alone_was_run_are_told_apart_from_missing_ones():
    rows = compared() + [replace(r, kind="hard", prompt=f"h{r.prompt}", accuracy=0.0) for r in compared() if r.line == "full cache"]
    found = gather.gathered(rows)
    assert found.rows == compared() and found.notes == ["left out: hard, on which the full cache alone was run and reaches 0.00"]


def test_rows_of_two_protocols_are_never_averaged(tmp_path, capsys):
    rows = compared() + [replace(r, question_in_prefix=True, accuracy=0.0) for r in compared()]
    status, out, _ = reported(tmp_path, rows, capsys)
    pages = sorted(path.parent.name for path in (tmp_path / "report").glob("*/index.html"))
    assert status == 0 and "2 protocols" in out
    assert pages == ["inside-float32-one-shot-4-16-heldout", "outside-float32-one-shot-4-16-heldout"]
    assert len(list((tmp_path / "report").glob("*/tensorboard/snapkv/events*"))) == 2


def test_a_measurement_that_two_folders_hold_counts_once(tmp_path):
    paths = [laid(tmp_path / name, compared()) for name in ("a", "b")]
    assert gather.rows_of(paths) == compared()


@pytest.mark.parametrize("content", [None, ""])
def test_no_rows_are_one_line(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content)
    assert config.main(run, ReportCommand, [f"rows={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "learnkv.evaluate" in error
