"""python -m learnkv.evaluate: what it prints and writes, how it goes on, and what it says to mistakes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from learnkv import config
from learnkv.checkpoint import save_gate
from learnkv.evaluate import EvaluateCommand, run, watched
from learnkv.evaluation.entries import parse_entry
from learnkv.evaluation.rows import read_rows
from learnkv.gates import GATES
from learnkv.gates.kvp import KVP
from learnkv.methods import METHODS
from learnkv.models import describe
from learnkv.prompts import Question
from learnkv.prompts.kinds import KINDS
from learnkv.tasks import TASKS, Task
from tests.comparison_parts import letter_tokenizer, short_prompt, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer, and three prompts of the user's own."""
    made = tmp_path_factory.mktemp("evaluate")
    tiny_model().save_pretrained(made / "model")
    letter_tokenizer().save_pretrained(made / "model")
    questions = [(short_prompt(i).context, short_prompt(i).questions[0]) for i in range(3)]
    records = [{"context": context, "question": q.text, "answer": q.answer, "answer_prefix": q.prefix} for context, q in questions]
    (made / "mine.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return made


def evaluate(folder, out, *arguments):
    fixed = [f"model={folder / 'model'}", f"prompts={folder / 'mine.jsonl'}", f"evaluate.out={out}"]
    return config.main(run, EvaluateCommand, [*fixed, *arguments])


def test_one_method_on_ones_own_prompts_ends_with_a_table_and_where_it_lies(folder, tmp_path, capsys):
    assert evaluate(folder, tmp_path / "out", "method=snapkv+adaptive", "budget=0.4") == 0
    said = capsys.readouterr().out
    lines = ("full cache", "random", "oracle", "snapkv+adaptive")
    for part in ("prompts: 3 with 3 questions", "40% accuracy", *lines, "next: python -m learnkv."):
        assert part in said
    for name in ("rows.jsonl", "table.md", "plot.png", "report/index.html", "report/report.md"):
        assert f"{tmp_path / 'out' / name}" in said and (tmp_path / "out" / name).stat().st_size > 0
    assert len(read_rows(tmp_path / "out" / "rows.jsonl")) == 3 * (1 + 3)


def test_second_run_measures_nothing_again_and_says_the_same(folder, tmp_path, capsys):
    tables = []
    for _ in range(2):
        assert evaluate(folder, tmp_path, "method=key_diff", "budget=48") == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] and "48 accuracy" in tables[0]


