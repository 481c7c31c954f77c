"""Recipes and key=value arguments become typed dataclasses, or one line that says why not."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import MISSING

from learnkv import config
from learnkv.evaluate import EvaluateCommand


@dataclass(frozen=True)
class TrainSettings:
    rate: float = 1e-3  # AdamW's learning rate
    steps: int | None = None  # optimiser steps
    kinds: tuple[str, ...] = ("prose", "code")
    budgets: list[float] = field(default_factory=list)
    loss: Literal["reward", "listnet"] = "reward"
    out: Path = Path("checkpoints")
    gate: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate={self.rate} is negative")


@dataclass(frozen=True)
class Recipe:
    recipe: str = ""
    name: str | None = None
    seed: int = 0  # of everything
    train: TrainSettings = field(default_factory=TrainSettings)


@dataclass(frozen=True)
class Asking:
    recipe: str = ""
    prompt: str = MISSING


@pytest.fixture
def recipe(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "own.yaml"
        path.write_text(text)
        return f"recipe={path}"

    return write


def test_arguments_win_over_the_recipe_and_the_recipe_over_defaults(recipe):
    got = config.load([recipe("seed: 1\ntrain: {rate: 3e-4, steps: 5}"), "train.steps=7"], Recipe)
    assert (got.seed, got.train.rate, got.train.steps, got.train.kinds) == (1, 3e-4, 7, ("prose", "code"))


def test_sections_of_other_commands_are_skipped_but_unknown_keys_are_not(recipe):
    assert config.load([recipe("record: {mode: full}\nevaluate: {count: 3}")], Recipe).seed == 0
    with pytest.raises(ValueError, match=r"unknown key 'sead'.*nearest: seed"):
        config.load([recipe("sead: 3")], Recipe)


def test_a_section_is_not_taken_for_a_plain_value_of_the_same_name(recipe):
    @dataclass
    class Evaluate:
        recipe: str = ""
        gate: str = ""  # folder

    assert config.load([recipe("gate: {width: 64}")], Evaluate).gate == ""
    assert config.load([recipe("gate: checkpoints/own")], Evaluate).gate == "checkpoints/own"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("train.rat=1", "unknown key 'train.rat'; nearest: train.rate"),
        ("trian.rate=1", "unknown key 'trian'; nearest: train"),
        ("record.mode=full", "record.mode=full: record belongs to another command"),
        ("train.rate=fast", "train.rate: Value 'fast' of type 'str' could not be converted to Float"),
        ("train.steps=1.5", "Value '1.5' of type 'float' could not be converted to Integer"),
        ("train.loss=softrank", r"Invalid value 'softrank', expected one of \['reward', 'listnet'\]"),
        ("train.rate=-1", "rate=-1.0 is negative"),
        ("train=3", "train takes keys with values, this is one value: 3"),
        ("verbose", "'verbose' is not of the form key=value"),
        ("train.rate=[", "not valid YAML"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_given_and_what_is_wanted(argument, message):
    with pytest.raises(ValueError, match=message):
        config.load([argument], Recipe)


def test_an_unknown_recipe_names_the_nearest(monkeypatch, tmp_path):
    (tmp_path / "paper").mkdir()
    for name in ("kvp", "paper/kvp"):
        (tmp_path / f"{name}.yaml").write_text("seed: 3")
    monkeypatch.setattr(config, "RECIPES", tmp_path)
    assert config.load(["recipe=paper/kvp"], Recipe).seed == 3
    with pytest.raises(ValueError, match=r"unknown recipe 'kpv'; nearest: kvp"):
        config.load(["recipe=kpv"], Recipe)
    with pytest.raises(ValueError, match="unknown recipe"):
        config.load(["recipe=paper/../kvp"], Recipe)


@pytest.mark.parametrize("text", ["- 1\n- 2", "a: [", "seed: 1\nseed: 2", "\x00"])
def test_a_recipe_file_that_is_no_mapping_is_refused_by_path(recipe, text):
    with pytest.raises(ValueError, match=r"own\.yaml"):
        config.load([recipe(text)], Recipe)


def test_a_recipe_that_names_another_is_refused(recipe):
    with pytest.raises(ValueError, match="names another recipe, kvp"):
        config.load([recipe("recipe: kvp")], Recipe)


def test_a_missing_recipe_file_is_refused():
    with pytest.raises(ValueError, match=r"nowhere\.yaml does not exist"):
        config.load(["recipe=nowhere.yaml"], Recipe)


@pytest.mark.parametrize("text", ["007", "yes", "a: b", "${HOME}", "[x]", "1e3", "null?", "a=b", "", r"\${x}"])
def test_text_arrives_as_it_was_typed(text):
    assert config.load([f"prompt={text}"], Asking).prompt == text


def test_null_empties_an_optional_value():
    assert config.load(["name=null", "train.steps=null"], Recipe).name is None


def test_lists_need_no_brackets():
    train = config.load(["train.kinds=words,numbers", "train.budgets=0.1,.2", "train.gate.width=64"], Recipe).train
    assert (train.kinds, train.budgets, train.gate) == (("words", "numbers"), [0.1, 0.2], {"width": 64})
    assert config.load(["train.kinds=[words]", "train.budgets=[1]"], Recipe).train.kinds == ("words",)


def test_a_missing_value_is_asked_for_by_name():
    with pytest.raises(ValueError, match="a value is missing: prompt"):
        config.load([], Asking)


def test_a_dumped_recipe_loads_as_itself(recipe):
    first = config.load(["name=${x}: é", "train.rate=1e-5", "train.kinds=a", "train.gate.width=3"], Recipe)
    again = config.load([recipe(config.dump(first))], Recipe)
    assert (again.name, again.seed, again.train) == (first.name, first.seed, first.train)


def test_a_section_whose_type_depends_on_another_key_is_built_from_plain_values():
    assert config.build(TrainSettings, {"rate": 1, "kinds": ["a"]}, "recipe x: gate") == TrainSettings(rate=1.0, kinds=("a",))
    with pytest.raises(ValueError, match=r"recipe x: gate: unknown key 'rte'; nearest: rate"):
        config.build(TrainSettings, {"rte": 1}, "recipe x: gate")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("two\nlines"), 2, "error: two lines\n"),
        (FileNotFoundError(2, "No such file or directory", "traces"), 2, "error: No such file or directory: traces\n"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_users_mistake_is_one_line_and_a_status(capsys, error, status, line):
    def run(recipe: Recipe) -> None:
        raise error

    assert config.main(run, Recipe, ["seed=1"]) == status
    assert capsys.readouterr().err == line


def test_a_mistake_of_ours_keeps_its_traceback():
    def run(recipe: Recipe) -> None:
        raise AssertionError("promised otherwise")

    with pytest.raises(AssertionError):
        config.main(run, Recipe, ["seed=1"])


def test_help_lists_every_key_with_its_value_and_comment(capsys):
    def run(recipe: Recipe) -> None: ...

    assert config.main(run, Recipe, ["--help", "train.steps=9"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"seed=0 of everything", "train.rate=0.001 AdamW's learning rate", "train.steps=9 optimiser steps", "name=null"} <= set(lines)
    assert config.main(run, Recipe, []) == 2


def test_help_lists_a_papers_own_recipes_apart():
    own, papers = (" ".join(line.split()) for line in config.recipe_lines())
    assert own.startswith("recipes: ") and own.endswith(", or a .yaml file") and "paper" not in own
    names = own.removeprefix("recipes: ").removesuffix(", or a .yaml file").split(", ")
    published = [f"paper/{name}" for name in papers.removeprefix("paper/NAME, as published: ").split(", ")]
    assert sorted([*names, *published]) == config.recipe_names()


# ---- back to arguments


@dataclass
class Inner:
    rate: float = 0.1
    names: list[str] = field(default_factory=lambda: ["a"])
    folder: str = "data"
    flag: bool = False


@dataclass
class Typed:
    recipe: str = ""
    text: str = "some"
    limit: int | None = 3
    inner: Inner = field(default_factory=Inner)


TEXTS = ["2024", "true", "my: notes.txt", "[x].txt", "a #b.txt", "${x}.txt", "@x", "prömpts.jsonl", "", "a b", "'q'", "null"]


@pytest.mark.parametrize("text", TEXTS)
def test_arguments_of_a_command_give_it_again(text):
    made = Typed(text=text, limit=None, inner=Inner(rate=1e-7, names=["b", "c d"], folder=text, flag=True))
    assert config.load(shlex.split(config.arguments(made)), Typed) == made


def test_arguments_name_only_what_is_not_the_recipes():
    assert config.arguments(Typed(inner=Inner(rate=0.5))) == "recipe= inner.rate=0.5"


@pytest.mark.parametrize(
    ("text", "key"), [("1: 2", "1"), ("on: 3", "True"), ("1.5: 2", "1.5"), ("null: 3", "NoneType"), ("train: {yes: 2}", "True")]
)
def test_keys_that_yaml_reads_as_other_than_text_are_refused(recipe, text, key):
    with pytest.raises(ValueError, match=rf"own\.yaml has .*{key}.*write it in quotes, or drop it"):
        config.load([recipe(text)], Recipe)


def test_a_file_in_the_place_of_a_folder_is_named_so(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(FileExistsError) as caught:
        (tmp_path / "out").mkdir(exist_ok=True)
    assert config.one_line(caught.value) == f"{tmp_path / 'out'} is a file, where a folder should be made; give another path"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("evaluate: {groups: [codes]}", r"evaluate.groups takes keys with values, this is a list: \['codes'\]"),
        ("evaluate: {kinds: {codes: 1}}", r"evaluate.kinds takes a list, this is keys with values"),
        ("evaluate: [1]", "evaluate takes keys with values, this is a list"),
        ("evaluate: {kinds: [[codes]]}", r"evaluate.kinds is a list of plain values"),
    ],
)
def test_a_list_in_the_place_of_keys_is_one_line_that_names_the_key(tmp_path, capsys, text, says):
    (tmp_path / "r.yaml").write_text(text)
    assert config.main(lambda command: None, EvaluateCommand, [f"recipe={tmp_path / 'r.yaml'}"]) == 2
    assert re.search(says, capsys.readouterr().err)


# ---- bare words, and readers who go away


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["kvp", "mine.yaml"], ["name=kvp", "to=mine.yaml"]),
        (["to=mine.yaml", "kvp"], ["to=mine.yaml", "name=kvp"]),
        (["runs/lr=1", "--help"], ["name=runs/lr=1", "--help"]),
        (["a", "b", "c"], ["name=a", "to=b", "c"]),
        ([], []),
    ],
)
def test_bare_words_get_the_keys_that_are_left(argv, wanted):
    assert config.named(argv, ["name", "to"]) == wanted


@dataclass
class Bare:
    what: str = "all"  # of it


def test_a_command_without_recipes_runs_without_arguments_and_its_help_names_none(capsys):
    ran = []
    assert config.main(ran.append, Bare, [], words=("what",)) == 0 and ran == [Bare()]
    with pytest.raises(ValueError, match="unknown key 'recipe'"):
        config.load(["recipe=kvp"], Bare)
    text = config.usage([], Bare, __name__, ("what",))
    assert text.startswith(f"usage: python -m {__name__} [WHAT] key=value ...\n") and "recipes:" not in text


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("method: kvp\nrecord: {train: 3}", "train"),
        ("method: kvp\ntrain: {steps: 3}\nevaluate: {count: 1}", "train"),
        ("record: {train: 3}", "record"),
        ("evaluate: {count: 3}", "evaluate"),
        ("bench: {turns: 3}", "bench"),
    ],
)
def test_a_recipe_is_for_the_command_whose_sections_it_has(recipe, text, command):
    assert config.purpose(recipe(text).removeprefix("recipe=")) == command
