"""The benchmark says what it measured; what it measures is not timed here."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from learnkv import bench, config, ops
from learnkv.checkpoint import save_gate
from learnkv.evaluation import kernel_speed, pipeline_speed, roofline, speed
from learnkv.evaluation.op_cases import cases
from learnkv.evaluation.overhead import overhead
from learnkv.evaluation.pipeline_speed import PipelineSettings
from learnkv.evaluation.roofline import Case, Ceilings, Prepared, Work
from learnkv.evaluation.speed import BenchSettings
from learnkv.evaluation.stream import CONTENDERS, StreamSettings, listed, losses, perplexities, text_of
from learnkv.evaluation.whole_model import Whole
from learnkv.gates import GATES
from learnkv.gates.kvp import KVP, KVPConfig
from learnkv.models import describe
from learnkv.training import TrainSettings
from tests.recording import byte_tokenizer, tiny_model

SMALL = BenchSettings(num_tokens=200, steps=1, turns=1, stream=96, chunk=16, stream_budget=40, batch=2, batch_tokens=60)


def test_every_figure_stands_beside_what_it_is_compared_with():
    figures = list(speed.runtime(tiny_model(), SMALL))
    assert len(figures) == 7
    assert sum("DynamicCache" in f.what + f.value for f in figures) == 4
    assert [f.bound for f in figures if f.bound] == ["at most 1.10 x", "at least 1.35 x", "at most 12%", "at most 3%", "at most 56"]


def test_chunked_prefill_never_holds_more_than_budget_and_chunk():
    assert speed.chunked(tiny_model(), SMALL).value == "56 tokens per head"


def test_kvpress_stands_beside_where_its_python_is_given(tmp_path):
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho loading; echo '{"full_ms": 30.0, "ms": 60.0, "full_bytes": 100, "bytes": 100}'""")
    python.chmod(0o755)
    figure = speed.beside_kvpress(tiny_model(), BenchSettings(kvpress=str(python)))
    assert figure.value == "60.0 ms, 0.50 x faster than its full cache, holds 100% of it"


def test_a_python_without_kvpress_is_named_with_its_last_word():
    with pytest.raises(ValueError, match="ended with 1: ModuleNotFoundError"):
        speed.beside_kvpress(tiny_model(), BenchSettings(kvpress=sys.executable))


def test_a_program_that_is_no_python_is_named():
    with pytest.raises(ValueError, match=r"bench\.kvpress=/bin/true gave no figures but 'nothing'"):
        speed.beside_kvpress(tiny_model(), BenchSettings(kvpress="/bin/true"))


def test_the_fastest_turn_counts_and_the_first_does_not():
    seconds = iter([0, 0, 0, 5, 5, 7, 7, 8])  # begin and end of each turn: 0, 5, 2, 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(speed.time, "perf_counter", lambda: next(seconds))
        assert speed.in_turns({"one": lambda: None}, turns=3) == {"one": 1}


def test_the_loss_of_a_stream_in_chunks_is_that_of_one_forward():
    model, ids = tiny_model(), torch.randint(0, 60, (41,))
    want = torch.nn.functional.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:], reduction="none")
    torch.testing.assert_close(losses(model, ids, None, 7, iter), want, atol=1e-5, rtol=0)


