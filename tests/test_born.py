"""Gates that score a token once, when it is born: what holds for each of them, whatever they read."""

from dataclasses import replace

import pytest
import torch

from learnkv import config
from learnkv.checkpoint import load_gate, save_gate
from learnkv.evaluation.reward import score_trace
from learnkv.methods import METHODS
from learnkv.models import describe
from learnkv.policy import Policy
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from learnkv.train import TrainCommand, config_of, refuse_lacking
from tests.born_parts import BORN, gate_for, live_scores, made, made_folder, model_of, recorded, remembered, train
from tests.tiny_models import left_padded, prompt
from tests.training_parts import batch_of, losses_over, power_fails, same

every_gate = pytest.mark.parametrize("name", BORN)


@every_gate
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
def test_a_trace_and_a_live_cache_score_identically(name, family):
    gate, trace = gate_for(name, family), recorded(40, family=family)
    live = live_scores(gate, model_of(family), trace.ids[None])
    torch.testing.assert_close(live[:, 0], gate.score_trace(trace), rtol=1e-6, atol=1e-6)


@every_gate
def test_chunks_and_decode_steps_score_as_one_prefill(name):
    gate, ids = gate_for(name), prompt(40)
    whole = live_scores(gate, model_of(), ids)
    torch.testing.assert_close(live_scores(gate, model_of(), ids, [17, 1, 15, 1, 1, 5]), whole, rtol=1e-5, atol=1e-5)


@every_gate
@pytest.mark.parametrize("plain_positions", [True, False])
def test_a_left_padded_row_is_scored_as_that_row_alone(name, plain_positions):
    gate, rows = gate_for(name), [prompt(n, seed=n)[0] for n in (40, 23)]
    ids, mask = left_padded(rows)
    rope = None if plain_positions else (mask.cumsum(-1) - 1).clamp(min=0)
    together = live_scores(gate, model_of(), ids, attention_mask=mask, position_ids=rope)
    for b, row in enumerate(rows):
        alone = live_scores(gate, model_of(), row[None])[:, 0]
        torch.testing.assert_close(together[:, b, :, : len(row)], alone, rtol=1e-5, atol=1e-5)


@every_gate
@torch.no_grad()
def test_a_token_keeps_its_score_while_others_go(name):
    gate, model, ids = gate_for(name), model_of(), prompt(40)
    whole = live_scores(gate, model, torch.cat([ids, prompt(6, seed=2)], 1))
    with attach(model):
        cache = EvictionCache(Policy(gate, 14, num_sinks=2, num_recent=4), model)
        for part in (ids, *prompt(6, seed=2).split(1, 1)):
            model(part, cache=cache)
    kept = cache.kept_positions()[0].long()  # what the first layer reads does not hang on what was evicted
    torch.testing.assert_close(remembered(cache)[0], whole[0].gather(2, kept), rtol=1e-5, atol=1e-5)


@every_gate
def test_rewards_on_traces_are_those_of_the_live_scores(name):
    gate, trace = gate_for(name), recorded(40)
    torch.testing.assert_close(score_trace(gate, trace, [8**-0.5] * 3), gate.score_trace(trace), rtol=1e-6, atol=1e-6)


@every_gate
def test_a_bfloat16_trace_is_scored_in_float32(name):
    gate, trace = gate_for(name), recorded(40)
    scores = gate.score_trace(trace.to(torch.bfloat16))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, gate.score_trace(trace), rtol=0.1, atol=0.1)


@every_gate
def test_save_then_load_gives_the_same_scores(name, tmp_path):
    gate, trace = gate_for(name), recorded(40)
    save_gate(gate, tmp_path, {})
    loaded = load_gate(tmp_path, model_of())
    assert loaded.config == gate.config
    assert torch.equal(loaded.score_trace(trace), gate.score_trace(trace))


