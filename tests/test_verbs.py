"""`learnkv VERB` is `python -m learnkv.VERB`, whatever the verb; what needs no torch does not wait for it."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from learnkv import __main__, config
from learnkv.verbs import VERBS

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
LIGHT = [[], ["--help"], ["--version"], ["trian"], ["ls"], ["ls", "--help"], ["cp", "--help"], ["completion", "zsh"]]


def called(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["learnkv", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which it replaces
    if arguments:
        monkeypatch.delitem(sys.modules, f"learnkv.{arguments[0]}", raising=False)  # as in a process of its own
    try:
        return __main__.main()
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_a_module_that_runs(verb):
    assert 'if __name__ == "__main__":' in (ROOT / "learnkv" / f"{verb}.py").read_text()


def test_help_lists_every_verb_with_an_example(monkeypatch, capsys):
    assert called(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    for name, verb in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(verb.does)}$", text, re.MULTILINE) and f"learnkv {name} {verb.example}\n" in text


def test_without_a_verb_the_same_help_comes_with_exit_2(monkeypatch, capsys):
    assert called(monkeypatch) == 2
    assert "usage: learnkv VERB" in capsys.readouterr().out


def test_an_unknown_verb_gets_the_nearest(monkeypatch, capsys):
    assert called(monkeypatch, "trian", "recipe=kvp") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "unknown verb 'trian'; nearest: train" in error


@pytest.mark.parametrize("verb", ["generate", "ls", "cp"])
def test_a_verbs_help_is_the_modules(verb, monkeypatch, capsys):
    assert called(monkeypatch, verb, "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m learnkv.{verb} ")
    module = import_module(f"learnkv.{verb}")
    schema = getattr(module, f"{verb.capitalize()}Command")
    assert text == config.usage([], schema, module.__name__, [VERBS[verb].word, "to"][: {"ls": 1, "cp": 2}.get(verb, 0)]) + "\n"


@pytest.mark.parametrize(
    "arguments",
    [["generate", "bugdet=3"], ["ls", "what=nothing"], ["cp", "kpv"], ["inspect", "nowhere"], ["estimate", "recipe=kpv"]],
    ids=" ".join,
)
def test_a_users_mistake_is_one_line_and_exit_2(arguments, monkeypatch, capsys):
    assert called(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_the_console_script_is_this_main():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"learnkv": "learnkv.__main__:main"} and callable(__main__.main)


def test_what_needs_no_torch_does_not_import_it():
    """One process for all: a start takes a third of a second even without."""
    code = f"""
import contextlib, os, sys
from learnkv import __main__
sys.stdout = sys.stderr = open(os.devnull, "w")
for arguments in {LIGHT}:
    sys.argv[1:] = arguments
    with contextlib.suppress(SystemExit):
        __main__.main()
    assert not {{"torch", "transformers"}} & set(sys.modules), arguments
from learnkv import candidates
candidates.candidates("train", ["recipe=kvp"], "")
assert "torch" not in sys.modules
print("light", file=sys.__stdout__)
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout == "light\n", done.stderr


def test_output_piped_into_head_ends_well():
    learnkv = f"{sys.executable} -m learnkv"
    command = f"{learnkv} ls methods | head -1; echo ${{PIPESTATUS[0]}}; {learnkv} --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.splitlines()[1:] == ["0", "0"] and not done.stderr
