"""learnkv estimate: one door, behind which the recipe's own command says what it would take."""

import pytest

from learnkv import config, estimate, evaluate, record, train
from learnkv.evaluate import EvaluateCommand
from learnkv.record import RecordCommand
from learnkv.train import TrainCommand
from tests.hub_models import folder_of


@pytest.fixture
def asked(monkeypatch) -> list[object]:
    """What train, record and evaluate are asked, which do nothing."""
    given: list[object] = []

    def note(command: object) -> None:
        given.append(command)

    for module in (train, record, evaluate):
        monkeypatch.setattr(module, "run", note)
    return given


def test_a_recipe_of_a_method_is_a_dry_training(asked):
    assert estimate.main(["recipe=kvp", "record.train=7"]) == 0
    assert asked == [config.load(["recipe=kvp", "record.train=7", "dry=true"], TrainCommand)]


def test_a_comparison_is_estimated(asked):
    assert estimate.main(["recipe=compare"]) == 0
    assert asked == [config.load(["recipe=compare", "estimate=true"], EvaluateCommand)]


def test_a_recipe_that_only_records_is_a_dry_recording(asked, tmp_path):
    (tmp_path / "own.yaml").write_text("record: {train: 3}")
    assert estimate.main([f"recipe={tmp_path}/own.yaml"]) == 0
    assert asked == [config.load([f"recipe={tmp_path}/own.yaml", "dry=true"], RecordCommand)]


def test_nothing_runs_whatever_the_arguments_say(asked):
    assert estimate.main(["recipe=kvp", "dry=false"]) == 0
    assert asked[0].dry  # type: ignore[attr-defined]


def test_it_says_what_the_dry_run_says(tmp_path, monkeypatch, capsys):
    model = folder_of("Qwen/Qwen3-8B", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("learnkv.outline.free_bytes", lambda folder: 100 << 40)
    told = []
    for begin, run in (([], estimate.main), (["dry=true"], lambda argv: config.main(train.run, TrainCommand, argv))):
        assert run(["recipe=paper/kvzap", f"model={model}", *begin]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and "weights" in told[0]


def test_help_is_its_own_and_with_a_recipe_the_commands(capsys):
    assert estimate.main(["--help"]) == 0 and "learnkv.estimate recipe=NAME" in capsys.readouterr().out
    assert estimate.main(["recipe=compare", "--help"]) == 0 and "evaluate.budgets=" in capsys.readouterr().out
    assert estimate.main([]) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["recipe=kpv"], "nearest: kvp"),
        (["record.train=3"], "recipe= is missing"),
        (["kvp"], "not of the form key=value"),
        (["recipe=kvp", "record.trian=3"], "nearest: record.train"),
    ],
)
def test_mistakes_are_one_line(arguments, says, capsys):
    assert estimate.main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(("text", "says"), [("bench: {}", "is for bench, which has no estimate"), ("model: x", "is for no command")])
def test_a_recipe_that_nothing_can_be_said_of_is_refused(text, says, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text(text)
    assert estimate.main([f"recipe={tmp_path}/own.yaml"]) == 2 and says in capsys.readouterr().err


def test_what_has_an_estimate_is_known_without_torch_too():
    assert set(config.ESTIMATED) == set(estimate.ESTIMATES)
