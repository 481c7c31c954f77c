"""LookaheadKV and Judge Q: what both promise as gates."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from learnkv import config
from learnkv.checkpoint import load_gate, save_gate
from learnkv.evaluation.reward import score_trace
from learnkv.gates.probe_tokens import ProbeTokens
from learnkv.models import describe
from learnkv.observation import NOT_SCORED, pooled
from learnkv.policy import Policy
from learnkv.runtime.attach import attach, evict
from learnkv.runtime.cache import EvictionCache
from learnkv.train import TrainCommand, run
from tests.probe_parts import SMALL, folder_of_traces, gate_of, ids, model, moved_gate, served, trace, train
from tests.recording import byte_tokenizer, tiny_model
from tests.tiny_models import left_padded, tiny
from tests.training_parts import Noting, batch_of, losses_over, power_fails, same

methods = pytest.mark.parametrize("method", SMALL)


# ---- training


@methods
def test_loss_falls_on_one_batch(method):
    gate, batch = gate_of(method), batch_of(trace(24, 1), trace(31, 2))
    losses = losses_over(gate, lambda step: batch, lr=3e-3 if method == "lookaheadkv" else 3e-2, steps=40)
    assert losses[-1] < 0.8 * losses[0]


@methods
def test_gradient_reaches_every_weight_in_the_first_step_and_none_of_the_model(method):
    gate = gate_of(method)
    gate.loss(batch_of(trace(24, 1)))["loss"].backward()
    idle = [name for name, p in gate.named_parameters() if p.grad is None or not p.grad.any() or not p.grad.isfinite().all()]
    assert idle == []
    assert all(p.grad is None for p in model().parameters())


@methods
def test_a_batch_is_the_mean_of_its_traces(method):
    gate, traces = gate_of(method), (trace(24, 1), trace(31, 2))
    alone = [gate.loss(batch_of(t))["loss"] for t in traces]
    together = gate.loss(batch_of(*traces))
    assert torch.allclose(together["losses"], torch.stack(alone), atol=1e-7)
    assert torch.allclose(together["loss"], torch.stack(alone).mean())


@methods
def test_interrupted_and_resumed_equals_uninterrupted(method, tmp_path):
    traces = folder_of_traces(tmp_path / "traces")
    whole = train(method, traces, tmp_path / "whole")
    with power_fails(ProbeTokens, 6):
        train(method, traces, tmp_path / "stopped")
    assert same(train(method, traces, tmp_path / "stopped"), whole)


@methods
def test_a_copy_trains_and_scores_with_weights_of_its_own(method):
    gate = gate_of(method)
    before = gate.score_trace(trace(24))
    other = copy.deepcopy(gate)
    for weight in other.parameters():
        weight.data *= 2
    assert not torch.equal(other.score_trace(trace(24)), before)
    assert torch.equal(gate.score_trace(trace(24)), before)


@methods
def test_rows_begin_as_the_models_own_embeddings_moved_by_the_seed(method):
    gates = [gate_of(method, seed=s) for s in (0, 0, 1)]
    assert torch.equal(gates[0].tokens, gates[1].tokens) and not torch.equal(gates[0].tokens, gates[2].tokens)
    words = model().get_input_embeddings().weight
    assert (torch.cdist(gates[0].tokens, words).argmin(1) == torch.arange(5) * 256 // 5).all()


@methods
def test_the_train_command_makes_a_gate_that_serves(method, tmp_path, monkeypatch, capsys):
    tiny_model(layers=3).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    lines = [{"context": f"The sky of day {i} is grey.", "question": "Which sky?", "answer": "grey"} for i in range(10)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.chdir(tmp_path)
    smaller = ["model=model", "prompts=mine.jsonl", "table=1", "train.steps=4", "gate.num_tokens=3", "record.max_new_tokens=4"]
    assert config.main(run, TrainCommand, [f"recipe={method}", *smaller]) == 0
    assert f"\n{method}" in capsys.readouterr().out
    gate = load_gate(f"checkpoints/runs/{method}", model())
    assert method == gate.METHOD and served(gate, ids(20))
    assert config.main(run, TrainCommand, [f"recipe={method}", *smaller, "record.also=[]"]) == 2
    assert f"{method} trains on attention" in capsys.readouterr().err


# ---- trained score = served score


@methods
@pytest.mark.parametrize("n", [4, 26])
def test_a_trace_and_a_live_cache_score_identically(method, n):
    gate = moved_gate(method)
    live = torch.cat(served(gate, ids(n), budget=3))
    torch.testing.assert_close(gate.score_trace(trace(n)), live, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(score_trace(gate, trace(n), [1.0] * 3), gate.score_trace(trace(n)))


@methods
def test_save_then_load_gives_the_same_scores(method, tmp_path):
    gate = moved_gate(method)
    save_gate(gate, tmp_path, {})
    loaded = load_gate(tmp_path, model()).bind(model())
    assert torch.equal(loaded.score_trace(trace(24)), gate.score_trace(trace(24)))


@methods
def test_a_left_padded_row_is_that_row_alone(method):
    gate, rows = moved_gate(method), [ids(26), ids(17)]
    padded, mask = left_padded(rows)
    for rope in (None, (mask.cumsum(-1) - 1).clamp(min=0)):
        with torch.no_grad(), attach(model()):
            cache = EvictionCache(Policy(gate, 9, num_sinks=1, num_recent=2), model())
            model()(padded, attention_mask=mask, position_ids=rope, cache=cache)
            for b, row in enumerate(rows):
                alone = EvictionCache(Policy(gate, 9, num_sinks=1, num_recent=2), model())
                model()(row[None], cache=alone)
                for mine, own in zip(cache.kept_positions(), alone.kept_positions(), strict=True):
                    assert torch.equal(mine[b], own[0])


@methods
def test_an_announced_prompt_in_chunks_is_scored_as_the_whole(method):
    gate = moved_gate(method)
    want = torch.cat(served(gate, ids(26)))
    with torch.no_grad(), attach(model()):
        policy = Noting(gate, 8, num_sinks=1, num_recent=2)
        cache = EvictionCache(policy, model())
        cache.prefill_length = 26
        for chunk in ids(26)[None].split([11, 1, 13, 1], 1):
            assert not policy.given
            model()(chunk, cache=cache)
    torch.testing.assert_close(torch.cat(policy.scores), want, atol=1e-6, rtol=1e-5)


@methods
def test_each_chunk_is_scored_over_all_that_is_held(method):
    given = served(moved_gate(method), ids(26), chunks=(14, 12))
    assert [s.shape[-1] for s in given] == [14] * 3 + [8 + 12] * 3
    assert all((s < NOT_SCORED).all() for s in given)


@methods
def test_decoded_tokens_have_no_score_and_stay(method):
    policy = Policy(moved_gate(method), 8, num_sinks=0, num_recent=0)
    with torch.no_grad(), attach(model()):
        cache = EvictionCache(policy, model())
        model()(ids(20)[None], cache=cache)
        for token in ids(5, 3)[None].split(1, 1):
            model()(token, cache=cache)
    assert all((held[..., -5:] == torch.arange(20, 25)).all() and held.shape[-1] == 8 for held in cache.kept_positions())


@methods
def test_a_gate_scores_no_trace_before_it_knows_its_model(method):
    with pytest.raises(ValueError, match=r"call gate\.bind\(model\) first"):
        gate_of(method, meets=False).score_trace(trace(24))


@methods
def test_two_lines_serve_a_gate(method):
    with torch.no_grad(), evict(model(), Policy(moved_gate(method), 9, num_sinks=1, num_recent=2)):
        out = model().generate(ids(30)[None], max_new_tokens=3, do_sample=False)
    assert out.shape == (1, 33)


# ---- pooling


def test_pooling_takes_the_largest_neighbour_and_leaves_unscored_tokens_out():
    scores = torch.tensor([[[0.1, 0.5, 0.2, 0.3, NOT_SCORED, 0.0]]])
    positions = torch.tensor([[[0, 1, 2, 3, 4, -1]]], dtype=torch.int32)
    found = pooled(scores, positions, 3)[0, 0, :5].tolist()
    assert found == pytest.approx([0.5, 0.5, 0.5, 0.3, NOT_SCORED])
    for kernel_size in (0, 1):
        assert pooled(scores, positions, kernel_size) is scores


# ---- what is refused


@methods
@pytest.mark.parametrize(
    ("knobs", "says"), [({"num_tokens": 0}, "num_tokens=0"), ({"kernel_size": 4}, "odd"), ({"kernel_size": -1}, "odd")]
)
def test_impossible_knobs_are_refused(method, knobs, says):
    with pytest.raises(ValueError, match=says):
        gate_of(method, **knobs)


@methods
def test_a_trace_without_its_target_is_refused_by_id(method):
    bare = replace(trace(24), targets={})
    with pytest.raises(ValueError, match=rf"{bare.id} holds no attention, which {method} reads"):
        gate_of(method).loss(batch_of(bare))


@methods
def test_another_geometry_is_refused_with_both_sides(method):
    other = tiny_model(layers=4)
    with torch.no_grad(), attach(other), pytest.raises(ValueError, match=r"3 layers x 2 KV heads .* the cache has 4 layers"):
        other(ids(20)[None], cache=EvictionCache(Policy(moved_gate(method), 9, num_sinks=1, num_recent=2), other))


@methods
def test_traces_of_a_model_with_sliding_layers_are_refused(method):
    hybrid = tiny("gemma3")
    torch.manual_seed(0)
    kind = type(gate_of(method))
    gate = kind(kind.Config(**SMALL[method]), describe(hybrid))
    with pytest.raises(ValueError, match="2 sliding-window layers of 4"):
        gate.meet(hybrid)
    with pytest.raises(ValueError, match="2 sliding-window layers of 4"):
        gate.bind(hybrid).score_trace(replace(trace(24), keys=trace(24).keys[:2], values=trace(24).values[:2]))
