"""learnkv ls: what is there, a line each, read without torch and without running anybody's pickle."""

from pathlib import Path

import pytest

from learnkv import config, inventory, methods, places
from learnkv.evaluate import EvaluateCommand
from learnkv.ls import LsCommand, run
from learnkv.record import RecordCommand
from learnkv.tasks import registry
from learnkv.train import TrainCommand
from tests.places_parts import furnish, set_trap

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def furnished(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("furnished")
    furnish(root)
    return root


def ls(capsys, *arguments: str) -> list[str]:
    assert config.main(run, LsCommand, arguments, words=("what",)) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_recipes_come_with_what_they_say_first(capsys):
    lines = ls(capsys, "recipes")
    assert [line.split()[0] for line in lines] == config.recipe_names()
    assert "kvp KVP's network (arXiv:2602.10238) on the bundled model, recorded and trained in minutes on two CPU cores." in lines


def test_methods_come_with_paper_and_whether_they_are_trained(capsys):
    wanted = [f"{name} {paper} {'trained' if trained == 'yes' else 'no weights'}" for name, paper, _, trained in methods.table()]
    assert ls(capsys, "methods") == [" ".join(line.split()) for line in wanted]


def test_gates_come_with_the_held_out_reward_that_a_run_recorded(furnished, monkeypatch, capsys):
    monkeypatch.chdir(furnished)
    shipped, trained = ls(capsys, "checkpoints")
    assert shipped.startswith("checkpoints/kvp-tiny kvp tiny ") and shipped.endswith(" KiB")
    assert trained.startswith("checkpoints/runs/ended kvp tiny ") and "KiB held-out reward -" in trained


def test_runs_come_with_their_steps_and_whether_they_can_be_resumed(furnished, monkeypatch, capsys):
    monkeypatch.chdir(furnished)
    assert ls(capsys, "runs") == [
        "checkpoints/runs/begun kvp 0 of 20 steps starts over: no checkpoint yet",
        "checkpoints/runs/ended kvp 12 of 12 steps trained",
        "checkpoints/runs/stopped kvp 12 of 20 steps can be resumed",
    ]


def test_traces_come_with_prompts_and_bytes(furnished, monkeypatch, capsys):
    monkeypatch.chdir(furnished)
    (line,) = ls(capsys, "traces")
    held = sum(path.stat().st_size for path in furnished.glob("data/traces/*/*.safetensors"))
    assert line == f"data/traces/tiny-targets-0a1b2c3d tiny mode targets 8 prompts {held / 2**10:.1f} KiB"


def test_tasks_come_with_paper_metric_and_tokens(capsys):
    assert ls(capsys, "tasks") == [" ".join(" ".join(row).split()) for row in registry.table()]


def test_traces_that_wait_to_be_packed_are_told(furnished, tmp_path):
    (folder,) = (furnished / "data" / "traces").iterdir()
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    (tmp_path / "new" / "parts").mkdir(parents=True)
    (tmp_path / "new" / "trace_config.json").write_bytes((folder / "trace_config.json").read_bytes())
    (tmp_path / "new" / "parts" / "a.safetensors").write_bytes(shard.read_bytes())
    assert inventory.traces(tmp_path)[0][3:] == ("1 prompts", f"{shard.stat().st_size / 2**10:.1f} KiB", "being recorded, or stopped")


def test_all_of_it_comes_under_headings_and_what_is_not_there_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = ls(capsys)
    assert [line for line in lines if line.endswith(":") and " " not in line] == [
        "recipes:",
        "methods:",
        "tasks:",
        "checkpoints:",
        "runs:",
        "traces:",
    ]
    assert {"none in checkpoints", "none in checkpoints/runs", "none in data/traces"} <= set(lines)


@pytest.mark.parametrize("damage", [b"", b'\x08\x00\x00\x00\x00\x00\x00\x00{"a": 1', b"noise" * 100])
def test_a_damaged_gate_or_run_is_a_line_like_others(damage, tmp_path):
    for path in ("gates/one/gate.safetensors", "runs/one/recipe.yaml", "runs/two/last.ckpt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(damage)
    (tmp_path / "runs/two/recipe.yaml").write_text("method: kvp\ntrain: {steps: 3}")
    found = [*inventory.gates(tmp_path / "gates"), *inventory.runs(tmp_path / "runs")]
    assert len(found) == 3 and all(cells[1].startswith("damaged: ") and "\n" not in cells[1] for cells in found)


def test_a_checkpoints_pickle_is_read_and_never_run(tmp_path):
    set_trap(tmp_path / "last.ckpt", tmp_path / "sprung")
    assert inventory.steps_done(tmp_path / "last.ckpt") == 7 and not (tmp_path / "sprung").exists()


def test_commands_write_where_ls_looks():
    train, record, evaluate = TrainCommand(), RecordCommand(), EvaluateCommand()
    assert (train.runs, record.record.folder) == (places.RUNS_FOLDER, places.TRACES_FOLDER)
    assert Path(evaluate.evaluate.out).parent == Path(places.COMPARISONS_FOLDER)
    assert {path.parent.name for path in (ROOT / places.GATES_FOLDER).glob(f"*/{places.CARD}")} >= {"kvp-smollm2-135m"}
