"""`python -m learnkv.generate`: answers after eviction, says what was kept, and refuses what cannot work in one line."""

from __future__ import annotations

import io
import os
import sys
import threading
from contextlib import suppress

import pytest
import torch

from learnkv import config, generate
from learnkv.evaluation.rows import budget_of
from learnkv.models import load_model
from learnkv.policy import Policy
from learnkv.runtime.attach import attach
from tests.recording import byte_tokenizer, tiny_model

CONTEXT = "the ferry leaves at nine and the harbour is closed on sundays. " * 3


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(layers=2).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def ask(folder, capsys):
    """The status, lines of stdout and text of stderr of a command on the tiny model."""

    def run(*arguments: str) -> tuple[int, list[str], str]:
        status = config.main(generate.run, generate.GenerateCommand, [f"model={folder}", "method=snapkv", "max_new_tokens=6", *arguments])
        out = capsys.readouterr()
        return status, out.out.splitlines(), out.err.strip()

    return run


def test_it_says_what_was_kept_in_tokens_and_bytes(ask):
    status, lines, _ = ask(f"prompt={CONTEXT}", "question=when?", "budget=40", "compare=true")
    assert status == 0
    assert f"kept: 40.0 of {len(CONTEXT)} tokens per KV head" in lines
    (held,) = [line for line in lines if line.startswith("bytes held: ")]
    before, after = (int(part.replace(",", "")) for part in held.split() if part.replace(",", "").isdigit())
    assert 0 < after < before
    assert [line.split(":")[0] for line in lines if "ms per token" in line] == ["full cache", "compressed"]


def test_a_budget_for_everything_is_said_once_and_gives_the_full_caches_answer(ask):
    status, lines, _ = ask(f"prompt={CONTEXT}", "budget=4000", "compare=true")
    assert status == 0
    assert sum("nothing was evicted" in line for line in lines) == 1
    answers = [lines[i + 1] for i, line in enumerate(lines) if "ms per token" in line]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("question", ["when?", ""])
def test_the_full_caches_answer_is_plain_generations(folder, question):
    model, tokenizer = load_model(str(folder))
    command = generate.GenerateCommand(prompt=CONTEXT, question=question, max_new_tokens=8)
    context, question = generate.tokens_of(generate.own_prompt(command), command, model, tokenizer)
    with attach(model):
        cache, _ = generate.prefill_many(model, context[None], [None, None])
        (got,) = generate.greedy(model, cache, torch.cat([context, question])[None], 8)
    ids = torch.cat([context, question])[None]
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert torch.equal(got, want)


