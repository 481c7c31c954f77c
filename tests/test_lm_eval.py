"""learnkv in lm-evaluation-harness: a full budget changes nothing, a small one evicts in every kind of request, results say what ran."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval._cli import HarnessCLI
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import T5Config

from learnkv import config, lm_eval
from learnkv.checkpoint import save_gate
from learnkv.evaluation import harness
from learnkv.evaluation.harness import EvictionLM
from learnkv.gates.kvp import KVP
from learnkv.models import describe, load_model, weights_hash
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import prefill_many
from tests.recording import byte_tokenizer, tiny_model
from tests.tiny_models import masked_logits

ROOT = Path(__file__).resolve().parents[1]
TEXT = "The ferry leaves at nine; the harbour is closed on Sundays, and Anna keeps the key of the shed in her red coat. "
CHOICES = [" nine", " ten", " in her red coat", " x", " y"]  # two of one token
PROMPTS = [TEXT + "When does the ferry leave? At", TEXT[40:] + "Where is the key?", TEXT * 2 + "Who has it?", "Hm", "A"]
MAX_LENGTH = 300  # the model has 512 positions, which leaves some to the rows that KVzip runs after a prompt
SMALL = {"method": "snapkv(observation_window=4)", "budget": 0.3, "num_sinks": 2, "num_recent": 4}
FULL = [{"method": "full"}, {"method": "snapkv", "budget": 500}]
METHODS = ["snapkv(observation_window=4)+adaptive", "h2o", "key_diff", "kvzip(chunk_size=16)"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny Llama, one token per byte."""
    folder = tmp_path_factory.mktemp("lm_eval")
    tokenizer, model = byte_tokenizer(), tiny_model(layers=2)
    tokenizer.add_special_tokens({"eos_token": "<end>", "pad_token": "<pad>"})
    model.resize_token_embeddings(len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def plain(folder):
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, max_length=MAX_LENGTH)


@pytest.fixture
def lm(folder):
    """Makes the model as lm-eval does from its command line."""

    def made(batch_size: int | str = 1, **arguments: object) -> EvictionLM:
        given = {"pretrained": str(folder), "max_length": MAX_LENGTH, **arguments}
        return EvictionLM.create_from_arg_obj(given, {"batch_size": batch_size, "device": "cpu"})

    return made


