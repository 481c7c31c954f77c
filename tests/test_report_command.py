"""python -m learnkv.report: what it writes and where, with a model for what rows do not hold, and what it says to mistakes."""

from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from learnkv import config, evaluate
from learnkv.evaluation import example, figures, history
from learnkv.evaluation.contenders import contenders_of
from learnkv.evaluation.report import FULL
from learnkv.evaluation.rows import read_rows
from learnkv.evaluation.view import view
from learnkv.places import EXAMPLE, PROMPTS, ROWS, RUN
from learnkv.report import ReportCommand, run
from tests import browser
from tests.comparison_parts import full_row, letter_tokenizer, short_prompt, tiny_model
from tests.report_parts import GATE, asked, compared, laid, needles
from tests.report_parts import example as kept_example


def report(*arguments: str) -> int:
    return config.main(run, ReportCommand, arguments, words=("rows",))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder of needles with their prompts, an example and a report."""
    folder = laid(tmp_path_factory.mktemp("made") / "needles", needles())
    history.remember(folder, history.Entry("recipe=compare"), map(asked, range(12)))
    kept_example().save(folder / EXAMPLE)
    assert report(str(folder)) == 0
    return folder


def test_page_markdown_pictures_sheet_and_key_lie_beside_the_rows(made):
    names = {path.name for path in (made / "report").iterdir()}
    assert names - {name for name in names if name.endswith(".key.json")} == {"index.html", "report.md", "figures", "sheet.html"}
    assert len(list((made / "report").glob("sheet-*.key.json"))) == 1
    pictures = {path.stem for path in (made / "report" / "figures").glob("*.png")}
    assert pictures == {"curves", "needle-10pc", "costs", "retention"}
    told = (made / "report" / "report.md").read_text()
    assert all(f"figures/{name}.png" in told for name in pictures)


def test_the_same_rows_give_the_same_page(made, tmp_path, capsys):
    first = (made / "report" / "index.html").read_bytes()
    assert report(str(made)) == 0 and (made / "report" / "index.html").read_bytes() == first
    assert f"page: {made}/report/index.html" in capsys.readouterr().out


def test_tensorboard_has_a_run_per_line_figures_and_tables(made):
    log = EventAccumulator(str(made / "tensorboard" / "snapkv")).Reload()
    (point,) = log.Scalars("accuracy/all")
    assert (point.step, point.value) == (75, 0.5)
    assert {"nll/all", "bytes_held/all", "extra_seconds/all"} <= {*log.Tags()["scalars"]}
    whole = EventAccumulator(str(made / "tensorboard" / "report")).Reload()
    assert "curves" in whole.Tags()["images"] and any("In short" in tag for tag in whole.Tags()["tensors"])
    assert len(list((made / "tensorboard" / "snapkv").iterdir())) == 1, "a second report takes the place of the first"


def test_a_judges_choices_are_tallied(made, tmp_path, capsys):
    (key,) = (made / "report").glob("sheet-*.key.json")
    told = json.loads(key.read_text())
    answers = {str(i): "A" if item["first"] == FULL else "B" for i, item in enumerate(told["items"], 1)}
    (tmp_path / "answers.json").write_text(json.dumps({"sheet": told["sheet"], "answers": answers}))
    capsys.readouterr()
    assert report(str(made), f"tally={tmp_path / 'answers.json'}") == 0
    assert capsys.readouterr().out.startswith(
        "snapkv at 10% against the full cache: 0 wins, 0 ties, 6 losses, sign test p = 0.031; 6 pairs"
    )


def test_a_packed_file_of_rows_is_read_as_it_is(tmp_path):
    folder = laid(tmp_path / "whole", compared())
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress((folder / ROWS).read_bytes()))
    assert read_rows(packed) == compared()
    assert report(f"rows={packed}", f"out={tmp_path / 'page'}") == 0 and (tmp_path / "page" / "index.html").exists()
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is truncated or no gzip file"):
        read_rows(packed)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["front=[snapvk]"], "unknown line 'snapvk'; nearest: snapkv"),
        (["budget=0.3"], "budget=0.3 is not among the rows"),
        (["rows=[]"], "rows= is empty"),
        (["tally=nowhere.json"], "nowhere.json can't be read as the answers of a sheet"),
        (["sheet.line=nothing"], "unknown line 'nothing'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(tmp_path, arguments, said, capsys):
    laid(tmp_path, compared())
    assert report(f"rows={tmp_path}", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error


def test_arguments_of_the_command_give_it_again():
    given = ReportCommand(rows=["a", "b c"], budget=0.2, examples=["snapkv"])
    assert config.load(shlex.split(config.arguments(given)), ReportCommand) == given


# ---- with a model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model, three prompts, and a comparison on them."""
    made = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(made / "model")
    letter_tokenizer().save_pretrained(made / "model")
    questions = [(short_prompt(i).context, short_prompt(i).questions[0]) for i in range(3)]
    records = [{"context": context, "question": q.text, "answer": q.answer, "answer_prefix": q.prefix} for context, q in questions]
    (made / "mine.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    fixed = [f"model={made / 'model'}", f"prompts={made / 'mine.jsonl'}", f"evaluate.out={made / 'out'}"]
    assert config.main(evaluate.run, evaluate.EvaluateCommand, [*fixed, "method=snapkv", "budget=0.4"]) == 0
    return made


def test_evaluate_leaves_its_command_and_its_prompts_beside_the_rows(folder):
    (entry,) = history.entries_in(folder / "out")
    again = config.load(shlex.split(entry.command), evaluate.EvaluateCommand)
    assert (again.method, again.budget, again.model) == ("snapkv", 0.4, str(folder / "model"))
    assert {row.prompt for row in read_rows(folder / "out" / ROWS)} == set(history.prompts_in(folder / "out"))
    assert (folder / "out" / RUN).exists() and (folder / "out" / PROMPTS).exists()


def test_examples_look_at_a_prompt_of_the_comparison_and_are_kept_for_a_page_without_a_model(folder, monkeypatch, capsys):
    methods = "examples=[oracle,snapkv,snapkv+adaptive]"
    assert report(f"rows={folder / 'out'}", methods, f"model={folder / 'model'}") == 0
    found = example.load(folder / "out" / EXAMPLE)
    assert [kept.line for kept in found.kept] == ["oracle", "snapkv", "snapkv+adaptive"] and found.prompt in history.prompts_in(
        folder / "out"
    )
    monkeypatch.setattr("learnkv.report.load_model", lambda *_: pytest.fail("the model was loaded"))
    assert report(f"rows={folder / 'out'}") == 0
    assert (folder / "out" / "report" / "index.html").read_text().count('class="strip"') == 3


def test_shares_of_tokens_and_heads_are_of_the_same_cache(folder):
    like = read_rows(folder / "out" / ROWS)[0]
    model, tokenizer = tiny_model(), letter_tokenizer()
    shown = contenders_of(["snapkv", "snapkv+adaptive"], model, tokenizer, always=())
    found = example.look(model, tokenizer, short_prompt(), shown, 0.4, like)
    for kept in found.kept:
        assert len(kept.shares) == len(found.tokens) and (len(kept.retention), len(kept.retention[0])) == (3, 2)
        assert sum(kept.shares) / len(kept.shares) == pytest.approx(torch.tensor(kept.retention).mean().item(), abs=1e-3)
    assert "".join(found.tokens[slice(*found.span)]) == "71" and found.kept[0].retention != found.kept[1].retention


def test_an_example_of_another_model_is_refused(tmp_path, capsys):
    folder = laid(tmp_path, [r.__class__(**{**r.__dict__, "weights_hash": "1" * 16}) for r in compared()])
    kept_example().save(folder / EXAMPLE)
    assert report(f"rows={folder}") == 2
    assert "weights 0000000000000000; the rows are of tiny, weights 1111111111111111" in capsys.readouterr().err


def test_an_example_of_the_other_protocol_is_refused():
    with pytest.raises(ValueError, match="the rows have it the other way"):
        example.refuse_other(kept_example(), full_row(question_in_prefix=True), Path("example.json"))


@pytest.mark.parametrize("content", ["", "[]", '{"prompt": 3}'])
def test_a_broken_example_is_refused(tmp_path, content):
    (tmp_path / EXAMPLE).write_text(content)
    with pytest.raises(ValueError, match="make it again with examples="):
        example.load(tmp_path / EXAMPLE)


def test_training_curves_are_read_where_a_run_left_them(tmp_path, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    monkeypatch.chdir(tmp_path)
    assert figures.training(view(compared())) is None
    with SummaryWriter("checkpoints/runs/kvp-seed0/events") as writer:
        for step in range(5):
            writer.add_scalar("loss", 3.0 - step / 2, step)
            writer.add_scalar("heldout/reward", step - 9.0, step)
    found = figures.training(view(compared()))
    assert found and found.cells[1] == ["kvp+adaptive", "checkpoints/runs/kvp-seed0", "held-out reward", "4", "-9.000", "-5.000"]
    assert GATE not in found.pictures[0].title


# ---- in a browser

SCREENS = (1280, 400)
OVERFLOW = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
SILENT = """[...document.querySelectorAll('svg,img')].filter(each => !each.getAttribute('aria-hidden') && !each.getAttribute('alt')
  && !(each.querySelector('title') && each.querySelector('desc'))).length"""
UNPRINTED = """[...document.querySelectorAll('tbody th')].filter(each => {
  each.className = 'long';  // as long names have it
  return !each.closest('details.long') && !each.checkVisibility();
}).length"""
BARE = "[...document.querySelectorAll('figure')].filter(x => !x.querySelector('table')).length"


@pytest.mark.slow
@pytest.mark.skipif(not browser.FOUND, reason="no Chromium here: apt-get install -y --no-install-recommends chromium-headless-shell")
def test_pages_in_a_browser_fit_their_window_say_what_they_show_and_report_no_error(made, tmp_path):
    with browser.Browser(tmp_path) as tab:
        for name in ("index.html", "sheet.html"):
            for width in SCREENS:
                tab.open(made / "report" / name, width)
                wanted, there = tab.run(OVERFLOW)
                assert wanted <= there == width, (name, width)
                assert (tab.run(SILENT), tab.run(BARE)) == (0, 0)
        tab.open(made / "report" / "index.html", 400)
        tab.run("document.querySelector('.strip').focus()")
        for _ in range(3):
            tab.key("ArrowRight")
        assert tab.run("document.querySelector('.token').textContent") == "token 2: 0% of heads: “ is”"
        judge(tab, made / "report" / "sheet.html")
        tab.open(made / "report" / "index.html", 1280)
        tab.ask("Emulation.setEmulatedMedia", media="print")
        assert tab.run(UNPRINTED) == 0
        assert tab.said == []


def judge(tab: browser.Browser, sheet: Path) -> None:
    """Fills a sheet: references stay hidden until it is done, choices can't be changed after."""
    tab.open(sheet, 400)
    hidden = "[...document.querySelectorAll('.reference')].every(x => x.hidden)"
    assert tab.run(hidden) and tab.run("document.getElementById('done').disabled")
    tab.run("document.querySelectorAll('input[value=A]').forEach(x => x.click())")
    tab.run("document.getElementById('done').click()")
    given = json.loads(tab.run("document.getElementById('json').value"))
    assert set(given["answers"].values()) == {"A"} and len(given["answers"]) == 6
    assert not tab.run(hidden) and tab.run("[...document.querySelectorAll('input')].every(x => x.disabled)")
