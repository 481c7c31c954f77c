"""TRIM-KV: decay, retention and capacity are the paper's formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from learnkv import config as settings
from learnkv.gates import trimkv
from learnkv.gates.base import Batch
from learnkv.gates.soft import soft_attention
from learnkv.gates.trimkv import FORMS, TrimKV, TrimKVConfig, capacity_loss, retained
from learnkv.models import BaseModel
from learnkv.train import TrainCommand
from tests.distillation_parts import SMALL, made_gate, made_trace, model

QWEN3_8B = BaseModel("Qwen/Qwen3-8B", "", num_layers=36, num_kv_heads=8, num_query_heads=32, head_dim=128, hidden_size=4096)


def test_capacity_loss_of_the_worked_example():
    log_beta = torch.tensor([0.9, 0.8, 0.5, 0.99]).log()
    assert retained(log_beta)[-1].item() == pytest.approx(0.729 + 0.64 + 0.5 + 1)
    per_step = [(retained(log_beta)[t - 1] - 2).clamp(min=0).item() / t for t in range(1, 5)]
    assert per_step[-1] == pytest.approx(0.21725, abs=1e-6)
    assert capacity_loss(log_beta, 2).item() == pytest.approx(sum(per_step) / 4, abs=1e-6)


@pytest.mark.parametrize("rows", [3, 64])
def test_capacity_loss_and_its_gradient_are_the_plain_sum(rows, monkeypatch):
    monkeypatch.setattr(trimkv, "ROWS", rows)
    log_beta = torch.rand(2, 3, 11).log().requires_grad_()
    got = capacity_loss(log_beta, 2)
    x = log_beta.double()
    steps = [(sum((x[..., i] * (t - i)).exp() for i in range(t + 1)) - 2).clamp(min=0) / (t + 1) for t in range(11)]
    want = torch.stack(steps, -1).mean(-1)
    assert torch.allclose(got.double(), want, atol=1e-6)
    (found,), (wanted,) = (torch.autograd.grad(y.sum(), log_beta) for y in (got, want))
    assert torch.allclose(found, wanted.float(), atol=1e-6)


def test_retention_is_the_plain_formula():
    gate, hidden = made_gate("trimkv"), torch.randn(3, 7, 32)
    got = gate(hidden, slice(None))
    for layer in range(3):
        inner, outer = gate.inner[layer].double(), gate.outer[layer].double()
        x = F.silu(hidden[layer].double() @ inner + gate.inner_bias[layer].double())
        want = torch.sigmoid(x @ outer + gate.outer_bias[layer].double()).log().T
        assert torch.allclose(got[layer].double(), want, rtol=1e-4)
        assert torch.allclose(gate(hidden[layer : layer + 1], slice(layer, layer + 1))[0], got[layer], rtol=1e-6)


def test_a_score_is_log_retention_times_age_counted_from_one():
    gate, trace = made_gate("trimkv"), made_trace(12)
    log_beta = gate(trace.hidden, slice(None))
    scores = gate.score_trace(trace)
    assert torch.allclose(scores[..., -1], log_beta[..., -1])
    assert torch.allclose(scores[..., 0], 12 * log_beta[..., 0])


def test_forms_of_decay():
    logits, log_beta = torch.randn(1, 1, 2, 4, 4), torch.rand(1, 1, 4).log()
    age = torch.arange(4)[:, None] - torch.arange(4)
    for t in range(4):
        for i in range(t + 1):
            beta = log_beta[0, 0, i].exp() ** (t - i)
            added, times = (FORMS[form](logits, age, log_beta)[0, 0, 1, t, i] for form in ("additive", "multiplicative"))
            assert added.item() == pytest.approx((logits[0, 0, 1, t, i] + beta.log()).item(), abs=1e-5)
            assert times.item() == pytest.approx((logits[0, 0, 1, t, i] * beta).item(), abs=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_divergence_cross_entropy_and_capacity(form):
    gate, trace = made_gate("trimkv", replace(SMALL["trimkv"], form=form, capacity=0.7, budget=3)), made_trace(20)
    ids = torch.cat([trace.ids, *(x for q in trace.questions for x in (q.question, q.answer))])
    seen = []

    def attend(layer):
        seen.append(gate.of_layer(layer.layer, layer.hidden))
        return trimkv.gated_attention(layer, FORMS[form], seen[-1])

    with torch.no_grad():
        plain = model()(ids[None]).logits[0, :-1].log_softmax(-1)
        with soft_attention(model(), attend):
            gated = model()(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    kl = (plain.exp() * (plain - gated)).sum(-1).mean()
    said = -gated.gather(-1, ids[1:, None]).mean()
    capacity = torch.stack([capacity_loss(x, 3).mean() for x in seen]).mean()
    want = kl + said + 0.7 * capacity
    assert gate.loss(Batch([trace], 0, 0))["loss"].item() == pytest.approx(want.item(), abs=1e-5)


def test_a_gate_that_retains_everything_leaves_the_model_its_own_answers():
    open_gate = made_gate("trimkv", replace(SMALL["trimkv"], bias=30.0, capacity=0.0))
    trace = made_trace(20)
    ids = torch.cat([trace.ids, *(x for q in trace.questions for x in (q.question, q.answer))])
    said = F.cross_entropy(model()(ids[None]).logits[0, :-1], ids[1:])
    assert open_gate.loss(Batch([trace], 0, 0))["loss"].item() == pytest.approx(said.item(), abs=1e-5)


def test_the_published_network_has_the_published_size():
    command = settings.load(["recipe=paper/trimkv"], TrainCommand)
    with torch.device("meta"):
        gate = TrimKV(settings.build(TrimKVConfig, command.gate, "gate"), QWEN3_8B)
    assert round(sum(p.numel() for p in gate.parameters()) / 1e6, 1) == 75.7


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"form": "additve"}, "additive"),
        ({"learn_from": "answer"}, "answers"),
        ({"width": 0}, "width=0"),
        ({"budget": 0}, "budget=0"),
        ({"capacity": -1.0}, "capacity=-1.0"),
    ],
)
def test_impossible_knobs_are_refused(knobs, says):
    with pytest.raises(ValueError, match=says):
        TrimKVConfig(**knobs)
