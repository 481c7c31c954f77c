"""Foresight: its formula, what it is trained on, and its size on the bundled model."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from learnkv.gates.foresight import Foresight, ForesightConfig
from learnkv.gates.network import LOG_SPAN
from learnkv.gates.ranking import PROTECTED
from learnkv.models import BaseModel
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from tests.born_parts import gate_for, model_of, recorded
from tests.training_parts import Noting, batch_of


def by_hand(gate: Foresight, trace, layer: int) -> torch.Tensor:
    """[n, H] scores of one layer in float64."""
    hidden = trace.hidden[layer].double()
    x = (hidden - gate.mean[layer].double()) / gate.deviation[layer].double()
    x = torch.cat([x, (torch.arange(len(x)).double() + 1).log()[:, None] / LOG_SPAN], 1)
    for part in (gate.first, gate.second):
        weight, bias, gain, offset = (w[layer].detach().double() for w in (part.weight, part.bias, part.gain, part.offset))
        x = x @ weight + bias
        x = F.silu(F.layer_norm(x, x.shape[-1:]) * gain + offset)
    return x @ gate.last[layer].detach().double()


def test_scores_are_the_formula():
    gate, trace = gate_for("foresight", pooling=0.0), recorded(9)
    gate.prepare([trace])
    scores = gate.score_trace(trace)
    for layer in range(len(scores)):
        torch.testing.assert_close(scores[layer].mT.double(), by_hand(gate, trace, layer), rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_the_loss_is_the_divergence_from_the_shares_of_worth_over_all_heads(weight):
    gate, trace = gate_for("foresight", reconstruction=weight, pooling=0.0), recorded(40)
    sinks, recent = PROTECTED
    inner = slice(sinks, 40 - recent)
    worth = (trace.targets["utility"] + weight * trace.targets["reconstruction"])[..., inner].double()
    scores = gate.score_trace(trace)[..., inner].double()
    logprob = scores - scores.logsumexp((0, 1, 2))
    share = worth / worth.sum()
    expected = torch.special.xlogy(share, share).sum() - (share * logprob).sum()
    assert gate.loss(batch_of(trace))["loss"].item() == pytest.approx(expected.item() * scores.shape[0] * scores.shape[1], rel=1e-4)


def test_the_gate_for_the_bundled_model_has_less_than_12_megabytes():
    base = BaseModel("smollm2-135m", "", 30, 3, 9, 64, 576)
    with torch.device("meta"):
        gate = Foresight(ForesightConfig(), base)
    assert 4 * sum(p.numel() for p in gate.parameters()) < 12e6


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (dict(width=0), "width=0 is below 1"),
        (dict(inner_width=0), "inner_width=0 is below 1"),
        (dict(pooling=1.5), "pooling=1.5 is a share"),
        (dict(reconstruction=-1.0), "reconstruction=-1.0 is the weight of a target"),
    ],
)
def test_mistaken_knobs_are_refused(knobs, words):
    with pytest.raises(ValueError, match=words):
        ForesightConfig(**knobs)


@torch.no_grad()
def test_a_served_score_holds_its_neighbourhoods_share_as_a_traces_does():
    gate, trace = gate_for("foresight", pooling=0.3), recorded(40)
    own = gate_for("foresight").score_trace(trace)
    around = torch.stack([own[..., max(0, i - 2) : i + 3].mean(-1) for i in range(40)], -1)
    torch.testing.assert_close(gate.score_trace(trace), 0.7 * own + 0.3 * around, rtol=1e-5, atol=1e-6)
    policy = Noting(gate, 10, num_sinks=1, num_recent=2)
    with attach(model_of()):
        model_of()(trace.ids[None], cache=EvictionCache(policy, model_of()))
    torch.testing.assert_close(torch.cat(policy.scores), gate.score_trace(trace), rtol=1e-6, atol=1e-6)


def test_hidden_states_that_are_not_finite_stop_with_the_id_of_the_trace():
    whole = recorded(9)
    spoilt = replace(whole, hidden=whole.hidden.clone().fill_(float("inf")))
    with pytest.raises(ValueError, match=f"trace {whole.id}: its hidden are not all finite"):
        gate_for("foresight").prepare([spoilt])