@pytest.mark.parametrize("methods", ["snapvk", "snapkv:some/folder", "kvp:no/folder*", "snapkv+adaptiv"])
def test_a_mistake_in_the_methods_does_not_wait_for_the_model(methods, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("learnkv.evaluate.load_model", lambda *_: pytest.fail("the model was loaded"))
    assert evaluate(folder, tmp_path / "out", f"evaluate.methods=[{methods}]", "budget=0.4") == 2 and not (tmp_path / "out").exists()


def test_several_methods_and_budgets_by_the_section(folder, tmp_path, capsys):
    assert evaluate(folder, tmp_path, "evaluate.methods=h2o,tova", "evaluate.budgets=[0.5,30]") == 0
    assert len(read_rows(tmp_path / "rows.jsonl")) == 3 * (1 + 4 * 2)


def test_budget_over_the_context_is_said_once(folder, tmp_path, capsys):
    assert evaluate(folder, tmp_path, "method=snapkv", "budget=200") == 0
    assert capsys.readouterr().out.count("budget 200 held the whole context in 9 rows: nothing was evicted there") == 1


def test_a_gate_stands_beside_the_controls(folder, tmp_path, capsys):
    save_gate(KVP(KVP.Config(), describe(tiny_model())), tmp_path / "gate", {})
    assert evaluate(folder, tmp_path / "out", f"gate={tmp_path / 'gate'}", "budget=0.4") == 0
    assert f"kvp:{tmp_path / 'gate'}" in capsys.readouterr().out
    assert "### kvp:" in (tmp_path / "out" / "table.md").read_text()


def test_settings_chosen_on_a_development_run_are_run(folder, tmp_path, capsys):
    lines = [json.loads(line) for line in (folder / "mine.jsonl").read_text().splitlines()]
    (tmp_path / "dev.jsonl").write_text("\n".join(json.dumps(line | {"context": line["context"] + " Then."}) for line in lines))
    methods = "evaluate.methods=snapkv,snapkv+adaptive,h2o"
    assert evaluate(folder, tmp_path / "dev", methods, "budget=0.4", f"prompts={tmp_path / 'dev.jsonl'}") == 0
    rows = tmp_path / "dev" / "rows.jsonl"
    assert evaluate(folder, tmp_path / "held", "evaluate.methods=random", f"evaluate.choose={rows}", "budget=0.4") == 0
    assert "best heuristic (chosen)" in capsys.readouterr().out


def test_settings_are_not_chosen_on_the_prompts_that_are_compared(folder, tmp_path, capsys):
    assert evaluate(folder, tmp_path / "dev", "method=snapkv", "budget=0.4") == 0
    assert evaluate(folder, tmp_path / "held", "method=h2o", "budget=0.4", f"evaluate.choose={tmp_path}/dev/rows.jsonl") == 2
    assert "evaluate.choose holds rows of 3 of the 3 prompts that are compared" in capsys.readouterr().err


def test_a_gate_trained_on_shuffled_targets_is_the_twin_of_the_other(folder, tmp_path, capsys):
    base = describe(tiny_model())
    for seed, name in enumerate(("real-seed0", "real-seed1", "shuffled")):
        torch.manual_seed(seed)
        recipe = {"train": {"shuffled": name == "shuffled"}, "record": {"kinds": ["codes"]}}
        save_gate(KVP(KVP.Config(), base), tmp_path / name, recipe, train_seconds=12.0)
    methods = f"evaluate.methods=kvp+adaptive:{tmp_path}/real-*,kvp+adaptive:{tmp_path}/shuffled"
    assert evaluate(folder, tmp_path / "out", methods, "evaluate.budgets=[0.4,0.3]") == 0
    out, written = capsys.readouterr().out, (tmp_path / "out" / "table.md").read_text()
    for text in (out, written):
        assert f"kvp+adaptive:{tmp_path}/shuffled, shuffled targets" in text
        assert f"kvp+adaptive:{tmp_path}/real-* (2 runs)" in text
        assert "twins trained on shuffled targets" in text and "12 s" in text and "each training run" in text
    assert f"### kvp+adaptive:{tmp_path}/real-* against the others" in written and "shuffled, shuffled targets against" not in written


@pytest.fixture(scope="module")
def enough(folder):
    """Twelve prompts, of which intervals can be had."""
    questions = [(short_prompt(i).context, short_prompt(i).questions[0]) for i in range(12)]
    records = [{"context": context, "question": q.text, "answer": q.answer, "answer_prefix": q.prefix} for context, q in questions]
    (folder / "twelve.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"prompts={folder / 'twelve.jsonl'}"


def test_enough_prompts_make_claims_and_few_say_why_they_make_none(folder, enough, tmp_path, capsys):
    assert evaluate(folder, tmp_path / "few", "method=snapkv", "budget=0.4") == 0
    said = capsys.readouterr().out
    assert "nothing is claimed: 3 prompts, fewer than the 10 that an interval needs" in said and "[" not in said.partition("method ")[2]
    assert evaluate(folder, tmp_path / "out", enough, "method=snapkv", "budget=0.4") == 0
    said = capsys.readouterr().out
    assert "40% claim" in said and "best heuristic over all these prompts: snapkv at 40%" in said
    assert "### claims, user" in (tmp_path / "out" / "table.md").read_text()


def test_a_declared_endpoint_is_tested_by_itself(folder, enough, tmp_path, capsys):
    declared = ["evaluate.primary.methods=[h2o]", "evaluate.primary.budget=0.4", "evaluate.methods=[h2o,tova]", "evaluate.budgets=[0.4]"]
    assert evaluate(folder, tmp_path, enough, *declared) == 0
    assert "primary endpoint: accuracy, 40%, all prompts" in capsys.readouterr().out
    assert evaluate(folder, tmp_path, enough, *declared, "method=snapkv") == 0
    assert "note: h2o at budget 0.4, of evaluate.primary, is not run here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("methods=[h2o]", "evaluate.primary names h2o at budget 0.1, which is not run; run are: full cache at 1, random at 0.4"),
        ("methods=[tova] evaluate.primary.budget=0.4", "evaluate.primary speaks of 3 prompts, fewer than the 10"),
        ("group=odd", "unknown group in evaluate.primary: 'odd'"),
        ("metric=f1", "evaluate.primary.metric"),
    ],
)
def test_an_endpoint_that_cannot_be_tested_is_refused_before_anything_runs(folder, tmp_path, capsys, declared, said):
    arguments = f"evaluate.methods=[tova] evaluate.budgets=[0.4] evaluate.primary.{declared}".split()
    assert evaluate(folder, tmp_path / "out", *arguments) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_estimate_measures_a_prompt_and_writes_nothing(folder, tmp_path, capsys):
    assert evaluate(folder, tmp_path / "out", "method=snapkv", "evaluate.budgets=[0.4,0.3]", "estimate=true") == 0
    said = capsys.readouterr().out
    assert "left: 21 rows on 3 prompts, about " in said and "nothing was written" in said
    assert not (tmp_path / "out").exists()
    assert evaluate(folder, tmp_path / "out", "method=snapkv", "evaluate.budgets=[0.4]") == 0
    before = (tmp_path / "out" / "rows.jsonl").read_bytes()
    capsys.readouterr()
    assert evaluate(folder, tmp_path / "out", "method=snapkv", "evaluate.budgets=[0.4,0.3]", "estimate=true") == 0
    assert "left: 9 rows on 3 prompts" in capsys.readouterr().out
    assert evaluate(folder, tmp_path / "out", "method=snapkv", "evaluate.budgets=[0.4]", "estimate=true") == 0
    assert "left: 0 rows on 0 prompts, about 0 s" in capsys.readouterr().out
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == before


