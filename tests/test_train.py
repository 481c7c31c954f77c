"""The train command: traces, a gate, tables; and one line where something is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from learnkv import config
from learnkv.checkpoint import load_gate, load_with_card
from learnkv.evaluation.reward import last_queries, rewards, score_trace
from learnkv.heuristics.streaming_llm import StreamingLLM
from learnkv.locks import alone
from learnkv.methods import METHODS
from learnkv.models import load_model
from learnkv.traces import dataset
from learnkv.traces.dataset import TraceDataset
from learnkv.train import TrainCommand, name_of, run
from tests.observations import Row, observe
from tests.recording import byte_tokenizer, tiny_model
from tests.training_parts import BASE, made_folder, made_gate, made_trace

ROOT = Path(__file__).parents[1]
SCALES = [BASE.head_dim**-0.5] * BASE.num_layers


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe on a tiny model and prompts of our own, run in a folder of its own."""
    tiny_model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    lines = [
        {"context": f"The sky of day {i} is grey, its sea is {i} deep.", "question": "Which sky?", "answer": "grey"} for i in range(20)
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "tiny.yaml").write_text(
        f"""
model: {tmp_path / "model"}
prompts: {tmp_path / "mine.jsonl"}
gate: {{branch_width: 4, width: 6, permutations: 4}}
train: {{steps: 6, warmup: 2, ema_start: 2, eval_every: 3, save_every: 2, log_every: 1, batch: 2}}
"""
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tiny.yaml"


def without_gate(recipe) -> str:
    """The recipe for a method of other knobs."""
    Path("other.yaml").write_text("\n".join(line for line in recipe.read_text().splitlines() if not line.startswith("gate")))
    return "other.yaml"


def test_one_command_records_trains_and_compares(recipe, capsys):
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=1"]) == 0
    out = capsys.readouterr().out
    assert "0 there, 20 to record" in out
    folder = Path("checkpoints/runs/tiny")
    assert {"gate.json", "gate.safetensors", "recipe.yaml", "events", "last.ckpt"} == {path.name for path in folder.iterdir()}
    assert load_gate(folder).knobs()["width"] == 6 and load_with_card(folder)[1].train_seconds > 0
    for name in ("kvp", "random", "oracle", "streaming_llm", "key_diff", "key_norm", "snapkv", "h2o"):
        assert out.count(f"\n{name}") >= 2, name
    assert f"next: python -m learnkv.generate model={recipe.parent / 'model'} method=kvp+adaptive:{folder} compare=true" in out


def test_a_gate_recorded_with_the_question_inside_is_asked_with_it_inside(recipe, capsys):
    judge = ["method=judge_q", "gate.num_tokens=4", "record.question=inside", "record.also=[attention]", "train.steps=1", "table=1"]
    assert config.main(run, TrainCommand, [f"recipe={without_gate(recipe)}", *judge]) == 0
    out = capsys.readouterr().out
    assert "compressed with the question in the prompt, all but its last token (record.question=inside)" in out
    assert "\njudge_q " in out and "\njudge_q+adaptive_global " in out
    assert out.splitlines()[-1].endswith(f"gate={Path('checkpoints/runs/other')} evaluate.question=inside evaluate.count=20")


def test_prompts_that_the_model_cannot_repeat_cost_a_training_its_table_and_nothing_else(recipe, capsys):
    long = [{"context": f"Day {i}: " + "x" * 250, "question": "Which sky?", "answer": "grey"} for i in range(20)]
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, long)))
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "train.steps=1", "table=1"]) == 0
    out = capsys.readouterr().out
    assert "no table of answers: each held-out prompt is too long to be repeated" in out and "next: python -m learnkv.generate" in out


