"""dry=true: what recording and training will take, said of every recipe without weights, and refused where training would refuse."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from learnkv import config, record, train
from learnkv.gates import GATES
from learnkv.models import describe, load_architecture
from learnkv.outline import outline, trained_tokens
from learnkv.record import RecordCommand
from learnkv.traces.record import RecordSettings, make_prompts, plan_recording
from learnkv.train import TrainCommand
from tests.hub_models import folder_of
from tests.recording import byte_tokenizer, files_of, tiny_model
from tests.training_parts import quick

TRAINING = [name for name in config.recipe_names() if "method" in config.read_recipe(name)]
PAPERS = [name for name in TRAINING if name.startswith("paper/")]


@pytest.fixture
def roomy(monkeypatch):
    """A disk of 100 TiB."""
    monkeypatch.setattr("learnkv.outline.free_bytes", lambda folder: 100 << 40)


def said(capsys) -> dict[str, str]:
    """The table that a dry run printed."""
    lines = [re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    return {name: value for name, value in lines}


def number(text: str, what: str) -> int:
    """The number before a word: `1,234 weights`."""
    return int(re.search(rf"([\d,]+) {what}", text)[1].replace(",", ""))  # type: ignore[index]


# recipe, model (the recipe's own first), further arguments, weights of the gate in whole or in millions
PUBLISHED = [
    ("kvp", "Qwen/Qwen2.5-7B-Instruct", [], 112 * (465_729 - 4 * 256 - 1)),  # as in tests/test_kvp.py
    ("lookaheadkv", "meta-llama/Llama-3.1-8B-Instruct", [], 20_553_728),
    ("lookaheadkv", "Qwen/Qwen3-8B", ["record.train=10"], 21_454_848),
    ("lookaheadkv", "meta-llama/Llama-3.2-1B-Instruct", ["record.train=10"], 5_402_624),
    ("judge_q", "meta-llama/Llama-3.1-8B-Instruct", [], 32 * 4096),
    ("fast_kvzip", "Qwen/Qwen2.5-7B-Instruct-1M", [], 51.4),
    ("fast_kvzip", "Qwen/Qwen3-8B", [], 94.5),
    ("fast_kvzip", "Qwen/Qwen3-14B", [], 157.4),
    ("kvzap", "Qwen/Qwen3-8B", [], 75.7),
    ("kvzap", "Qwen/Qwen3-8B", ["record.train=10", "gate.width=0"], 1.2),
    ("locret", "meta-llama/Llama-3.1-8B-Instruct", [], 201.6),
    ("trimkv", "Qwen/Qwen3-8B", [], 75.7),
    ("dms", "Qwen/Qwen3-8B", [], 36 * 4096 * 8),
    ("duo_attention", "meta-llama/Meta-Llama-3-8B-Instruct", [], 256),
]
OWN = {recipe: model for recipe, model, *_ in reversed(PUBLISHED)}


@pytest.mark.parametrize(("recipe", "model", "more", "weights"), PUBLISHED)
def test_every_paper_recipe_passes_a_dry_run_with_the_published_size(recipe, model, more, weights, tmp_path, monkeypatch, capsys, roomy):
    folder = folder_of(model, tmp_path)
    monkeypatch.chdir(tmp_path)
    before = files_of(tmp_path)
    assert config.main(train.run, TrainCommand, [f"recipe=paper/{recipe}", f"model={folder}", *more, "dry=true"]) == 0
    found = number(said(capsys)["gate"], "weights")
    assert found == weights if isinstance(weights, int) else round(found / 1e6, 1) == weights
    assert files_of(tmp_path) == before


def test_every_paper_recipe_is_in_that_list_with_the_model_it_names():
    assert {f"paper/{recipe}" for recipe in OWN} == {name for name in config.recipe_names() if name.startswith("paper/")}
    assert {recipe: str(config.read_recipe(f"paper/{recipe}").model) for recipe in OWN} == OWN


@pytest.mark.parametrize("recipe", sorted(set(TRAINING) - set(PAPERS)))
def test_every_recipe_on_the_bundled_model_passes_a_dry_run(recipe, tmp_path, monkeypatch, capsys, roomy):
    sizes = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
    tiny_model().config.__class__(vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True, **sizes).save_pretrained(
        tmp_path / "smollm"
    )
    monkeypatch.chdir(tmp_path)
    assert config.main(train.run, TrainCommand, [f"recipe={recipe}", "model=smollm", "dry=true"]) == 0
    assert number(said(capsys)["model"], "weights") == 134_515_008


def test_gemma_3_has_its_full_attention_layers_counted_and_is_refused_by_probe_tokens(tmp_path, monkeypatch, capsys, roomy):
    folder = folder_of("google/gemma-3-12b-it", tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = [f"model={folder}", "record.train=4", "dry=true"]
    assert config.main(train.run, TrainCommand, ["recipe=paper/fast_kvzip", *arguments]) == 0
    assert "8 evictable layers x 8 KV heads of 256 dimensions" in said(capsys)["model"]
    assert config.main(train.run, TrainCommand, ["recipe=paper/lookaheadkv", *arguments]) == 2
    assert "40 sliding-window layers of 48" in capsys.readouterr().err


# ---- against what recording and training find


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with a tiny model and its tokenizer."""
    tiny_model(positions=4096).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model"


def test_the_architecture_is_the_loaded_models_but_for_the_weights(tiny):
    model = tiny_model(positions=4096)
    model.config.name_or_path = str(tiny)
    assert describe(load_architecture(str(tiny))) == replace(describe(model), weights_hash="")