def asked(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


def choices(*contexts: str) -> list[Instance]:
    """Every choice as a continuation of every context."""
    return asked("loglikelihood", *((context, choice) for context in contexts for choice in CHOICES))


def texts(*strings: str) -> list[Instance]:
    return asked("loglikelihood_rolling", *((string,) for string in strings))


def prompts(*contexts: str, **settings: object) -> list[Instance]:
    return asked("generate_until", *((context, {"until": ["\n\n"], "max_gen_toks": 12, **settings}) for context in contexts))


def same(got: list, want: list) -> bool:
    likelihoods = [a[0] for a in got] == pytest.approx([b[0] for b in want], rel=1e-5, abs=1e-4)
    return likelihoods and [a[1] for a in got] == [b[1] for b in want]


# ---- a full budget


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("arguments", FULL)
def test_full_budget_gives_hflms_log_likelihoods(lm, plain, arguments, batch_size):
    requests = choices("", *PROMPTS, TEXT * 4)
    assert same(lm(batch_size, **arguments).loglikelihood(requests), plain.loglikelihood(requests))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_full_budget_gives_hflms_rolling_log_likelihoods(lm, plain, batch_size):
    requests = texts(*PROMPTS, TEXT * 6)  # the last in three windows
    got = lm(batch_size, **FULL[1], rolling_chunk=50).loglikelihood_rolling(requests)
    assert got == pytest.approx(plain.loglikelihood_rolling(requests), abs=1e-3)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("arguments", FULL)
def test_full_budget_gives_hflms_answers_token_for_token(lm, plain, arguments, batch_size, decode):
    requests = prompts(*PROMPTS, TEXT * 4)
    assert lm(batch_size, decode=decode, **arguments).generate_until(requests) == plain.generate_until(requests)


def test_full_budget_gives_hflms_beams(lm, plain):
    requests = prompts(*PROMPTS[:3], num_beams=2)
    assert lm(2, **FULL[1]).generate_until(requests) == plain.generate_until(requests)


# ---- a small one


def test_small_budget_changes_log_likelihoods_of_one_token_too(lm, plain):
    """The last token of the context meets what was kept; its own prefill would have seen everything."""
    requests = choices(*PROMPTS[:3])
    for (got, _), (want, _) in zip(lm(**SMALL).loglikelihood(requests), plain.loglikelihood(requests), strict=True):
        assert abs(got - want) > 1e-3


def test_small_budget_changes_rolling_log_likelihoods(lm, plain):
    requests = texts(*PROMPTS[:3])
    for got, want in zip(lm(**SMALL, rolling_chunk=40).loglikelihood_rolling(requests), plain.loglikelihood_rolling(requests), strict=True):
        assert abs(got - want) > 1e-2


def test_small_budget_changes_answers(lm, plain):
    requests = prompts(*PROMPTS[:3])
    assert lm(**SMALL).generate_until(requests) != plain.generate_until(requests)


def test_log_likelihood_is_that_of_a_plain_forward_with_the_evicted_keys_masked(lm):
    evicting = lm(**SMALL)
    context, continuation = PROMPTS[0], CHOICES[2]
    ids, new = (torch.tensor([evicting.tok_encode(text)]) for text in (context, continuation))
    with attach(evicting.model):
        (kept,) = prefill_many(evicting.model, ids[:, :-1], [evicting.policy])
    logits = masked_logits(evicting.model, ids[:, :-1], torch.cat([ids[:, -1:], new[:, :-1]], 1), kept.kept_positions())
    want = logits.log_softmax(-1).gather(-1, new[..., None]).sum()
    assert evicting.loglikelihood(asked("loglikelihood", (context, continuation)))[0][0] == pytest.approx(float(want), abs=1e-4)


def test_rolling_log_likelihood_is_that_of_prefills_chunk_by_chunk(lm):
    evicting = lm(**SMALL, rolling_chunk=40)
    tokens = [evicting.prefix_token_id, *evicting.tok_encode(TEXT)]
    cache, said = evicting.prefill(torch.zeros(1, 0), torch.zeros(1, 0)), []
    cache.frozen = False
    with attach(evicting.model), torch.no_grad():
        for start in range(0, len(tokens) - 1, 40):
            part = torch.tensor([tokens[start : min(start + 40, len(tokens) - 1)]])
            said.append(evicting.model(part, cache=cache).logits.log_softmax(-1))
    want = torch.cat(said, 1)[0].gather(-1, torch.tensor(tokens[1:])[:, None]).sum()
    assert int(cache.lengths().max()) < len(tokens) // 2
    assert evicting.loglikelihood_rolling(texts(TEXT))[0] == pytest.approx(float(want), abs=1e-3)


@pytest.mark.parametrize("decode", [False, True])
def test_answer_is_generated_from_what_was_kept_and_evicted_from_where_asked(lm, decode):
    evicting = lm(**SMALL, decode=decode)
    ids = torch.tensor([evicting.tok_encode(PROMPTS[0])])
    with attach(evicting.model):
        cache = evicting.prefill(ids[:, :-1], torch.ones_like(ids[:, :-1]))
        budget, cache.frozen = int(cache.lengths().max()), not decode
        out = evicting.model.generate(ids, cache=cache, max_new_tokens=12, do_sample=False)
    assert evicting.generate_until(prompts(PROMPTS[0])) == [evicting.tok_decode(out[0, ids.shape[1] :])]
    assert int(cache.lengths().max()) == (budget if decode else budget + 12)


# ---- batches and groups


@pytest.mark.parametrize("method", METHODS)
def test_request_in_a_batch_gets_what_it_gets_alone(lm, method):
    alone, batch = (lm(n, **SMALL | {"method": method}) for n in (1, 4))
    requests = choices("", *PROMPTS)
    assert same(batch.loglikelihood(requests), [alone.loglikelihood([request])[0] for request in requests])
    assert batch.generate_until(prompts(*PROMPTS)) == [alone.generate_until([request])[0] for request in prompts(*PROMPTS)]
    want = [alone.loglikelihood_rolling([request])[0] for request in texts(*PROMPTS)]
    assert batch.loglikelihood_rolling(texts(*PROMPTS)) == pytest.approx(want, abs=1e-3)


def test_context_is_prefilled_once_for_all_its_continuations(lm, monkeypatch):
    evicting, seen, prefill = lm(**SMALL), [], EvictionLM.prefill
    monkeypatch.setattr(EvictionLM, "prefill", lambda self, ids, mask: seen.append(tuple(ids.shape)) or prefill(self, ids, mask))
    evicting.loglikelihood(choices(*PROMPTS[:3]))
    assert sorted(seen) == sorted((1, len(prompt) - 1) for prompt in PROMPTS[:3])


def test_batch_size_that_lm_eval_is_to_find_changes_nothing(lm):
    auto, fixed = (lm(n, **SMALL, max_batch_size=2) for n in ("auto", 2))
    assert same(auto.loglikelihood(choices(*PROMPTS)), fixed.loglikelihood(choices(*PROMPTS)))


def test_context_of_the_prefix_token_alone_leaves_nothing_to_evict(lm, plain):
    assert same(lm(2, **SMALL).loglikelihood(choices("", "A")), plain.loglikelihood(choices("", "A")))


def test_context_that_is_too_long_loses_its_first_tokens(lm):
    evicting, choice = lm(**SMALL), CHOICES[2]
    cut = (TEXT * 4)[-(evicting.max_length + 1 - len(choice)) :]
    got, want = (evicting.loglikelihood(asked("loglikelihood", (context, choice))) for context in (TEXT * 4, cut))
    assert len(TEXT * 4) > evicting.max_length and same(got, want)


def test_bfloat16_gives_about_the_same(lm):
    exact, rounded = (lm(**FULL[0], dtype=dtype).loglikelihood(choices(PROMPTS[0])) for dtype in ("float32", "bfloat16"))
    for (got, _), (want, _) in zip(rounded, exact, strict=True):
        assert got == pytest.approx(want, rel=0.05, abs=0.5)


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budgt": 0.2}, "unknown argument of model learnkv: 'budgt'; nearest: budget"),
        ({"metod": "snapkv"}, "unknown argument of model learnkv: 'metod'; nearest: method"),
        ({"parallelize": True}, "unknown argument of model learnkv: 'parallelize'"),
        ({"method": "snapvk", "budget": 0.2}, "unknown method 'snapvk'; nearest: snapkv"),
        ({"method": "snapkv(kernal_size=3)", "budget": 0.2}, "nearest: kernel_size"),
        ({"method": "snapkv+adaptve", "budget": 0.2}, "nearest: adaptive"),
        ({"method": "snapkv"}, "method=snapkv needs a budget"),
        ({"method": "full", "budget": 0.2}, "method=full evicts nothing; drop budget"),
        ({"budget": 0.2}, "neither method nor gate is given"),
        ({"method": "kvp", "gate": "runs/kvp", "budget": 0.2}, "method=kvp and gate=runs/kvp both name one"),
        ({"gate": "nowhere", "budget": 0.2}, "nowhere holds no gate.safetensors"),
        ({"method": "oracle", "budget": 0.2}, "oracle knows the attention to come"),
        ({"method": "snapkv", "budget": "half"}, "budget='half' is of type str"),
        ({"method": "snapkv", "budget": 0}, "budget=0 is neither"),
        ({"method": "snapkv", "budget": 12}, "budget=12 is smaller than num_sinks + num_recent = 20"),
        ({"method": "snapkv", "budget": 0.2, "num_sinks": 1.5}, "num_sinks=1.5 is of type float"),
        ({"method": "full", "rolling_chunk": 0}, "rolling_chunk=0 counts tokens"),
        ({"method": "full", "dtype": "floot16"}, "unknown dtype 'floot16'; nearest: float16"),
        ({"method": "full", "device": "cuda"}, "device='cuda' stands in the model's arguments, and lm-eval has its own --device"),
        ({"method": "full", "pretrained": "smollm2-135"}, "nearest: smollm2-135m"),
    ],
)
def test_mistakes_are_said_in_one_line(lm, arguments, message):
    with pytest.raises(ValueError) as raised:
        lm(**arguments)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_model_must_be_named():
    with pytest.raises(ValueError, match="no model is named"):
        EvictionLM.create_from_arg_string("method=full")