def test_a_run_that_another_ended_meanwhile_is_not_relabelled(recipe, capsys, monkeypatch):
    def meanwhile(*given):
        monkeypatch.setattr("learnkv.train.load_model", load_model)
        assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0", "train.lr=1e-3"]) == 0
        return load_model(*given)

    monkeypatch.setattr("learnkv.train.load_model", meanwhile)
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0", "train.lr=0.5"]) == 2
    assert "has train.lr=0.001, this run train.lr=0.5" in capsys.readouterr().err
    assert "lr: 0.001" in Path("checkpoints/runs/tiny/recipe.yaml").read_text()


@pytest.mark.parametrize("dry", ["false", "true"])
def test_recorded_cuts_are_refused_where_a_gate_learns_another_target(recipe, capsys, dry):
    cuts = ["record.cuts=2", "train.cut=recorded", "record.also=[hidden,reconstruction]", f"dry={dry}"]
    assert config.main(run, TrainCommand, [f"recipe={without_gate(recipe)}", "method=fast_kvzip", *cuts]) == 2
    assert "train.cut=recorded knows of an earlier end what its tokens' utility was, fast_kvzip learns" in capsys.readouterr().err


@pytest.mark.parametrize("dry", ["false", "true"])
def test_a_knob_that_is_no_finite_number_is_refused_by_its_name(recipe, capsys, dry):
    knobs = ["method=foresight", "record.also=[hidden,reconstruction]", "gate.reconstruction=.nan", f"dry={dry}"]
    assert config.main(run, TrainCommand, [f"recipe={without_gate(recipe)}", *knobs, "table=0"]) == 2
    assert "reconstruction=nan is no finite number" in capsys.readouterr().err


def test_a_gate_that_memory_cannot_hold_is_one_line(recipe, capsys):
    huge = ["method=kvzap", "record.also=[hidden,reconstruction_plus]", "gate.width=999999999999", "table=0"]
    assert config.main(run, TrainCommand, [f"recipe={without_gate(recipe)}", *huge]) == 2
    assert "a kvzap gate of these sizes can't be made" in capsys.readouterr().err


def test_rows_past_the_models_positions_are_refused_by_the_trace(recipe, capsys):
    rows = ["method=judge_q", "gate.num_tokens=500", "record.question=inside", "record.also=[attention]", "table=0"]
    assert config.main(run, TrainCommand, [f"recipe={without_gate(recipe)}", *rows]) == 2
    assert "the model has 512; give fewer rows (gate.num_tokens)" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["runs", "record.folder"])
def test_a_dry_run_refuses_a_file_in_the_place_of_a_folder(recipe, capsys, key):
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "dry=true", f"{key}=mine.jsonl"]) == 2
    assert "mine.jsonl is a file, where a folder should be made" in capsys.readouterr().err


def test_token_ids_are_recomputed_as_far_as_a_gate_reads(recipe, monkeypatch):
    seen, measure = set(), dataset.measure
    monkeypatch.setattr(dataset, "measure", lambda *at, also, **how: seen.add((at[1].split, *also)) or measure(*at, also=also, **how))
    of_ids = [f"recipe={without_gate(recipe)}", "record.mode=ids", "gate.width=4", "train.steps=1", "table=0"]
    assert config.main(run, TrainCommand, [*of_ids, "method=trimkv"]) == 0
    assert seen == {("heldout", "hidden")}
    assert config.main(run, TrainCommand, [*of_ids, "method=locret", "name=locret"]) == 0
    assert {name for split, *also in seen if split == "train" for name in also} == {"queries_pre_rope", "peak_logit"}


def test_token_ids_without_what_repeats_them_are_refused_where_a_gate_reads_it(recipe, capsys):
    assert config.main(run, TrainCommand, [f"recipe={without_gate(recipe)}", "record.mode=ids", "method=fast_kvzip"]) == 2
    assert "fast_kvzip trains on reconstruction, which" in capsys.readouterr().err


def test_a_folder_that_another_run_trains_into_is_refused_and_left_alone(recipe, capsys):
    folder = Path("checkpoints/runs/tiny")
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("the other's")
    with alone(folder, "training into"):
        assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0"]) == 2
    assert f"another process is training into {folder}" in capsys.readouterr().err
    assert (folder / "recipe.yaml").read_text() == "the other's"


