"""The blind sheet: whose an answer is stands in the key alone, and a tally takes no sheet but its own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from learnkv.evaluation import sheet_page
from learnkv.evaluation.report import FULL
from learnkv.evaluation.sheet import key_file, sheet, tally
from tests.report_parts import asked, compared, needles

PROMPTS = {prompt.id: prompt for prompt in map(asked, range(12))}


def made(count: int = 30, seed: int = 0):
    found = sheet(needles(), "random", 0.1, PROMPTS, count=count, seed=seed)
    assert found
    return found


def answered(folder: Path, choose, **changes) -> Path:
    """Choices to a sheet whose key lies in the folder: `choose` says what for which item."""
    found = made()
    found.save_key(folder)
    path = folder / "answers.json"
    answers = {str(i): choose(item) for i, item in enumerate(found.items, 1)}
    path.write_text(json.dumps({"sheet": found.hash, "answers": answers} | changes))
    return path


def full(item) -> str:
    return "A" if item.first == FULL else "B"


def other(item) -> str:
    return "B" if item.first == FULL else "A"


def test_same_seed_gives_the_same_sheet_and_both_orders_occur():
    assert made() == made() and made().hash != made(seed=1).hash
    assert {item.first for item in made().items} == {FULL, "random"}


def test_pairs_of_equal_texts_are_counted_and_not_shown():
    found = sheet(needles(), "snapkv", 0.1, PROMPTS, count=30, seed=0)
    assert found and found.same == 6 and len(found.items) == 6 and all(item.a != item.b for item in found.items)


def test_rows_without_answers_make_no_sheet():
    assert sheet(compared(), "snapkv", 0.1, {}, count=30, seed=0) is None


def test_nothing_on_the_page_says_whose_an_answer_is():
    text = sheet_page.html(made())
    turned = replace(made(), items=[replace(item, first="random" if item.first == FULL else FULL) for item in made().items])
    assert text == sheet_page.html(turned) and FULL not in re.sub(r"<p>.*?</p>", "", text) and "snapkv" not in text
    assert "Which &lt;number&gt;? It is" in text and text.count("<fieldset>") == 12


def test_references_are_hidden_until_all_is_judged():
    text = sheet_page.html(made())
    assert text.count('<p class="reference" hidden>Right answer: 10') == 12


def test_a_tally_unblinds_and_tests(tmp_path):
    lost = tally(answered(tmp_path, full), tmp_path)
    assert (lost.wins, lost.ties, lost.losses, lost.open) == (0, 0, 12, 0) and lost.p == pytest.approx(2 * 0.5**12)
    won = tally(answered(tmp_path, other), tmp_path)
    assert (won.wins, won.losses) == (
        12,
        0,
    ) and "random at 10% against the full cache: 12 wins, 0 ties, 0 losses, sign test p = 0.000" in won.said()
    tied = tally(answered(tmp_path, lambda _: "tie"), tmp_path)
    assert tied.ties == 12 and tied.p == 1.0


def test_items_that_were_not_judged_are_counted(tmp_path):
    path = answered(tmp_path, full)
    told = json.loads(path.read_text())
    del told["answers"]["3"]
    path.write_text(json.dumps(told))
    assert tally(path, tmp_path).open == 1 and "1 not judged" in tally(path, tmp_path).said()


def test_answers_of_another_sheet_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"whose key is not in .* \(keys there: sheet-[0-9a-f]{16}.key.json\)"):
        tally(answered(tmp_path, full, sheet="0" * 16), tmp_path)


@pytest.mark.parametrize("answers", [{"1": "C"}, {"99": "A"}, ["A"], None])
def test_other_answers_than_a_sheet_has_are_refused(tmp_path, answers):
    with pytest.raises(ValueError, match="holds other answers than A, B, tie"):
        tally(answered(tmp_path, full, answers=answers), tmp_path)


def test_an_edited_key_is_refused(tmp_path):
    path = answered(tmp_path, full)
    key = key_file(tmp_path, made().hash)
    key.write_text(key.read_text().replace(" No.", " Yes.").replace("No.", "Yes."))
    with pytest.raises(ValueError, match="was edited: its items have the hash"):
        tally(path, tmp_path)
    key.write_text("{}")
    with pytest.raises(ValueError, match="is no key of a sheet"):
        tally(path, tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_file_that_holds_no_answers_is_refused(tmp_path, content):
    (tmp_path / "answers.json").write_text(content)
    with pytest.raises(ValueError, match="answers of a sheet"):
        tally(tmp_path / "answers.json", tmp_path)
