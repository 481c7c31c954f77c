"""What a comparison leaves beside its rows comes back as it was, and says the same whenever it was run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from learnkv.evaluation import history
from learnkv.evaluation.claims import Primary
from learnkv.evaluation.trained import Trained
from learnkv.places import PROMPTS, RUN
from tests.comparison_parts import short_prompt
from tests.report_parts import asked

GATES = {"kvp:runs/*": [Trained(12, 3.5, False, ("codes",)), Trained(12, None, True, ())]}


def remembered(folder: Path, command: str = "recipe=compare", prompts=(0, 1)) -> Path:
    history.remember(
        folder, history.entry(command, GATES, {"known": ["codes"]}, Primary(["kvp:runs/*"])), [short_prompt(i, 2) for i in prompts]
    )
    return folder


def test_runs_come_back_with_their_gates_and_groups(tmp_path):
    (found,) = history.entries_in(remembered(tmp_path / "deep"))
    assert (found.command, found.groups, found.primary["methods"]) == (
        "recipe=compare",
        {"known": ["codes"]},
        ["kvp:runs/*"],
    ) and history.gates_in([found]) == GATES


def test_the_same_run_twice_is_one_entry_and_another_is_added(tmp_path):
    first = (remembered(tmp_path) / RUN).read_text()
    assert (remembered(tmp_path) / RUN).read_text() == first
    assert [e.command for e in history.entries_in(remembered(tmp_path, "recipe=other"))] == ["recipe=compare", "recipe=other"]


def test_prompts_come_back_by_id_and_those_of_earlier_runs_stay(tmp_path):
    remembered(tmp_path)
    history.remember(tmp_path, history.Entry("more"), [asked(3), replace(short_prompt(5), pins=((0, 4),))])
    made = [short_prompt(0, 2), short_prompt(1, 2), asked(3), replace(short_prompt(5), pins=((0, 4),))]
    assert history.prompts_in(tmp_path) == {prompt.id: prompt for prompt in made}


def test_a_folder_without_them_has_none(tmp_path):
    assert history.entries_in(tmp_path) == [] and history.prompts_in(tmp_path) == {}


@pytest.mark.parametrize("content", ["", "{}", '[{"command": 3}]', '[{"what": "x"}]'])
def test_a_broken_run_file_is_one_line_that_says_what_to_do(tmp_path, content):
    (tmp_path / RUN).write_text(content)
    with pytest.raises(ValueError, match="delete it, the rows do without"):
        history.entries_in(tmp_path)


def test_an_edited_prompt_is_refused_with_its_line(tmp_path):
    path = remembered(tmp_path) / PROMPTS
    path.write_text(path.read_text().replace("Prose number 1", "Prose number 2"))
    with pytest.raises(ValueError, match="line 2: its text does not fit its id"):
        history.prompts_in(tmp_path)
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1 is no prompt of a comparison"):
        history.prompts_in(tmp_path)