def test_a_folder_in_the_place_of_the_last_checkpoint_is_named(recipe, capsys):
    folder = Path("checkpoints/runs/tiny/last.ckpt")
    folder.mkdir(parents=True)
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0", "resume=never"]) == 2
    assert f"{folder} is a folder, where this command keeps a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "name"), [("kvp", "kvp"), ("paper/kvp", "paper-kvp"), ("some/where/mine.yaml", "mine"), ("mine.yml", "mine")]
)
def test_recipes_of_one_name_in_two_folders_have_runs_of_their_own(recipe, name):
    assert name_of(recipe) == name


def test_the_same_command_again_changes_nothing(recipe, capsys):
    folder = Path("checkpoints/runs/tiny")
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0"]) == 0
    before = (folder / "gate.safetensors").read_bytes()
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0"]) == 0
    assert "20 there, 0 to record" in capsys.readouterr().out
    assert (folder / "gate.safetensors").read_bytes() == before


def test_a_run_of_another_recipe_is_not_continued_but_can_be_started_over(recipe, capsys):
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0"]) == 0
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0", "train.lr=0.5"]) == 2
    assert "train.lr=0.001, this run train.lr=0.5" in capsys.readouterr().err
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0", "train.lr=0.5", "resume=never"]) == 0
    assert load_gate("checkpoints/runs/tiny").METHOD == "kvp"


def test_a_knob_of_the_gate_that_is_given_once_and_left_out_later_is_another_recipe(recipe, capsys):
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0", "gate.unrotate=false"]) == 0
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0"]) == 2
    assert "has gate.unrotate=False, this run gate.unrotate=True" in capsys.readouterr().err
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0", "gate.unrotate=false", "gate.depth=2"]) == 0


def test_a_checkpoint_whose_recipe_is_gone_is_not_gone_on_from(recipe, capsys):
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0"]) == 0
    Path("checkpoints/runs/tiny/recipe.yaml").unlink()
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0", "train.seed=7"]) == 2
    assert "resume=never starts over" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["model=nowhere", "prompts=nowhere.jsonl", "prompts=one.jsonl", "record.dtype=int8", "record.train=-1"])
