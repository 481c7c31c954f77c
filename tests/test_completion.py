"""Shell completion of `learnkv`: bash's own, driven by keys; what is offered is what the commands take."""

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from learnkv import config
from learnkv.candidates import candidates
from learnkv.completion import CompletionCommand, run
from learnkv.gates import GATES
from learnkv.methods import METHODS
from learnkv.verbs import VERBS

ROOT = Path(__file__).resolve().parents[1]

TYPED = {  # keys, a tab among them -> the command that comes of it
    "learnkv tra\t recipe=kvp": "train recipe=kvp",
    "learnkv train recipe=kvp_pl\t": "train recipe=kvp_plackett_luce",
    "learnkv train recipe=paper/tri\t": "train recipe=paper/trimkv",
    "learnkv train recipe=kvp train.warm\t7": "train recipe=kvp train.warmup=7",
    "learnkv train recipe=kvp gate.perm\t4": "train recipe=kvp gate.permutations=4",
    "learnkv train record.mode=tar\t": "train record.mode=targets",
    "learnkv generate method=streaming\t": "generate method=streaming_llm",
    "learnkv ls check\t": "ls checkpoints",
    "learnkv cp paper/look\t": "cp paper/lookaheadkv",
    "learnkv estimate recipe=compare evaluate.num_t\t9": "estimate recipe=compare evaluate.num_tokens=9",
}


@pytest.fixture
def shell(tmp_path, monkeypatch) -> Path:
    """A folder with a `learnkv` that completes as the real one and otherwise only says what it was asked."""
    script = tmp_path / "learnkv"
    script.write_text(f'#!/bin/sh\nif [ -n "$_ARGCOMPLETE" ]; then exec "{sys.executable}" -m learnkv "$@"; fi\necho "asked: $*"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    monkeypatch.setenv("INPUTRC", os.devnull)
    return tmp_path


def typed(keys: str, code: Path) -> str:
    """What an interactive bash on a terminal of its own shows."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(["bash", "--norc", "--noprofile", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    os.write(ours, f"PS1=; source {code}\n{keys}exit\n".encode())
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # Linux's word for a terminal that nobody holds any more
        pass
    process.wait()
    os.close(ours)
    return shown.decode()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_verbs_recipes_methods_keys_and_values(shell, capsys):
    assert config.main(run, CompletionCommand, ["bash"], words=("shell",)) == 0
    (shell / "code").write_text(capsys.readouterr().out)
    shown = typed("".join(f"{keys}\n" for keys in TYPED), shell / "code")
    asked = [line.partition("asked: ")[2].strip() for line in shown.splitlines() if "asked: " in line]
    assert asked == list(TYPED.values()), shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_its_code(shell, capsys):
    assert config.main(run, CompletionCommand, [shell], words=("shell",)) == 0
    text = capsys.readouterr().out
    assert "learnkv" in text and "_ARGCOMPLETE" in text
    if found := shutil.which(shell):
        assert subprocess.run([found, "-n"], input=text, text=True, capture_output=True).returncode == 0


def test_no_other_shell_is_promised(capsys):
    assert config.main(run, CompletionCommand, ["tcsh"], words=("shell",)) == 2 and "tcsh" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_something_to_offer(verb):
    assert candidates(verb, [], "")


def test_training_is_offered_gates_and_comparing_every_method():
    assert candidates("train", [], "method=") == [f"method={name}" for name in METHODS if name in GATES]
    assert candidates("evaluate", [], "method=") == [f"method={name}" for name in METHODS]


def test_what_is_given_is_not_offered_again_and_knobs_are_the_methods():
    offered = candidates("train", ["method=kvzap", "train.steps=3"], "")
    assert "train.steps=" not in offered and "method=" not in offered and "gate.width=" in offered and "gate.permutations=" not in offered


def test_own_recipes_gates_and_files_are_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("")
    (tmp_path / "checkpoints" / "runs" / "one").mkdir(parents=True)
    (tmp_path / "checkpoints" / "runs" / "one" / "gate.safetensors").write_text("")
    assert "recipe=mine.yaml" in candidates("train", [], "recipe=m")
    assert candidates("generate", [], "gate=") == ["gate=checkpoints/runs/one"]
    assert candidates("inspect", [], "mi")[0] == "mine.yaml" and "file=mine.yaml" in candidates("generate", [], "file=m")
