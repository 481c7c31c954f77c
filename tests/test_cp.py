"""learnkv cp: a shipped recipe becomes a file of the user's, once."""

from pathlib import Path

import pytest

from learnkv import config
from learnkv.cp import CpCommand, run


def cp(*arguments: str) -> int:
    return config.main(run, CpCommand, arguments, words=("recipe", "to"))


@pytest.mark.parametrize("recipe", config.recipe_names())
def test_every_shipped_recipe_is_copied_whole_and_its_command_named(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cp(recipe) == 0
    (copy,) = Path().iterdir()
    assert copy.read_bytes() == config.recipe_file(recipe).read_bytes() and copy.name == f"{recipe.replace('/', '-')}.yaml"
    verb = "evaluate" if recipe.startswith(("compare", "grid")) else "plan" if recipe.startswith("plan") else "train"
    told = capsys.readouterr().out
    assert f"python -m learnkv.{verb} recipe={copy}\n" in told
    assert ("learnkv.estimate" in told) == (verb != "plan")


@pytest.mark.parametrize("arguments", [("kvp", "deep/mine.yaml"), ("recipe=kvp", "deep/mine.yaml"), ("to=deep/mine.yaml", "kvp")])
def test_recipe_and_file_are_named_with_or_without_keys(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cp(*arguments) == 0 and Path("deep/mine.yaml").is_file()


def test_a_folder_takes_the_recipes_own_name(tmp_path):
    assert cp("paper/kvp", str(tmp_path)) == 0 and (tmp_path / "paper-kvp.yaml").is_file()


def test_a_file_that_is_there_stays_as_it_is(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    assert cp("kvp", str(path)) == 2
    assert path.read_text() == "mine" and "never written over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["kpv"], "nearest: kvp"),
        (["kvp", "mine.txt"], "give mine.txt.yaml"),
        (["to=x.yaml"], "unknown recipe ''"),
        (["kvp", "a.yaml", "b"], "'b'"),
    ],
)
def test_mistakes_are_one_line(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cp(*arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and not list(Path().iterdir())
