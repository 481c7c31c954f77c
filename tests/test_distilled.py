"""What every gate that is distilled end to end promises: it trains, it scores a trace as a live cache, it comes back from disk."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from learnkv import config
from learnkv.checkpoint import load_gate, save_gate
from learnkv.evaluation.reward import score_trace
from learnkv.gates import GATES
from learnkv.gates.base import Batch
from learnkv.gates.distilled import DistilledGate, Sequence, divergence
from learnkv.train import TrainCommand, run
from learnkv.training import fit
from tests.distillation_parts import SMALL, base, live_scores, made_folder, made_gate, made_trace, model
from tests.recording import byte_tokenizer, tiny_model
from tests.training_parts import losses_over, power_fails, quick, same

every_gate = pytest.mark.parametrize("name", SMALL)


def batch_of(*traces, step: int = 4) -> Batch:
    return Batch(traces, seed=0, step=step)


# ---- sequences and losses


def test_a_sequence_is_the_context_and_every_question_with_its_answer():
    trace = made_trace(20)
    sequence = Sequence.of(trace, torch.device("cpu"))
    parts = [trace.ids, *(x for q in trace.questions for x in (q.question, q.answer))]
    assert torch.equal(sequence.ids, torch.cat(parts)) and sequence.n == 20
    assert sequence.rows("all").tolist() == list(range(35))
    assert sequence.rows("continuation").tolist() == list(range(19, 35))
    assert sequence.rows("answers").tolist() == [24, 25, 26, 32, 33, 34]  # each a token before the answer's


def test_questions_that_the_model_has_no_positions_for_are_left_out():
    trace = made_trace(20)
    sequence = Sequence.of(trace, torch.device("cpu"), 35)
    assert torch.equal(sequence.ids, torch.cat([trace.ids, trace.questions[0].question, trace.questions[0].answer]))


def test_the_models_own_response_stands_for_the_answer():
    trace = made_trace(20, questions=1)
    asked = replace(trace.questions[0], response=torch.tensor([1, 2]))
    sequence = Sequence.of(replace(trace, questions=[asked]), torch.device("cpu"))
    assert sequence.ids[-2:].tolist() == [1, 2] and sequence.answered.sum() == 2


@pytest.mark.parametrize("rows", [3, 256])
def test_divergence_is_the_formula_in_either_direction(rows, monkeypatch):
    monkeypatch.setattr("learnkv.gates.distilled.ROWS", rows)
    plain, gated = torch.randn(2, 10, 7, dtype=torch.float64, requires_grad=True)
    p, q = plain.softmax(-1), gated.softmax(-1)
    assert divergence(plain, gated, "forward").item() == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-5)
    assert divergence(plain, gated, "reverse").item() == pytest.approx((q * (q / p).log()).sum(-1).mean().item(), rel=1e-5)
    assert divergence(plain, plain, "forward").item() == pytest.approx(0, abs=1e-6)


def test_a_trace_without_answers_is_refused_by_its_id():
    trace = made_trace(20)
    with pytest.raises(ValueError, match=trace.id):
        made_gate("duo_attention").loss(batch_of(replace(trace, questions=[])))


@every_gate
def test_a_gate_that_has_met_no_model_says_so(name):
    gate = GATES[name](SMALL[name], base())
    with pytest.raises(ValueError, match=r"gate\.meet\(model\)"):
        gate.loss(batch_of(made_trace(20)))


# ---- training


@every_gate
def test_gradient_reaches_every_weight_of_a_fresh_gate(name):
    torch.manual_seed(0)
    gate = GATES[name](SMALL[name], base())
    gate.meet(model())
    gate.loss(batch_of(made_trace(40), step=0))["loss"].backward()
    assert [n for n, p in gate.named_parameters() if p.grad is None or not p.grad.any() or not p.grad.isfinite().all()] == []


@every_gate
def test_loss_falls_on_one_batch(name):
    gate, batch = made_gate(name), batch_of(made_trace(40))
    losses = losses_over(gate, lambda step: batch, lr={"dms": 1e-3, "trimkv": 3e-2, "duo_attention": 2e-2}[name], steps=25)
    assert losses[-1] < 0.9 * losses[0]


@every_gate
def test_a_batch_is_the_mean_of_its_traces(name):
    gate, traces = made_gate(name), [made_trace(24), made_trace(31, 1)]
    alone = torch.cat([gate.loss(batch_of(t))["losses"] for t in traces])
    together = gate.loss(batch_of(*traces))
    assert torch.allclose(together["losses"], alone, atol=1e-5)
    assert together["loss"].item() == pytest.approx(alone.mean().item(), abs=1e-5)
    together["loss"].backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in gate.parameters())


@every_gate
def test_the_model_is_left_as_it_was(name):
    trace, lm = made_trace(24), model()
    before = lm(trace.ids[None]).logits
    made_gate(name).loss(batch_of(trace))["loss"].backward()
    assert torch.equal(lm(trace.ids[None]).logits, before)
    assert not any(p.grad is not None for p in lm.parameters()) and not any(m._forward_pre_hooks for m in lm.modules())


@every_gate
def test_mixed_precision_trains(name):
    gate, batch = made_gate(name), batch_of(made_trace(40))
    want = gate.loss(batch)["loss"].item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = gate.loss(batch)["loss"]
    loss.backward()
    assert loss.item() == pytest.approx(want, rel=0.2)
    assert all(p.grad.isfinite().all() and p.grad.any() for p in gate.parameters())


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return made_folder(tmp_path_factory.mktemp("traces"))


def trained(name: str, traces, run) -> DistilledGate:
    gate = fit(made_gate(name), traces.split("train"), traces.split("heldout"), run, quick(steps=8))
    assert isinstance(gate, DistilledGate)
    return gate


@every_gate
def test_interrupted_and_resumed_equals_uninterrupted(name, traces, tmp_path):
    whole = trained(name, traces, tmp_path / "whole")
    with power_fails(DistilledGate, 6):
        trained(name, traces, tmp_path / "run")
    assert same(trained(name, traces, tmp_path / "run"), whole)
    start, end = made_gate(name).state_dict(), whole.state_dict()
    assert not any(torch.equal(start[key], end[key]) for key in end)


TINY = """
method: {method}
model: {folder}/model
prompts: {folder}/mine.jsonl
record: {{also: {also}}}
gate: {knobs}
train: {{steps: 4, warmup: 2, ema_start: 2, eval_every: 2, save_every: 2, log_every: 1}}
"""


@pytest.mark.parametrize(
    ("method", "also", "knobs"),
    [
        ("trimkv", "[hidden]", "{width: 4, budget: 8}"),
        ("dms", "[block_input]", "{window: 4, ratio_steps: 2}"),
        ("duo_attention", "[]", "{num_sinks: 2, num_recent: 4}"),
    ],
)
def test_one_command_records_trains_and_compares(method, also, knobs, tmp_path, monkeypatch, capsys):
    tiny_model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    lines = [{"context": f"The sky of day {i} is grey.", "question": "Which sky?", "answer": "grey"} for i in range(10)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "tiny.yaml").write_text(TINY.format(method=method, folder=tmp_path, also=also, knobs=knobs))
    monkeypatch.chdir(tmp_path)
    assert config.main(run, TrainCommand, ["recipe=tiny.yaml", "table=1"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"\n{method}") >= 3
    assert isinstance(load_gate("checkpoints/runs/tiny"), GATES[method])
    if also != "[]":
        assert config.main(run, TrainCommand, ["recipe=tiny.yaml", "record.also=[]"]) == 2
        assert f"{method} trains on {also[1:-1]}" in capsys.readouterr().err


# ---- serving


@every_gate
def test_a_trace_and_a_live_cache_score_identically(name):
    gate, trace = made_gate(name), made_trace(40)
    (live,) = live_scores(gate, [trace.ids])
    assert torch.allclose(live, gate.score_trace(trace), rtol=1e-6, atol=1e-6)
    assert torch.allclose(score_trace(gate, trace, [1.0] * base().num_layers), live, rtol=1e-6, atol=1e-6)


@every_gate
def test_left_padded_rows_score_as_alone(name):
    gate, traces = made_gate(name), [made_trace(40), made_trace(23, 1)]
    for live, trace in zip(live_scores(gate, [t.ids for t in traces]), traces, strict=True):
        assert torch.allclose(live, gate.score_trace(trace), rtol=1e-4, atol=1e-4)


@every_gate
@pytest.mark.parametrize("sizes", [[9, 1, 17, 13], [38, 1, 1], [1] * 5 + [35]], ids=str)
def test_chunks_and_decode_steps_score_as_one_prefill(name, sizes):
    gate, traces = made_gate(name), [made_trace(40), made_trace(23, 1)]
    for live, trace in zip(live_scores(gate, [t.ids for t in traces], sizes), traces, strict=True):
        assert torch.allclose(live, gate.score_trace(trace), rtol=1e-4, atol=1e-4)


@every_gate
def test_save_then_load_gives_the_same_scores(name, tmp_path):
    gate, trace = made_gate(name), made_trace(30)
    save_gate(gate, tmp_path, {"recipe": name})
    loaded = load_gate(tmp_path, model())
    assert loaded.config == gate.config and torch.equal(loaded.score_trace(trace), gate.score_trace(trace))


@every_gate
def test_a_cache_of_another_geometry_is_refused(name):
    gate = GATES[name](SMALL[name], replace(base(), num_layers=5))
    with pytest.raises(ValueError, match="5 layers x 2 KV heads of 8 dimensions"):
        live_scores(gate, [made_trace(20).ids])


@pytest.mark.parametrize(("name", "field"), [("trimkv", "hidden"), ("dms", "block_input")])
def test_a_trace_that_lacks_what_a_gate_scores_by_is_refused_by_its_id(name, field):
    trace = replace(made_trace(20), **{field: None})
    with pytest.raises(ValueError, match=rf"{trace.id} holds no {field}.*record\.also=\[{field}\]"):
        made_gate(name).score_trace(trace)
    assert list(GATES[name].READS) == [field]


@every_gate
def test_half_precision_traces_are_scored_in_float32(name):
    gate, trace = made_gate(name), made_trace(30)
    scores = gate.score_trace(trace.to(torch.bfloat16))
    assert scores.dtype == torch.float32 and scores.shape == (3, 2, 30)
    inner = slice(0, -1)  # the last token of dms waits for its decision
    assert torch.allclose(scores[..., inner], gate.score_trace(trace)[..., inner], rtol=0.2, atol=2.0)
