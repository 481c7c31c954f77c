"""learnkv inspect: says what a thing of learnkv's is, refuses others in one line, and never runs anybody's pickle or Python."""

import os
import shlex
from pathlib import Path

import pytest

from learnkv import config
from learnkv.evaluate import EvaluateCommand
from learnkv.export import ExportCommand
from learnkv.generate import GenerateCommand
from learnkv.inspect import InspectCommand, run
from learnkv.train import TrainCommand
from tests.places_parts import furnish, set_trap

SCHEMAS = {"train": TrainCommand, "evaluate": EvaluateCommand, "generate": GenerateCommand, "export": ExportCommand}


@pytest.fixture(scope="module")
def furnished(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("furnished")
    furnish(root)
    return root


@pytest.fixture
def here(furnished, monkeypatch) -> Path:
    monkeypatch.chdir(furnished)
    return furnished


def inspect(capsys, path: str | Path) -> str:
    assert config.main(run, InspectCommand, [str(path)], words=("path",)) == 0
    return capsys.readouterr().out


def refused(capsys, path: str | Path) -> str:
    assert config.main(run, InspectCommand, [str(path)], words=("path",)) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("path", ["checkpoints/kvp-tiny", "checkpoints/kvp-tiny/gate.safetensors", "checkpoints/kvp-tiny/gate.json"])
def test_a_gate_is_described(here, path, capsys):
    text = inspect(capsys, path)
    assert "kvp, " in text and "tiny, 3 layers x 2 KV heads of 8 dimensions, 4 query heads, weights 0123456789abcdef" in text
    assert "95 s of training" in text and "branch_width=6" in text and "scale  " in text and "float32 [3, 2]" in text


def test_a_run_that_ended_is_described_with_its_gate(here, capsys):
    text = inspect(capsys, "checkpoints/runs/ended")
    assert "kvp, 12 of 12 steps, trained" in text and "held-out reward" in text and "tensorboard --logdir checkpoints/runs/ended" in text
    assert "generate model=tiny gate=checkpoints/runs/ended" in text


def test_a_run_that_was_stopped_says_how_to_go_on(here, capsys):
    text = inspect(capsys, "checkpoints/runs/stopped/last.ckpt")
    assert "12 of 20 steps, can be resumed" in text
    assert "next     python -m learnkv.train recipe=checkpoints/runs/stopped/recipe.yaml name=stopped\n" in text


def test_a_folder_of_traces_is_described(here, capsys):
    (folder,) = Path("data/traces").iterdir()
    text = inspect(capsys, folder)
    assert "2 heldout, 6 train, " in text and "in 8 shards" in text and "8 made" in text and "record.mode=targets" in text
    assert "keys             float32 [3, 2, " in text and "targets.utility  float32 [3, 2, " in text
    assert inspect(capsys, folder / "manifest.parquet") == text


def test_a_shard_is_described(here, capsys):
    shard = next(iter(sorted(Path("data/traces").glob("*/*.safetensors"))))
    text = inspect(capsys, shard)
    assert (
        "1 traces, " in text and "(made, heldout, 40 tokens)" in text and f"next       python -m learnkv.inspect {shard.parent}\n" in text
    )


@pytest.mark.parametrize("path", ["data/comparisons/compare", "data/comparisons/compare/rows.jsonl"])
def test_the_rows_of_a_comparison_are_described(here, path, capsys):
    text = inspect(capsys, path)
    assert "2 rows, 2 prompts" in text and "methods" in text and "snapkv" in text
    assert "made by     python -m learnkv.evaluate evaluate.out=data/comparisons/compare\n" in text


def test_an_exported_press_is_described_out_of_its_text(here, capsys, tmp_path):
    trapped = tmp_path / "kvp_press.py"
    trapped.write_text(f"{Path('kvp_press.py').read_text()}\nopen({str(tmp_path / 'sprung')!r}, 'w')\n")
    text = inspect(capsys, trapped)
    assert "for kvpress: kvp" in text and "tiny, 3 layers x 2 KV heads of 8 dimensions" in text and "float32 [3, 2]" in text
    assert not (tmp_path / "sprung").exists()


def test_what_may_be_done_next_are_commands_that_load(here, capsys):
    for path in ("checkpoints/kvp-tiny", "checkpoints/runs/ended", "checkpoints/runs/stopped"):
        lines = inspect(capsys, path).partition("\nnext")[2].split("python -m learnkv.")[1:]
        assert lines
        for line in lines:
            verb, *arguments = shlex.split(line)
            config.load(arguments, SCHEMAS[verb])


def test_a_checkpoint_is_never_unpickled(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("method: kvp\ntrain: {steps: 9}")
    set_trap(tmp_path / "last.ckpt", tmp_path / "sprung")
    assert "7 of 9 steps" in inspect(capsys, tmp_path) and not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "rows.jsonl", "press.py", "image.png", "last.ckpt"])
def test_other_files_are_refused_in_one_line(name, tmp_path, capsys):
    (tmp_path / name).write_bytes(b"\x00\xff something else\n")
    assert str(tmp_path) in refused(capsys, tmp_path / name)


def test_other_folders_and_missing_paths_are_refused(tmp_path, capsys):
    assert "is none of learnkv's" in refused(capsys, tmp_path)
    assert "does not exist" in refused(capsys, tmp_path / "nowhere")
    assert config.main(run, InspectCommand, [], words=("path",)) == 2 and "path= is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    ["checkpoints/kvp-tiny/gate.safetensors", "kvp_press.py", "data/comparisons/compare/rows.jsonl", "checkpoints/runs/stopped/last.ckpt"],
)
def test_a_damaged_thing_is_refused_in_one_line(here, path, tmp_path, capsys):
    for name in os.listdir(Path(path).parent):
        if (Path(path).parent / name).is_file():
            (tmp_path / name).write_bytes((Path(path).parent / name).read_bytes())
    damaged = tmp_path / Path(path).name
    data = damaged.read_bytes()
    damaged.write_bytes(data[: len(data) * 2 // 3].rstrip(b"\n") + b"\n")
    refused(capsys, damaged)


def test_an_edited_gate_is_refused(here, tmp_path, capsys):
    data = bytearray(Path("checkpoints/kvp-tiny/gate.safetensors").read_bytes())
    data[-3] ^= 1
    (tmp_path / "gate.safetensors").write_bytes(data)
    assert "was edited" in refused(capsys, tmp_path)
