"""KVzap: its two published forms, their size, and lengths that the scores decide."""

import math
from dataclasses import replace

import pytest
import torch

from learnkv.budgets import Threshold, adaptive_global
from learnkv.gates.kvzap import KVzapConfig, log_score
from learnkv.methods import METHODS
from learnkv.models import BaseModel
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from tests.born_parts import gate_for, live_scores, model_of, published, recorded
from tests.tiny_models import prompt
from tests.training_parts import batch_of

QWEN3_8B = BaseModel("Qwen3-8B", "", 36, 8, 32, 128, 4096)


def gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


@torch.no_grad()
@pytest.mark.parametrize("width", [0, 6])
def test_scores_are_the_published_formula(width):
    gate, trace = gate_for("kvzap", width=width), recorded(5)
    scores = gate.score_trace(trace)
    for layer, head, row in torch.cartesian_prod(*map(torch.arange, scores.shape)).tolist():
        weights = {name: w[layer].double() for name, w in gate.named_parameters()}
        x = trace.hidden[layer, row].double()
        if width:
            x = torch.tensor([gelu(float(v)) for v in x @ weights["first_weight"] + weights["first_bias"][0]], dtype=torch.float64)
        want = float(x @ weights["last_weight"][:, head] + weights["last_bias"][0, head])
        assert scores[layer, head, row].item() == pytest.approx(want, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("width", "millions"), [(0, 1.18), (512, 75.7)])
def test_the_gate_has_the_published_size(width, millions):
    gate = published("kvzap", QWEN3_8B, **({} if width else {"width": 0}))
    assert sum(p.numel() for p in gate.parameters()) / 1e6 == pytest.approx(millions, abs=0.05 if width else 0.005)


def test_the_loss_is_the_squared_distance_to_the_logarithm_of_kvzip_plus():
    gate, trace = gate_for("kvzap"), recorded(40)
    want = (gate.score_trace(trace) - trace.targets["reconstruction_plus"].log()).square().mean() * 3
    torch.testing.assert_close(gate.loss(batch_of(trace))["loss"], want)


def test_an_attention_of_zero_has_a_logarithm():
    assert log_score(torch.zeros(2)).isfinite().all()


def test_training_starts_at_the_mean_of_the_target():
    gate, traces = gate_for("kvzap"), [recorded(40), recorded(30, 1)]
    gate.prepare(traces)
    want = torch.cat([t.targets["reconstruction_plus"].log() for t in traces], -1).mean(-1)
    torch.testing.assert_close(gate.last_bias[:, 0], want)


@torch.no_grad()
def test_how_many_tokens_stay_is_the_scores_decision():
    gate, model, ids = gate_for("kvzap"), model_of(), prompt(40)
    scores = live_scores(gate, model, ids)[:, 0]  # [layers, H, n]
    least = float(scores.median())
    with attach(model):
        cache = EvictionCache(METHODS["kvzap"](10_000, gate=gate, threshold=least, num_sinks=2, num_recent=4), model)
        model(ids, cache=cache)
    want = scores >= least
    want[..., :2] = want[..., -4:] = True
    kept = torch.zeros_like(want)
    for layer, positions in enumerate(cache.kept_positions()):
        for head, held in enumerate(positions[0]):
            kept[layer, head, held[held >= 0].long()] = True
    assert torch.equal(kept[0], want[0])  # later layers, too, but for rounding at the threshold
    assert len(set(cache.lengths().flatten().tolist())) > 1
    assert cache.lengths()[:, 0].tolist() == kept.sum(-1).tolist()


def test_a_threshold_and_128_recent_tokens_are_the_default():
    gate = gate_for("kvzap")
    policy = METHODS["kvzap"](512, gate=gate)
    assert (policy.allocate, policy.num_recent) == (Threshold(-4.0), 128)
    assert METHODS["kvzap"](512, gate=gate, allocate="adaptive_global").allocate == adaptive_global
    with pytest.raises(ValueError, match=r"allocate='uniform' and threshold=-3\.0 both"):
        METHODS["kvzap"](512, gate=gate, allocate="uniform", threshold=-3.0)
    with pytest.raises(ValueError, match="threshold='low' is of type str"):
        METHODS["kvzap"](512, gate=gate, threshold="low")


@pytest.mark.parametrize("knobs", [{"width": -1}, {"tokens": -1}])
def test_impossible_knobs_are_refused(knobs):
    with pytest.raises(ValueError, match=f"{next(iter(knobs))}="):
        KVzapConfig(**knobs)


def test_a_target_that_is_not_finite_is_no_loss():
    trace = recorded(40)
    spoilt = replace(trace, targets=trace.targets | {"reconstruction_plus": torch.full((3, 2, 40), math.nan)})
    assert gate_for("kvzap").loss(batch_of(spoilt))["losses"].isnan().all()  # which stops training with the trace's id