def test_a_refused_command_loses_nothing_of_the_run_that_it_would_start_over(recipe, wrong):
    Path("one.jsonl").write_text(Path("mine.jsonl").read_text().splitlines()[0])
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0"]) == 0
    before = {path: path.read_bytes() for path in Path("checkpoints/runs/tiny").rglob("*") if path.is_file()}
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "table=0", "resume=never", "gate.width=7", wrong]) == 2
    assert {path: path.read_bytes() for path in Path("checkpoints/runs/tiny").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("method=kvpp", "kvp"),
        ("name=../out", "name=../out"),
        ("train.seed=20251129194500", "train.seed=20251129194500"),
        ("gate.permutations=0", "permutations=0"),
        ("gate.pooling=1.5", "pooling=1.5"),
        ("gate.reach=0", "reach=0"),
        ("gate.reach=65", "1 to 64 positions"),
        ("gate.widht=3", "gate.widht|width"),
        ("gate.loss=listnett", "listnet"),
        ("gate.width=wide", "width"),
        ("train.cut=unifrom", "cut"),
        ("train.steps=0", "train.steps=0"),
        ("train.weight_decay=nan", "train.weight_decay=nan is no finite number"),
        ("train.min_lr=nan", "train.min_lr=nan is no finite number"),
        ("train.lr=inf", "train.lr=inf is no finite number"),
        ("train.clip=inf", "train.clip=inf is no finite number"),
        ("resume=maybe", "resume"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(recipe, capsys, wrong, says):
    assert config.main(run, TrainCommand, [f"recipe={recipe}", wrong]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error
    assert any(word in error for word in says.split("|"))
    assert not Path("checkpoints").exists()


def test_prompts_of_one_side_are_refused_before_anything_is_recorded(recipe, capsys):
    few = Path("mine.jsonl").read_text().splitlines()[:5]
    Path("few.jsonl").write_text("\n".join(few))
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "prompts=few.jsonl"]) == 2
    assert "none of the 5 prompts is of the heldout side" in capsys.readouterr().err
    assert not Path("data").exists()


def test_an_unwritable_folder_of_runs_is_one_line(recipe, capsys):
    Path("taken").write_text("")
    assert config.main(run, TrainCommand, [f"recipe={recipe}", "runs=taken"]) == 2
    assert "taken" in capsys.readouterr().err


def test_published_recipes_fit_the_command():
    for name in ("kvp", "paper/kvp"):
        command = config.load([f"recipe={name}"], TrainCommand)
        assert command.method == "kvp"


# ---- rewards of any scorer on traces


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> TraceDataset:
    return made_folder(tmp_path_factory.mktemp("traces"), train=2, heldout=2)


def row_of(trace, layer: int) -> Row:
    """The trace's layer as tests of scorers build it: the window holds its last queries."""
    n = len(trace.ids)
    queries = torch.zeros(BASE.num_query_heads, n, BASE.head_dim)
    queries[:, n - trace.window.shape[2] :] = trace.window[layer]
    return Row(trace.keys[layer], trace.values[layer], queries, queries, trace.ids, [list(range(n))] * 2, n, [torch.zeros(n, 0)] * 2)


@pytest.mark.parametrize("name", ["random", "streaming_llm", "key_diff", "key_norm", "snapkv"])
def test_a_heuristic_scores_a_trace_as_it_scores_a_cache(name):
    trace, scorer = made_trace(40), METHODS[name].build({})
    found = score_trace(scorer, trace, SCALES)
    for layer in range(BASE.num_layers):
        live = observe([row_of(trace, layer)], window=scorer.observation_window, layer=layer, num_layers=BASE.num_layers)
        assert torch.allclose(found[layer], scorer.score(live)[0], atol=1e-6)


def test_h2o_scores_a_trace_by_its_mass():
    trace = made_trace(40)
    assert torch.equal(score_trace(METHODS["h2o"].build({}), trace, SCALES), trace.mass)


def test_a_gate_scores_a_trace_through_an_observation_as_by_itself():
    trace, gate = made_trace(40), made_gate()
    assert torch.allclose(score_trace(gate, trace, SCALES), gate.score_trace(trace), atol=1e-6)


def test_no_more_of_the_window_is_held_than_a_scorer_asks_for():
    window = torch.arange(24.0).view(1, 2, 4, 3)
    assert last_queries(window, 0).shape == (1, 2, 0, 3)
    assert torch.equal(last_queries(window, 3), window[:, :, 1:]) and last_queries(window, 3).data_ptr() == window[:, :, 1:].data_ptr()
    padded = last_queries(window, 6)
    assert torch.equal(padded[:, :, 2:], window) and not padded[:, :, :2].any()


def test_the_oracle_has_reward_minus_one_and_nothing_is_better(traces):
    scorers = {name: METHODS[name].build({}) for name in ("random", "key_diff", "snapkv", "h2o")} | {"streaming_llm": StreamingLLM()}
    found = rewards(scorers, traces, SCALES)
    assert all((reward <= -1 + 1e-6).all() for reward in found.values())
    assert torch.allclose(rewards({"oracle": KeyOracle()}, traces, SCALES)["oracle"], torch.tensor(-1.0))


class KeyOracle(StreamingLLM):
    """Made traces are worth what their keys say."""

    def score(self, obs):
        return obs.keys[..., -1]


@pytest.mark.slow
def test_torchrun_trains_with_two_processes(recipe):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "learnkv.train", f"recipe={recipe}", "table=0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("next: python -m learnkv.generate") == 1
    assert load_gate("checkpoints/runs/tiny").METHOD == "kvp"
