"""Fast KVzip: the published gate to the letter, its size, and its way of training."""

import math

import pytest
import torch
from torch.optim import SGD

from learnkv.gates.fast_kvzip import FastKVzip, FastKVzipConfig, binary_cross_entropy
from learnkv.methods import METHODS
from learnkv.models import BaseModel
from learnkv.training.module import GateTraining
from tests.born_parts import gate_for, made_folder, published, recorded
from tests.training_parts import BASE, batch_of, quick

QWEN25_7B = BaseModel("Qwen2.5-7B", "", 28, 4, 28, 128, 3584)
QWEN3_8B = BaseModel("Qwen3-8B", "", 36, 8, 32, 128, 4096)
QWEN3_14B = BaseModel("Qwen3-14B", "", 40, 8, 40, 128, 5120)


def by_hand(gate: FastKVzip, x: torch.Tensor, layer: int, head: int, row: int) -> float:
    """The formula for one token, in float64."""
    weights = {name: w[layer].double() for name, w in gate.named_parameters()}
    D, G = gate.config.width, gate.base.num_query_heads // gate.base.num_kv_heads
    rms = lambda v: v / (v.square().mean() + 1e-6).sqrt()  # noqa: E731
    x = x[layer, row].double()
    k = rms((x @ weights["key_weight"])[head * D : (head + 1) * D]) * weights["key_gain"]
    shares = []
    for g in range(G):
        part = slice((head * G + g) * D, (head * G + g + 1) * D)
        q = rms((x @ weights["query_weight"] + weights["query_bias"][0])[part]) * weights["query_gain"]
        z = float(q @ k) / math.sqrt(D) + float(weights["bias"][head, g])
        shares.append(1 / (1 + sum(math.exp(float(q @ sink) / math.sqrt(D) - z) for sink in weights["sinks"][head])))
    return sum(shares) / G


@torch.no_grad()
def test_scores_are_the_published_formula():
    gate, trace = gate_for("fast_kvzip"), recorded(9)
    scores = gate.score_trace(trace)
    for layer, head, row in torch.cartesian_prod(*map(torch.arange, scores.shape)).tolist():
        assert scores[layer, head, row].item() == pytest.approx(by_hand(gate, trace.hidden, layer, head, row), rel=1e-5)


def test_a_gate_of_zeros_scores_one_in_17():
    gate = FastKVzip(FastKVzipConfig(), BASE)
    for weight in (gate.query_weight, gate.key_weight):
        weight.data.zero_()
    scores = gate(torch.randn(3, 5, BASE.hidden_size), slice(None))
    torch.testing.assert_close(scores, torch.full((3, 2, 5), 1 / 17))


@pytest.mark.parametrize(("base", "millions"), [(QWEN25_7B, 51.4), (QWEN3_8B, 94.5), (QWEN3_14B, 157.4)], ids=lambda x: str(x)[:30])
def test_the_gate_has_the_published_size(base, millions):
    gate = published("fast_kvzip", base)
    assert round(sum(p.numel() for p in gate.parameters()) / 1e6, 1) == millions


def test_the_loss_is_least_where_the_score_is_the_target_and_finite_everywhere():
    target = torch.tensor([0.0, 0.3, 1.0])
    scores = torch.tensor([0.0, 0.3, 1.0], requires_grad=True)
    loss = binary_cross_entropy(scores, target)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0, -0.3 * math.log(0.3) - 0.7 * math.log(0.7), 0], abs=1e-5)
    assert scores.grad.isfinite().all() and abs(scores.grad[1]) < 1e-5
    assert binary_cross_entropy(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).isfinite().all()


def test_the_loss_is_a_mean_over_tokens_and_a_sum_over_heads_and_layers():
    gate, trace = gate_for("fast_kvzip"), recorded(40)
    want = torch.nn.functional.binary_cross_entropy(gate.score_trace(trace), trace.targets["reconstruction"]) * 3 * 2
    torch.testing.assert_close(gate.loss(batch_of(trace))["loss"], want)


def test_the_paper_trains_by_sgd_with_momentum(tmp_path):
    traces = made_folder(tmp_path / "traces", train=2)
    training = GateTraining(gate_for("fast_kvzip"), traces, quick(optimizer="sgd", lr=0.2, weight_decay=0))
    optimizer = training.configure_optimizers()["optimizer"]
    assert isinstance(optimizer, SGD) and optimizer.defaults["momentum"] == 0.9 and optimizer.defaults["lr"] == 0.2


def test_heads_share_one_budget_unless_told_otherwise():
    assert METHODS["fast_kvzip"](64, gate=gate_for("fast_kvzip")).scope == "model"
    assert METHODS["fast_kvzip"](64, gate=gate_for("fast_kvzip"), allocate="uniform").scope == "layer"


@pytest.mark.parametrize("knobs", [{"width": 0}, {"num_sinks": 0}, {"tokens": -1}])
def test_impossible_knobs_are_refused(knobs):
    with pytest.raises(ValueError, match=f"{next(iter(knobs))}="):
        FastKVzipConfig(**knobs)