def test_encoder_decoder_is_refused(lm, tmp_path):
    T5Config(num_layers=1, d_model=8, d_ff=8, num_heads=1, d_kv=8).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is an encoder-decoder"):
        lm(pretrained=str(tmp_path), method="full")


# ---- through lm-eval itself


@pytest.fixture
def tasks(tmp_path):
    """A task of each kind over the same two questions, in lm-eval's own format."""
    rows = [{"context": prompt, "choices": CHOICES[:3], "answer": i, "text": TEXT} for i, prompt in enumerate(PROMPTS[:2])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{context}}",
    }
    kinds = {
        "choice": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"},
        "answer": {"output_type": "generate_until", "doc_to_target": "{{choices[answer]}}", "generation_kwargs": {"max_gen_toks": 6}},
        "perplexity": {"output_type": "loglikelihood_rolling", "doc_to_target": "{{text}}"},
    }
    metrics = {"choice": "acc", "answer": "exact_match", "perplexity": "bits_per_byte"}
    for name, own in kinds.items():
        task = common | own | {"task": f"learnkv_{name}", "metric_list": [{"metric": metrics[name]}]}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))
    return tmp_path


NAMES = ["learnkv_choice", "learnkv_answer", "learnkv_perplexity"]


def evaluate(tasks, **settings):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(model="learnkv", tasks=NAMES, task_manager=manager, device="cpu", bootstrap_iters=0, **settings)