@pytest.mark.parametrize(
    "changes", [{}, {"question": "inside", "future": "response"}, {"mode": "ids"}, {"also": ["reconstruction"]}], ids=str
)
def test_the_outline_is_the_plans_and_a_little_above_it(tiny, changes):
    settings = RecordSettings(train=6, heldout=3, num_tokens=[900, 1100], kinds=["codes", "chain", "records"], **changes)
    found = outline(str(tiny), settings).plan
    model, tokenizer = tiny_model(positions=4096), byte_tokenizer()
    plan = plan_recording(model, tokenizer, make_prompts(settings, tokenizer), tiny / "traces", settings)
    assert [(job.kind, job.split, len(job.questions)) for job in found.jobs] == [
        (job.kind, job.split, len(job.questions)) for job in plan.jobs
    ]
    assert 0.9 * plan.bytes_new < found.bytes_new < 1.3 * plan.bytes_new
    assert plan.num_tokens < 1.1 * found.num_tokens


def test_inside_the_context_a_question_leaves_one_token_outside_in_the_outline_too(tiny):
    settings = RecordSettings(train=2, heldout=1, num_tokens=[900], kinds=["codes"], question="inside")
    assert {len(job.questions[0].question) for job in outline(str(tiny), settings).plan.jobs} == {1}


def test_own_prompts_are_counted_by_their_characters(tiny):
    lines = [f'{{"context": "{"word " * 40}{i}", "question": "Which?", "answer": "{i}"}}' for i in range(10)]
    Path("mine.jsonl").write_text("\n".join(lines))
    plan = outline(str(tiny), RecordSettings(), "mine.jsonl").plan
    assert [job.split for job in plan.jobs] == ["train"] * 9 + ["heldout"]
    assert {len(job.ids) for job in plan.jobs} == {51}


def test_gates_that_run_the_model_say_for_how_many_tokens(tiny):
    settings = RecordSettings(train=4, heldout=2, num_tokens=[100], kinds=["prose"])
    found = outline(str(tiny), settings)
    base, steps = describe(found.model), quick(steps=10, batch=3, eval_every=5)
    count = {name: trained_tokens(found, GATES[name](GATES[name].Config(), base), steps) for name in ("kvp", "trimkv", "judge_q")}
    n = 100 + len(found.plan.jobs[0].questions[0].answer)
    assert count == {"kvp": 0, "trimkv": 10 * 3 * 3 * n, "judge_q": 10 * 3 * 2 * 32}
    again = outline(str(tiny), replace(settings, mode="ids"))
    assert trained_tokens(again, GATES["kvp"](GATES["kvp"].Config(), base), steps) == (10 * 3 + 2 * 2) * n


def test_record_says_it_too_and_writes_nothing(tiny, capsys):
    before = files_of(tiny.parent)
    arguments = [f"model={tiny}", "record.train=2", "record.heldout=1", "record.num_tokens=900", "dry=true"]
    assert config.main(record.run, RecordCommand, arguments) == 0
    found = said(capsys)
    assert found["prompts"] == "3 of 2 kinds, 1 of them held out" and found["contexts"] == "2,700 tokens, at most"
    assert files_of(tiny.parent) == before


# ---- refusals


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("gate.permutations=0", "permutations=0"),
        ("gate.widht=3", "widht"),
        ("train.cut=recorded", "record.cuts=4"),
        ("record.train=0", "none of the 1 prompts is of the train side"),
        ("record.num_tokens=4096", "has 4096 positions"),
        ("record.num_tokens=4090", "has 4090 tokens of context and"),
        ("record.num_tokens=20", "64 or more"),
        ("record.kinds=[kodes]", "codes"),
        ("model=nobody/such-model", "did not load"),
    ],
)
def test_what_training_refuses_is_refused_in_one_line(tiny, wrong, says, capsys):
    arguments = [f"model={tiny}", "record.train=2", "record.heldout=1", "record.num_tokens=900", wrong, "dry=true"]
    assert config.main(train.run, TrainCommand, arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error and says in error


def test_a_file_in_the_place_of_the_traces_folder_is_refused_for_recording_too(tiny, capsys):
    Path("file").write_text("")
    assert config.main(record.run, RecordCommand, [f"model={tiny}", "record.train=2", "record.folder=file", "dry=true"]) == 2
    assert "file is a file, where a folder should be made" in capsys.readouterr().err


def test_too_little_disk_is_refused_after_the_table(tiny, capsys, monkeypatch):
    monkeypatch.setattr("learnkv.outline.free_bytes", lambda folder: 1)
    for run, schema in ((train.run, TrainCommand), (record.run, RecordCommand)):
        assert config.main(run, schema, [f"model={tiny}", "record.num_tokens=900", "record.train=2", "dry=true"]) == 2
        out, error = capsys.readouterr()
        assert "disk" in out and "free some, record fewer" in error


# ---- and the whole command, on a tiny model


@pytest.mark.slow
@pytest.mark.parametrize("recipe", PAPERS)
def test_every_paper_recipe_runs_to_its_end(recipe, tiny, capsys):
    short = ["record.train=2", "record.heldout=1", "record.num_tokens=1000", "record.max_new_tokens=4", "train.steps=2", "train.batch=2"]
    assert config.main(train.run, TrainCommand, [f"recipe={recipe}", f"model={tiny}", *short, "train.eval_every=1", "table=0"]) == 0
    assert "next: python -m learnkv." in capsys.readouterr().out
    assert {"gate.json", "last.ckpt"} <= set(os.listdir(f"checkpoints/runs/{recipe.replace('/', '-')}"))
