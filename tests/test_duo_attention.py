"""DuoAttention: two attentions mixed by a number per head, and the table of heads that it becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from learnkv import config as settings
from learnkv.budgets import PerHead
from learnkv.capture import capture
from learnkv.gates.base import Batch
from learnkv.gates.duo_attention import PATTERN, SETTINGS, DuoAttention, DuoAttentionConfig, read_pattern, write_pattern
from learnkv.gates.soft import soft_attention
from learnkv.methods import METHODS
from learnkv.models import BaseModel
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from learnkv.train import TrainCommand
from tests.distillation_parts import SMALL, base, made_gate, made_trace, model

LLAMA3_8B = BaseModel("meta-llama/Meta-Llama-3-8B-Instruct", "", 32, 8, 32, 128, 4096)


def sequence(trace):
    return torch.cat([trace.ids, *(x for q in trace.questions for x in (q.question, q.answer))])


@torch.no_grad()
def test_attention_is_the_mix_of_full_and_streaming():
    gate, ids = made_gate("duo_attention"), made_trace(30).ids
    outputs = []
    handle = model().model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
    with capture(model(), {"queries", "keys", "values"}) as taken:
        model()(ids[None], use_cache=False)
    with soft_attention(model(), gate.mixed):
        model()(ids[None], use_cache=False)
    handle.remove()
    q, k, v = taken.queries[0][0], taken.keys[0][0], taken.values[0][0]
    age = torch.arange(30)[:, None] - torch.arange(30)
    seen = (age >= 0) & ((age < 6) | (torch.arange(30) < 2))
    for head in range(4):
        h = head // 2
        full, streaming = (F.scaled_dot_product_attention(q[head], k[h], v[h], mask) for mask in (age >= 0, seen))
        want = gate.alpha[0, h] * full + (1 - gate.alpha[0, h]) * streaming
        assert torch.allclose(outputs[-1][0].unflatten(-1, (4, 8))[:, head], want, atol=1e-5)


def test_the_loss_is_what_answers_last_states_differ_by_and_the_mean_alpha():
    gate, trace = made_gate("duo_attention"), made_trace(20)
    rows = [24, 25, 26, 32, 33, 34]  # of 20 + 2 * (5 + 3) tokens
    with torch.no_grad():
        plain = model().model(sequence(trace)[None]).last_hidden_state[0, rows]
        with soft_attention(model(), gate.mixed):
            gated = model().model(sequence(trace)[None], use_cache=False).last_hidden_state[0, rows]
    want = (plain - gated).square().mean() + 0.05 * gate.alpha.abs().mean()
    assert want > 0.05 * gate.alpha.abs().mean() + 1e-4
    assert gate.loss(Batch([trace], 0, 0))["loss"].item() == pytest.approx(want.item(), rel=1e-5)


def test_a_fresh_gate_leaves_the_model_as_it_is():
    gate = DuoAttention(SMALL["duo_attention"], base())
    gate.meet(model())
    assert gate.loss(Batch([made_trace(20)], 0, 0))["loss"].item() == pytest.approx(0.05, abs=1e-6)


def test_a_step_begins_with_alphas_between_zero_and_one():
    gate = made_gate("duo_attention")
    gate.alpha.data[0, 0], gate.alpha.data[1, 1] = 1.7, -0.3
    gate.loss(Batch([made_trace(20)], 0, 0))
    assert gate.alpha[0, 0] == 1 and gate.alpha[1, 1] == 0


def with_alphas(rows: list[list[float]], sparsity: float = 0.5) -> DuoAttention:
    gate = DuoAttention(replace(SMALL["duo_attention"], sparsity=sparsity), replace(base(), num_layers=len(rows)))
    gate.alpha.data.copy_(torch.tensor(rows))
    return gate


def test_the_heads_of_largest_alpha_are_full():
    rows = [[0.1, 0.9], [0.5, 0.2], [1.3, -0.1]]
    assert with_alphas(rows).table == ((0, 1), (1, 0), (1, 0))
    assert with_alphas(rows, 0.0).table == ((1, 1),) * 3
    assert with_alphas(rows, 0.99).table == ((0, 0), (0, 0), (1, 0))  # one is left
    assert with_alphas([[1, 1], [1, 1]]).table == ((0, 0), (1, 1))  # of equal ones the first stream


@torch.no_grad()
def test_served_by_its_table_full_heads_keep_all_and_streaming_heads_what_is_protected():
    gate, ids = made_gate("duo_attention"), made_trace(40).ids
    policy = METHODS["duo_attention"](23, num_sinks=2, num_recent=4, gate=gate)  # half of 6 and half of 40
    assert policy.allocate == PerHead(gate.table, beta=1.0)
    with attach(model()):
        cache = EvictionCache(policy, model())
        model()(ids[None], cache=cache)
    for row, positions in zip(gate.table, cache.kept_positions(), strict=True):
        for full, held in zip(row, positions[0].tolist(), strict=True):
            assert [i for i in held if i >= 0] == (list(range(40)) if full else [0, 1, 36, 37, 38, 39])


@torch.no_grad()
def test_with_one_budget_over_all_heads_they_fill_in_the_order_of_their_alphas():
    gate, ids = made_gate("duo_attention"), made_trace(40).ids
    policy = METHODS["duo_attention"](13, allocate="adaptive_global", num_sinks=2, num_recent=4, gate=gate)
    with attach(model()):
        cache = EvictionCache(policy, model())
        model()(ids[None], cache=cache)
    lengths = cache.lengths()[:, 0]  # 6 heads hold 78 = 6 * 6 + 34 + 8
    assert sorted(lengths.flatten().tolist()) == [6, 6, 6, 6, 14, 40]
    assert lengths.flatten().argmax() == gate.alpha.argmax()
    second = int(gate.alpha.flatten().argsort()[-2])
    held = cache.kept_positions()[second // 2][0, second % 2]
    assert held[held >= 0].tolist() == [0, 1, *range(28, 40)]  # the last ones


def test_llama_3_8b_has_256_alphas():
    command = settings.load(["recipe=paper/duo_attention"], TrainCommand)
    with torch.device("meta"):
        gate = DuoAttention(settings.build(DuoAttentionConfig, command.gate, "gate"), LLAMA3_8B)
    assert sum(p.numel() for p in gate.parameters()) == 256


# ---- the authors' files


def published(folder: Path, rows: list[list[float]], **sizes: int) -> Path:
    """A pattern as numpy's savetxt writes it there: 18 decimals, values a little outside of [0, 1]."""
    folder.mkdir(exist_ok=True)
    (folder / PATTERN).write_text("".join("\t".join(f"{x:.18e}" for x in row) + "\n" for row in rows))
    (folder / SETTINGS).write_text(json.dumps({"sink_size": 128, "recent_size": 256, "reg_weight": 0.05, "num_passkeys": 10} | sizes))
    return folder