def test_results_of_lm_eval_say_what_ran(folder, tasks, tmp_path):
    save_gate(KVP(KVP.Config(), describe(load_model(str(folder))[0])), tmp_path / "gate", {})
    found = evaluate(tasks, model_args=f"pretrained={folder},gate={tmp_path / 'gate'},budget=0.4,num_sinks=2", batch_size=2)
    said = found["config"]["learnkv"]
    assert [said[name] for name in ("method", "budget", "budget_form", "num_sinks", "num_recent")] == ["kvp", 0.4, "ratio", 2, 16]
    assert (said["question_in_prefix"], said["decode"]) == (True, False)
    assert said["gate"] == str(tmp_path / "gate") and len(said["gate_hash"]) == 16
    assert said["weights_hash"] == weights_hash(load_model(str(folder))[0])
    assert json.loads(json.dumps(said)) == said
    assert set(found["results"]) == set(NAMES)


def test_answers_kept_of_another_budget_are_refused(folder, tasks, tmp_path):
    arguments, kept = f"pretrained={folder},method=key_diff,num_sinks=2,num_recent=4,budget=", str(tmp_path / "kept")
    first, again = (evaluate(tasks, model_args=f"{arguments}0.5", use_cache=kept)["results"] for _ in range(2))
    assert first == again
    with pytest.raises(ValueError, match="answers of another model, method, budget"):
        evaluate(tasks, model_args=f"{arguments}0.3", use_cache=kept)


@pytest.mark.parametrize("line", re.findall(r"^python -m learnkv\.lm_eval (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE))
def test_command_in_the_readme_has_arguments_that_lm_eval_and_our_model_know(line, monkeypatch):
    def load(name: str, dtype: torch.dtype) -> None:
        raise LookupError(name)  # everything else was looked at before

    monkeypatch.setattr(sys, "argv", ["lm_eval", *shlex.split(line)])
    monkeypatch.setattr(harness, "load_model", load)
    given = HarnessCLI().parse_args()
    with pytest.raises(LookupError, match="smollm2-135m"):
        get_model(given.model).create_from_arg_obj(given.model_args)
    gate = given.model_args.get("gate")
    assert gate is None or (ROOT / gate / "gate.json").is_file()


def command(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
    return config.status_of(lm_eval.run)


@pytest.mark.slow  # lm-eval reads its 15,000 task files first, some 10 seconds each time
def test_command_is_lm_evals_own_with_model_learnkv(folder, tasks, tmp_path, monkeypatch, capsys):
    model_args = f"pretrained={folder},method=snapkv(observation_window=4 kernel_size=3)+adaptive,budget=0.4"
    fixed = ["--model", "learnkv", "--include_path", str(tasks), "--tasks", "learnkv_choice,learnkv_answer", "--device", "cpu"]
    assert command(monkeypatch, *fixed, "--model_args", model_args, "--output_path", str(tmp_path / "out")) == 0
    assert "learnkv_choice" in capsys.readouterr().out
    (written,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(written.read_text())["config"]["learnkv"]["method"] == "snapkv(kernel_size=3 observation_window=4)+adaptive"
    assert command(monkeypatch, *fixed, "--model_args", "pretrained=smollm2-135m,method=snapkv,budgt=0.2") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: unknown argument of model learnkv: 'budgt'; nearest: budget"


def test_command_without_lm_eval_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(lm_eval, "find_spec", lambda name: None)
    assert command(monkeypatch) == 2
    assert "pip install 'learnkv[lm-eval]'" in capsys.readouterr().err
