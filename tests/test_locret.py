"""Locret: retaining heads on queries, keys and values before RoPE, their size and their loss."""

from dataclasses import replace

import pytest
import torch

from learnkv.gates.locret import Locret, LocretConfig
from learnkv.models import BaseModel, describe
from learnkv.policy import Policy
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from tests.born_parts import gate_for, live_scores, model_of, published, recorded
from tests.training_parts import batch_of

LLAMA31_8B = BaseModel("Llama-3.1-8B", "", 32, 8, 32, 128, 4096, frequencies=(1.0,))


def projections(model, ids):
    """Per layer [n, (Q + 2 H) * D]: what the three linear maps put out, before RoPE."""
    outputs = {}
    handles = [
        getattr(block.self_attn, name).register_forward_hook(lambda module, args, out, key=(i, name): outputs.__setitem__(key, out[0]))
        for i, block in enumerate(model.model.layers)
        for name in ("q_proj", "k_proj", "v_proj")
    ]
    model(ids[None])
    for handle in handles:
        handle.remove()
    return [torch.cat([outputs[i, name] for name in ("q_proj", "k_proj", "v_proj")], -1) for i in range(len(model.model.layers))]


@torch.no_grad()
def test_scores_are_two_linear_maps_of_q_k_v_before_rope():
    gate, trace = gate_for("locret"), recorded(40)
    for layer, x in enumerate(projections(model_of(), trace.ids)):
        hidden = x.double() @ gate.first[layer].double()
        want = (hidden * hidden.sigmoid()) @ gate.last[layer].double()
        torch.testing.assert_close(gate.score_trace(trace)[layer].double(), want.T, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_token_is_scored_alike_wherever_it_stands():
    """In the first layer, which reads nothing of other tokens."""
    gate, ids = gate_for("locret"), torch.full((1, 40), 7)
    first = live_scores(gate, model_of(), ids)[0, 0]
    torch.testing.assert_close(first, first[:, :1].expand_as(first), rtol=1e-4, atol=1e-5)


def test_the_gate_has_the_published_size():
    gate = published("locret", LLAMA31_8B)
    assert round(sum(p.numel() for p in gate.parameters()) / 1e6, 1) == 201.6


def test_the_loss_is_smooth_l1_to_the_peak_logit_and_a_little_of_the_neighbours_distance():
    gate, trace = gate_for("locret"), recorded(40)
    scores, label = gate.score_trace(trace), trace.targets["peak_logit"]
    distance = (scores - label).abs()
    smooth_l1 = torch.where(distance < 1, distance.square() / 2, distance - 0.5).mean()
    apart = (scores[..., 1:] - scores[..., :-1]).square().mean()
    torch.testing.assert_close(gate.loss(batch_of(trace))["loss"], smooth_l1 + 0.0025 * apart)


def test_a_model_whose_rope_is_unknown_is_refused():
    with pytest.raises(ValueError, match="can't take the RoPE"):
        Locret(LocretConfig(), replace(describe(model_of()), frequencies=()))


def test_a_bound_gate_takes_off_the_rope_that_its_model_puts_on():
    gate, model = gate_for("locret"), torch.nn.Linear(1, 1)
    model.register_buffer("inv_freq", torch.tensor([0.5, 0.05, 0.005, 0.0005]))
    assert torch.equal(gate.bind(model).frequencies, model.inv_freq)
    assert torch.equal(gate.bind(model_of()).frequencies, gate.frequencies)


def test_renumbered_positions_are_refused():
    with attach(model_of()), pytest.raises(ValueError, match="Locret reads keys as they were born"):
        EvictionCache(Policy(gate_for("locret"), 40), model_of(), positions="renumbered")


def test_impossible_knobs_are_refused():
    with pytest.raises(ValueError, match="width=0"):
        LocretConfig(width=0)