def test_a_published_pattern_is_read(tmp_path):
    folder = published(tmp_path, [[-5.7e-05, 0.984375], [1.0, 0.5], [0.1, 0.2]], sink_size=64)
    gate = read_pattern(folder, base())
    assert torch.equal(gate.alpha, torch.tensor([[0, 0.984375], [1.0, 0.5], [0.1, 0.2]]))
    assert gate.config == DuoAttentionConfig(num_sinks=64, num_recent=256)
    assert gate.table == ((0, 1), (1, 1), (0, 0))


def test_a_written_pattern_comes_back_and_is_what_their_loader_expects(tmp_path):
    numpy = pytest.importorskip("numpy")
    gate = made_gate("duo_attention")
    write_pattern(gate, tmp_path)
    again = read_pattern(tmp_path, base())
    assert torch.equal(again.alpha, gate.alpha) and again.config == gate.config
    theirs = numpy.loadtxt(tmp_path / PATTERN, dtype=float, delimiter="\t")
    assert torch.equal(torch.from_numpy(theirs).float(), gate.alpha.detach())
    sizes = json.loads((tmp_path / SETTINGS).read_text())
    assert (sizes["sink_size"], sizes["recent_size"]) == (2, 6)


def test_a_pattern_of_another_model_is_refused_with_both_sides(tmp_path):
    with pytest.raises(ValueError, match=r"\[2, 2\] layers x KV heads, .* has 3 layers x 2 KV heads"):
        read_pattern(published(tmp_path, [[0, 1], [1, 0]]), base())


@pytest.mark.parametrize("spoil", ["missing", "ragged", "words", "no sizes", "text for a size", "a weight that is text", "nan"])
def test_what_is_no_pattern_is_refused_by_its_folder(tmp_path, spoil):
    folder = published(tmp_path, [[0, 1], [1, 0], [1, 1]])
    if spoil == "missing":
        (folder / PATTERN).unlink()
    elif spoil == "no sizes":
        (folder / SETTINGS).write_text("{}")
    elif spoil in ("text for a size", "a weight that is text"):
        wrong = {"sink_size": "4"} if spoil == "text for a size" else {"reg_weight": "x"}
        (folder / SETTINGS).write_text(json.dumps(json.loads((folder / SETTINGS).read_text()) | wrong))
    elif spoil == "nan":
        (folder / PATTERN).write_text("nan\t1\n0\t1\n1\t1\n")
    else:
        (folder / PATTERN).write_text("0\t1\n1\n" if spoil == "ragged" else "a\tb\n")
    with pytest.raises(ValueError, match=f"{folder} holds no pattern of DuoAttention"):
        read_pattern(folder, base())


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"num_recent": 0}, "num_recent=0"),
        ({"num_sinks": -1}, "num_sinks=-1"),
        ({"sparsity": 1.0}, "sparsity=1.0"),
        ({"weight": -1.0}, "-1.0"),
    ],
)
def test_impossible_knobs_are_refused(knobs, says):
    with pytest.raises(ValueError, match=says):
        DuoAttentionConfig(**knobs)