def test_hours_are_said_after_the_second_prompt_by_the_work_that_is_left(monkeypatch, capsys):
    seconds = iter([0, 500, 530, 590])  # begin, after the first, the second, the fourth
    monkeypatch.setattr("learnkv.evaluate.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    tasks = [([SimpleNamespace(context=range(100))], range(rows)) for rows in (10, 10, 10, 10, 20)]
    assert list(watched(tasks)) == tasks
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if "about" in line]
    assert lines == [
        "2 of 5 prompts done, about 2 min left on this machine",  # 30 s for 10 rows, 40 left
        "4 of 5 prompts done, about 60 s left on this machine",  # 90 s for 30 rows, 20 left
    ]


def test_groups_of_kinds_without_prompts_are_said(folder, tmp_path, capsys):
    assert evaluate(folder, tmp_path, "method=snapkv", "budget=0.4", "evaluate.groups={unseen: [cities, dates]}") == 0
    assert "no prompt is of group unseen (cities, dates)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("method=snapvk", "nearest: snapkv"),
        ("budget=-3", "budget=-3 is neither"),
        ("method=random budget=0", "budget=0 is neither"),
        ("method=random budget=inf", "budget=inf is neither"),
        ("method=snapkv(budget=64)", "budget is no knob of a method"),
        ("method=snapkv(num_recent=many)", "num_recent='many' is no whole number"),
        ("evaluate.count=0", "evaluate.count=0 is below 1"),
        ("evaluate.budgets=[]", "evaluate.budgets is empty"),
        ("evaluate.methods=random budget=7", "budget=7 is smaller than num_sinks + num_recent = 20"),
        ("gate=nowhere", "nowhere"),
        ("evaluate.split=dve", "dve"),
        ("evaluate.dtype=float8", "float8"),
        ("evaluate.budgts=[0.1]", "evaluate.budgets"),
        ("evaluate.methods=snapkv+adaptve", "nearest: adaptive"),
        ("recipe=comprae", "compare"),
        ("method=random prompts=nowhere.jsonl", "nowhere.jsonl"),
        ("evaluate.choose=nowhere.jsonl", "evaluate.choose=nowhere.jsonl is no file; run the development recipe"),
        ("evaluate.groups.unseen=[citties]", "nearest: cities"),
    ],
)
def test_mistake_is_one_line_and_exit_2(folder, tmp_path, capsys, argument, said):
    assert evaluate(folder, tmp_path, *argument.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error


def test_shipped_recipes_name_methods_kinds_and_tasks_that_exist():
    for settings in shipped().values():
        assert [parse_entry(text, [*METHODS, *GATES]) for text in settings.methods]
        topics = {*settings.kinds, *settings.tasks}
        assert topics and set(settings.kinds) <= set(KINDS) and set(settings.tasks) <= set(TASKS)
        assert {topic for group in settings.groups.values() for topic in group} <= topics


def shipped():
    """Every recipe of a comparison."""
    names = [name for name in config.recipe_names() if name.startswith(("compare", "grid"))]
    return {name: config.load([f"recipe={name}"], EvaluateCommand).evaluate for name in names}


def test_two_recipes_hold_every_method_there_is_but_one_that_needs_a_file():
    recipes = shipped()
    named = {parse_entry(text, [*METHODS, *GATES]).name for name in ("compare_learned", "compare_rest") for text in recipes[name].methods}
    assert {*METHODS} - named == {"random", "oracle", "headkv"}


@pytest.mark.parametrize("name", ["compare_learned", "compare_inside", "compare_learned_long", "compare_inside_long"])
def test_each_gate_has_a_twin_and_kinds_are_shared_equally(name):
    settings = shipped()[name]
    gates = [text.partition(":") for text in settings.methods if ":" in text]
    seeds, twins = ({m for m, _, folder in gates if folder.endswith(end)} for end in ("-seed*", "-shuffled"))
    assert seeds == twins and len(seeds) + len(twins) == len(gates)
    assert settings.count % len(settings.kinds) == 0
    assert settings.groups["trained"] + settings.groups["unseen"] == settings.kinds


@pytest.mark.parametrize(("tuned", "by"), [("compare_learned", "compare_dev_outside"), ("compare_inside", "compare_dev_inside")])
def test_a_comparison_chooses_by_the_development_recipe_of_its_protocol(tuned, by):
    recipes = shipped()
    assert recipes[tuned].choose == f"{recipes[by].out}/rows.jsonl" and recipes[by].split == "dev"
    assert (recipes[tuned].question, recipes[tuned].budgets) == (recipes[by].question, recipes[by].budgets)


def test_budgets_within_the_protected_tokens_are_said(folder, tmp_path, capsys):
    assert evaluate(folder, tmp_path, "method=key_diff", "budget=0.01") == 0
    assert "budget 0.01 is within the 20 protected tokens of some contexts: every method keeps the same" in capsys.readouterr().out


# ---- tasks


def toy_prompts(size, seed):
    """Two prompts of a task that the tiny model can do, or not, whatever the size."""
    for i in range(2):
        yield replace(short_prompt(i), kind="toy_can", questions=(Question(" What?", " It is", f" {71 + i}", None, ("x",)),))


@pytest.fixture
def toy_tasks(monkeypatch):
    for name, score in (("toy_can", 0.8), ("toy_cannot", 0.1)):
        monkeypatch.setitem(TASKS, name, Task(name, toy_prompts, lambda said, wanted, score=score: score, 4))


def evaluate_tasks(folder, out, *arguments):
    fixed = [
        f"model={folder / 'model'}",
        f"evaluate.out={out}",
        "method=key_diff",
        "budget=0.4",
        "evaluate.kinds=[]",
        "evaluate.count=2",
        "evaluate.num_tokens=[200]",
    ]
    return config.main(run, EvaluateCommand, [*fixed, *arguments])


def test_tasks_are_judged_by_their_own_metric(folder, tmp_path, capsys, toy_tasks):
    assert evaluate_tasks(folder, tmp_path, "evaluate.tasks=[toy_can,toy_cannot]") == 0
    said = capsys.readouterr().out
    assert "4 with 4 questions, 2 kinds or tasks" in said and "all tasks" in said and "generated answers" in said
    rows = read_rows(tmp_path / "rows.jsonl")
    assert {(row.task, row.accuracy) for row in rows} == {("toy_can", 0.8), ("toy_cannot", 0.1)}


def test_what_the_full_cache_cannot_do_is_told_and_left_out(folder, tmp_path, capsys, toy_tasks):
    assert evaluate_tasks(folder, tmp_path, "evaluate.tasks=[toy_can,toy_cannot]", "evaluate.floor=0.3") == 0
    said = capsys.readouterr().out
    assert "left out: toy_cannot, in which the full cache reaches 0.10, less than evaluate.floor=0.3" in said
    rows = read_rows(tmp_path / "rows.jsonl")
    assert {row.scorer for row in rows if row.task == "toy_cannot"} == {"full"}
    assert len([row for row in rows if row.task == "toy_can"]) == 2 * 4 and "toy_cannot" in (tmp_path / "table.md").read_text()


def test_a_floor_above_everything_is_one_line(folder, tmp_path, capsys, toy_tasks):
    assert evaluate_tasks(folder, tmp_path, "evaluate.tasks=[toy_can]", "evaluate.floor=0.9") == 2
    assert "the full cache reaches evaluate.floor=0.9 in none of toy_can" in capsys.readouterr().err


def test_an_unknown_task_is_one_line(folder, tmp_path, capsys, toy_tasks):
    assert evaluate_tasks(folder, tmp_path, "evaluate.tasks=[toy_cam]") == 2
    assert "unknown task 'toy_cam'; nearest: toy_can" in capsys.readouterr().err


def test_groups_may_hold_tasks(folder, tmp_path, capsys, toy_tasks):
    assert evaluate_tasks(folder, tmp_path, "evaluate.tasks=[toy_can,toy_cannot]", "evaluate.groups={hard: [toy_cannot]}") == 0
    assert "hard: toy_cannot" in capsys.readouterr().out