@every_gate
@pytest.mark.parametrize(
    ("change", "says"),
    [({"num_layers": 7}, "7 layers x 2 KV heads .*cache has 3 layers"), ({"hidden_size": 48, "num_query_heads": 6}, "a token .*model has")],
)
def test_a_model_of_another_geometry_is_refused_with_both_sides(name, change, says):
    gate = made(name, replace(describe(model_of()), **change))
    with pytest.raises(ValueError, match=says):
        live_scores(gate, model_of(), prompt(9))


@every_gate
def test_a_trace_without_what_training_reads_is_refused_by_id(name):
    trace = recorded(40)
    for lacking in (replace(trace, targets={}), replace(trace, hidden=None, queries_pre_rope=None)):
        with pytest.raises(ValueError, match=rf"trace {trace.id} holds no .*record\.(also|mode)"):
            gate_for(name).loss(batch_of(lacking))


@every_gate
def test_gradient_reaches_every_weight(name):
    gate = gate_for(name)
    gate.loss(batch_of(recorded(40), recorded(30, 1)))["loss"].backward()
    idle = [key for key, p in gate.named_parameters() if p.grad is None or not p.grad.any() or not p.grad.isfinite().all()]
    assert idle == []


@every_gate
def test_the_loss_of_a_batch_is_the_mean_over_its_traces(name):
    gate, traces = gate_for(name), [recorded(40), recorded(30, 1)]
    found = gate.loss(batch_of(*traces))
    alone = torch.cat([gate.loss(batch_of(trace))["losses"] for trace in traces])
    torch.testing.assert_close(found["losses"], alone)
    torch.testing.assert_close(found["loss"], alone.mean())


@every_gate
def test_the_loss_falls_on_one_batch(name):
    gate, traces = gate_for(name), [recorded(40), recorded(30, 1)]
    gate.prepare(traces)
    losses = losses_over(gate, lambda step: batch_of(*traces, step=step), lr=2e-2, steps=60)
    assert losses[-1] < 0.8 * losses[0]


@every_gate
def test_the_shortest_context_has_scores_and_a_loss(name):
    gate, trace = gate_for(name), recorded(1)
    assert gate.score_trace(trace).shape == (3, 2, 1)
    assert gate.loss(batch_of(trace))["loss"].isfinite()


@every_gate
def test_interrupted_and_resumed_equals_uninterrupted(name, tmp_path):
    made_folder(tmp_path / "traces")
    whole = train(name, tmp_path / "traces", tmp_path / "whole", steps=6)
    with power_fails(type(whole), 5):
        train(name, tmp_path / "traces", tmp_path / "stopped", steps=6)
    assert same(train(name, tmp_path / "traces", tmp_path / "stopped", steps=6), whole)


@pytest.mark.parametrize("recipe", [*BORN, *(f"paper/{name}" for name in BORN if METHODS[name].paper)])
def test_a_recipe_records_what_its_method_reads(recipe):
    command = config.load([f"recipe={recipe}"], TrainCommand)
    config_of(command)
    refuse_lacking(command)
    with pytest.raises(ValueError, match=f"{command.method} trains on .*add it there, or take recipe={command.method}"):
        refuse_lacking(replace(command, record=replace(command.record, also=[], mode="targets")))


@pytest.mark.parametrize("name", ["fast_kvzip", "kvzap"])
def test_tokens_are_drawn_by_seed_step_and_trace_alone(name):
    gate, trace, other = gate_for(name, tokens=7), recorded(40), recorded(30, 1)
    alone = gate.loss(batch_of(trace))["losses"]
    torch.manual_seed(99)
    assert torch.equal(gate.loss(batch_of(other, trace))["losses"][1:], alone)
    assert not torch.equal(gate.loss(batch_of(trace, step=1))["losses"], alone)
    assert torch.equal(gate_for(name, tokens=40).loss(batch_of(trace))["losses"], gate_for(name).loss(batch_of(trace))["losses"])