def test_the_context_comes_from_a_file_or_standard_input(ask, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text(CONTEXT)
    from_file = ask(f"file={tmp_path / 'notes.txt'}", "budget=0.5")
    monkeypatch.setattr("sys.stdin", io.StringIO(CONTEXT))
    from_pipe = ask("file=-", "budget=0.5")
    steady = [[line for line in lines if "ms per token" not in line] for _, lines, _ in (from_file, from_pipe)]
    assert steady[0] == steady[1]
    assert from_pipe[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["file=/nowhere/notes.txt"], "/nowhere/notes.txt can't be read (No such file or directory)"),
        (["file=/dev/full"], "/dev/full is a device or socket"),
        (["file=/"], "/ can't be read (Is a directory)"),
        ([f"prompt={CONTEXT}", "budget=1e30"], "is above 2**31 - 1"),
        ([f"prompt={CONTEXT}", f"num_recent={10**12}"], "num_recent=1000000000000 is above 2**31 - 1"),
        (
            [f"prompt={CONTEXT}", f"method=snapkv(kernel_size={10**23 + 1})"],
            "SnapKV: kernel_size=100000000000000000000001 is above 2**31 - 1",
        ),
        ([f"prompt={CONTEXT}", "method=qfilter(filters=/tmp)"], "filters=/tmp is no file"),
        (["prompt="], "the context from prompt is empty"),
        (["prompt=   "], "the context from prompt is empty"),
        (["prompt=a"], "the context is 1 token(s)"),
        ([f"prompt={'a' * 600}"], "606 tokens with the question and max_new_tokens=6"),
        ([f"prompt={CONTEXT}", "budget=0"], "budget=0 is neither"),
        ([f"prompt={CONTEXT}", "budget=-3"], "budget=-3 is neither"),
        ([f"prompt={CONTEXT}", "budget=12"], "budget=12 is smaller than num_sinks + num_recent = 20"),
        ([f"prompt={CONTEXT}", "method=snapvk"], "unknown method 'snapvk'; nearest: snapkv"),
        ([f"prompt={CONTEXT}", "method=oracle"], "method oracle cannot generate"),
        ([f"prompt={CONTEXT}", "method=full"], "method full cannot generate"),
        ([f"prompt={CONTEXT}", "max_new_tokens=0"], "max_new_tokens=0"),
        ([f"prompt={CONTEXT}", "file=-"], "both hold a context"),
        ([f"prompt={CONTEXT}", "gate=nowhere"], "nowhere holds no gate.safetensors"),
        (["question=who?"], "needs a context"),
        ([f"prompt={CONTEXT}", "dtype=float8"], "dtype"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(ask, arguments, message):
    status, _, error = ask(*arguments)
    assert status == 2
    assert error.startswith("error: ") and "\n" not in error
    assert message in error


def test_a_mistake_in_the_method_does_not_wait_for_the_model(monkeypatch, capsys):
    monkeypatch.setattr(generate, "load_model", lambda *_: pytest.fail("the model was loaded"))
    assert config.main(generate.run, generate.GenerateCommand, [f"prompt={CONTEXT}", "method=snapvk"]) == 2
    assert "nearest: snapkv" in capsys.readouterr().err


def test_a_gate_that_is_not_shipped_here_is_said_to_be_looked_for_in_the_working_folder(ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, error = ask(f"prompt={CONTEXT}", "method=kvp")
    assert status == 2
    assert f"checkpoints/kvp-smollm2-135m, is looked for in the working folder, {tmp_path}" in error


def test_a_named_pipe_is_read(ask, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(CONTEXT,))
    writer.start()
    assert ask(f"file={tmp_path / 'pipe'}", "budget=0.5")[0] == 0
    writer.join()


def test_a_pipe_without_end_is_refused(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["learnkv.prompts.make"], "MOST_PIPED", 1000)
    monkeypatch.setattr("sys.stdin", io.StringIO(2000 * "a"))
    assert ask("file=-")[2] == "error: standard input gives more than 1,000 characters, and may have no end; save it to a file first"
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=pour, args=(tmp_path / "pipe",))
    writer.start()
    assert f"{tmp_path / 'pipe'} gives more than 1,000 characters" in ask(f"file={tmp_path / 'pipe'}")[2]
    writer.join()


def pour(pipe):
    """Writes for as long as somebody reads."""
    with suppress(BrokenPipeError), pipe.open("wb", buffering=0) as file:
        while True:
            file.write(10_000 * b"a")


@pytest.mark.parametrize(("count", "said"), [(1, ""), (4, ""), (5, ", 100 ms per token"), (50, ", 10 ms per token")])
def test_the_time_of_a_token_is_said_of_enough_of_them(count, said):
    assert generate.pace_of(0.5, count) == said


def test_a_policy_is_made_of_method_and_budget(folder):
    model, tokenizer = load_model(str(folder))
    command = generate.GenerateCommand(method="snapkv+adaptive", budget=0.25, num_recent=8)
    policy = generate.policy_of(command, model, tokenizer)
    assert isinstance(policy, Policy)
    assert (policy.budget, policy.num_recent, policy.allocate.scope) == (budget_of(0.25), 8, "layer")