def test_each_contender_of_a_stream_has_its_line_with_a_perplexity_per_run():
    model = tiny_model()
    figures = list(perplexities(model, byte_tokenizer(), StreamSettings(num_tokens=150, budget=48, chunk=16)))
    assert len(figures) == 1 + len(CONTENDERS)
    runs = -(-149 // model.config.max_position_embeddings)
    assert [f.value.count("/") + 1 for f in figures[1:]] == [runs] * len(CONTENDERS)
    assert listed(torch.tensor([0.0, 0.0, 1.0]), 2) == "1.00 / 2.72"


def test_a_stream_longer_than_the_texts_at_hand_is_refused():
    with pytest.raises(ValueError, match="texts give"):
        text_of(byte_tokenizer(), 10**8)


def test_overhead_of_each_method_stands_beside_the_plain_prefill_of_the_same_run(tmp_path):
    model = tiny_model()
    save_gate(KVP(KVPConfig(), describe(model)), tmp_path / "gate", {})
    settings = BenchSettings(methods=["snapkv+adaptive", "kvzip", f"kvp:{tmp_path / 'gate'}"], overhead_tokens=60, turns=1, kept=0.5)
    plain, *figures = overhead(model, byte_tokenizer(), settings)
    assert plain.what == "prefill of 60 tokens, DynamicCache"
    assert [f.what for f in figures] == [f"prefill, `{method}` to 50%" for method in settings.methods]
    assert all(" x DynamicCache's" in f.value for f in figures) and [f.bound for f in figures] == ["", "", "at most 1.05 x"]


@pytest.mark.parametrize("method", ["full", "oracle"])
def test_overhead_of_what_evicts_nothing_or_knows_the_question_is_refused(method):
    with pytest.raises(ValueError, match=f"bench.methods names {method}"):
        list(overhead(tiny_model(), byte_tokenizer(), BenchSettings(methods=[method])))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["walking"], "walking"),
        (["kernels", "budget_s=0"], "budget_s=0.0 are seconds"),
        (["kernels", "dry=true", "arch=91"], "unknown arch '91'; nearest: 90"),
        (["kernels", "device=cuda"], "no CUDA device"),
        (["stream", "dry=true"], "dry=true foretells part=kernels"),
        (["train", "method=kvq"], "kvp"),
        (["record", "pipeline.traces=0"], "pipeline.traces=0"),
        (["overhead", "bench.overhead_tokens=0"], "bench.overhead_tokens=0 must be 1 or more"),
        (["overhead", "bench.methods=[snapvk]"], "nearest: snapkv"),
        (["overhead", "bench.methods=[]"], "bench.methods is empty"),
        (["runtime", "bench.turns=0"], "bench.turns=0 must be 1 or more"),
        (["runtime", "bench.kept=2"], "fraction of tokens kept"),
        (["runtime", "bench.token=3"], "num_tokens"),
        (["runtime", "bench.kvpress=/no/python"], "is no program"),
        (["runtime", "bench.stream_budget=1"], "budget=1 is smaller"),
        (["stream", "stream.budget=1"], "budget=1 is smaller"),
        (["stream", "stream.num_tokens=1"], "stream.num_tokens=1 must be 2 or more"),
        (["stream", "stream.chunk=0"], "stream.chunk=0 must be 1 or more"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(argv, says, capsys):
    assert config.main(bench.run, bench.BenchCommand, argv, words=("part",)) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


@pytest.mark.parametrize("methods", ["snapvk", "oracle", "kvp:no/folder*"])
def test_a_mistake_in_the_methods_does_not_wait_for_the_model(methods, monkeypatch):
    monkeypatch.setattr(bench, "load_model", lambda *_: pytest.fail("the model was loaded"))
    assert config.main(bench.run, bench.BenchCommand, ["overhead", f"bench.methods=[{methods}]"], words=("part",)) == 2


# ---- ops and pipeline

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_case_is_right_at_a_small_odd_size(dtype):
    kernel_speed.refuse_wrong(CPU, dtype)


def test_an_op_that_is_wrong_is_never_timed(monkeypatch):
    wrong = Case("select", "here", lambda *at: Prepared(lambda: torch.ones(3), lambda: torch.full((3,), 2.0), {}), lambda t: Work(1), 1.0)
    monkeypatch.setattr(kernel_speed, "cases", lambda sizes: [wrong])
    with pytest.raises(RuntimeError, match=r"select, here: error 5\.0e-01"):
        kernel_speed.refuse_wrong(CPU, torch.float32)


def test_every_op_of_the_door_that_moves_or_computes_has_a_case():
    named = {case.op for case in cases("tiny")}
    assert named >= {"attend", "attend_with_mass", "column_mass", "select", "compact", "append_kv", "page_minmax", "page_bound"}
    assert named >= {"mlp_scorer", "gate_scorer", "pl_logprob", "budget_reward"} and all(hasattr(ops, name) for name in named)


def test_the_floor_is_the_slowest_of_bytes_products_and_exponentials():
    ceilings = Ceilings(bytes=100.0, flops=1000.0, exps=10.0)
    floors = {"memory": Work(200, 100, 1), "matrix": Work(1, 5000, 1), "exp": Work(1, 1, 30)}
    assert {ceilings.bound(work): ceilings.floor(work) for work in floors.values()} == {"memory": 2.0, "matrix": 5.0, "exp": 3.0}
    assert all(ceilings.bound(work) == name for name, work in floors.items())


def test_a_baseline_that_fails_is_named_and_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(roofline, "SECONDS_A_CASE", 0.0)
    one = lambda: torch.ones(1)  # noqa: E731
    case = Case("op", "here", lambda *at: Prepared(one, one, {"broken": lambda: 1 / 0, "fine": one}), lambda t: Work(8, 8), 2.0)
    line = roofline.measure(case, CPU, torch.float32, Ceilings(8.0, 8.0, 8.0))
    assert line.baseline == "fine" and line.failed == {"broken": "ZeroDivisionError: division by zero"}
    assert (line.floor, line.predicted, line.error) == (1.0, 2.0, 0.0)


def test_a_run_within_a_budget_says_what_it_left_out_and_leaves_json_and_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernel_speed, "cases", lambda sizes: list(cases("tiny")))
    monkeypatch.setattr(roofline, "SECONDS_A_CASE", 0.0)
    monkeypatch.setattr(kernel_speed, "LAPTOP", Whole(2, 2, 2, 8, (90,), (200, 40), 2))
    out = tmp_path / "there" / "kernels"
    assert config.main(bench.run, bench.BenchCommand, ["part=kernels", "device=cpu", "budget_s=0.001", f"out={out}"]) == 0
    said = capsys.readouterr().out
    assert said.count("not measured, the time was used up") == len(list(cases("tiny"))) + 1
    assert config.main(bench.run, bench.BenchCommand, ["part=kernels", "device=cpu", f"out={out}"]) == 0
    assert "not measured" not in capsys.readouterr().out
    found = json.loads(out.with_suffix(".json").read_text())
    assert len(found["lines"]) == len(list(cases("tiny"))) and not found["left_out"] and found["machine"]["torch"]
    assert [f["what"].rpartition(", ")[2] for f in found["whole"]] == ["full", "SnapKV to 40"]
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_a_dry_run_compiles_every_kernel_and_foretells_every_case(monkeypatch, capsys):
    build = SimpleNamespace(registers=80, spill_bytes=0, shared_bytes=2048, shared_limit=4096, matrix={"HGMMA": 8}, wide_loads=3)
    monkeypatch.setattr(ops, "builds", lambda arch: iter([("one bf16", build), ("two bf16", build)]))
    assert config.main(bench.run, bench.BenchCommand, ["part=kernels", "dry=true"]) == 0
    said = capsys.readouterr().out
    assert "| one bf16 | 80 | 0 | 2 | 8 HGMMA | 3 |" in said and "compiled: 2 kernels for 90" in said
    assert all(case.name in said for case in cases("gpu"))
    assert "device=cuda dtype=bfloat16 budget_s=400" in said


def test_recording_stands_beside_a_forward():
    recording = list(pipeline_speed.recording(tiny_model(), byte_tokenizer(), PipelineSettings(traces=2, num_tokens=300, turns=1)))
    assert [f.what.split(",")[0] for f in recording] == ["plain forward", "recording", "stored"]


@pytest.mark.parametrize("method", GATES)
def test_training_stands_beside_one_agent_at_a_time_or_where_it_runs_the_model_beside_a_forward(method):
    model, settings = tiny_model(positions=1024), PipelineSettings(traces=2, num_tokens=300, turns=1)
    all_heads, beside = pipeline_speed.training(model, byte_tokenizer(), method, GATES[method].Config(), TrainSettings(), settings)
    assert f"training step of {method}, " in all_heads.what and "all 4 heads" in all_heads.what
    if method in ("lookaheadkv", "judge_q", "trimkv", "dms", "duo_attention"):
        assert "a plain forward of them" in beside.what and "the step takes" in beside.value
    else:
        assert "one agent 4 times" in beside.what and "x all at once" in beside.value
