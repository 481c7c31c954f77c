"""DMS: who decides on whom, when what was decided counts, and how much is to go."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from learnkv import config as settings
from learnkv.budgets import Threshold
from learnkv.gates.base import Batch
from learnkv.gates.dms import DMS, UNDECIDED, DMSConfig, decided, logistic_noise, of_next, outside_window, straight_through
from learnkv.gates.soft import gated_attention, soft_attention
from learnkv.methods import METHODS
from learnkv.models import BaseModel
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from learnkv.train import TrainCommand
from tests.distillation_parts import SMALL, base, made_gate, made_trace, model
from tests.observations import make_row, observe, with_memory
from tests.tiny_models import masked_logits

QWEN3_8B = BaseModel("Qwen/Qwen3-8B", "", num_layers=36, num_kv_heads=8, num_query_heads=32, head_dim=128, hidden_size=4096)


def test_the_decision_on_a_key_is_the_one_emitted_by_the_token_after_it():
    gate, trace = made_gate("dms"), made_trace(12)
    emitted = gate(trace.block_input, slice(None))  # [layers, H, n]
    scores = gate.score_trace(trace)
    assert torch.equal(scores[..., :-1], -emitted[..., 1:])
    assert (scores[..., -1] == UNDECIDED).all()


def test_training_shifts_decisions_by_one_as_well():
    """A sure decision at token 5 hides key 4, and no other, from queries beyond the window."""
    z = torch.full((1, 1, 12), -1e4)
    z[..., 5] = 1e4
    age = torch.arange(12)[:, None] - torch.arange(12)
    logits = outside_window(3, torch.zeros(1, 1, 1, 12, 12), age, F.logsigmoid(-of_next(z, 0.0)))[0, 0, 0]
    hidden = ((logits < -100) & (age >= 0)).nonzero().tolist()
    assert hidden == [[t, 4] for t in range(8, 12)]  # from age 4 on


def test_a_tokens_decision_is_written_when_the_next_one_comes():
    """Steps of 4, 1 and 3 tokens, of which heads have lost some before: each token's memory is what the next one emitted."""
    emitted = torch.randn(1, 2, 8)
    memory = torch.zeros(1, 2, 0)
    kept: list[list[int]] = [[], []]
    for start, stop in ((0, 4), (4, 5), (5, 8)):
        kept = [[*old, *range(start, stop)] for old in kept]
        row = replace(make_row(stop, num_new=stop - start), kept=kept, memory=[torch.zeros(len(k), 1) for k in kept])
        obs = observe([row], padding=2)
        old = torch.zeros(1, 2, obs.positions.shape[2], 1)
        for h, held in enumerate(kept):
            old[0, h, : len(held) - (stop - start), 0] = memory[0, h, : len(held) - (stop - start)]
        padded = torch.cat([torch.full((1, 2, 2), 77.0), emitted[..., start:stop]], -1)
        found = decided(with_memory(obs, old), padded)
        for h, held in enumerate(kept):
            want = [UNDECIDED if i == stop - 1 else -emitted[0, h, i + 1].item() for i in held]
            assert found[0, h, : len(held)].tolist() == pytest.approx(want)
        keep = [[i for i in held if (i + h) % 3] for h, held in enumerate(kept)]  # the last may go too
        memory = torch.zeros(1, 2, max(map(len, keep)))
        for h, held in enumerate(keep):
            memory[0, h, : len(held)] = found[0, h, [kept[h].index(i) for i in held]]
        kept = keep


def test_a_step_of_padding_alone_decides_nothing():
    row = make_row(5, num_new=1, C=1)
    obs = observe([row], padding=1)
    before = decided(obs, torch.tensor([[[9.0, 1.0], [9.0, 2.0]]]))
    quiet = replace(with_memory(obs, before[..., None]), num_new=torch.tensor([0]), new_slots=torch.full((1, 2, 2), -1))
    assert torch.equal(decided(quiet, torch.full((1, 2, 2), 7.0)), before)


def test_the_decision_logit_is_the_plain_formula():
    gate, x = made_gate("dms"), torch.randn(3, 7, 32)
    got = gate(x, slice(None))
    for layer in range(3):
        normed = x[layer].double() / (x[layer].double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        assert torch.allclose(got[layer].double(), (100 * normed @ gate.weight[layer].double() - 5).T, atol=1e-3)


def test_a_fresh_gate_evicts_nothing():
    gate, trace = DMS(SMALL["dms"], base()), made_trace(12)
    assert (gate.score_trace(trace)[..., :-1] == 5).all()


def test_straight_through_is_hard_forwards_and_soft_backwards():
    z = torch.tensor([-2.0, 0.5], requires_grad=True)
    hard = straight_through(z)
    assert hard.tolist() == [0, 1]
    (gradient,) = torch.autograd.grad(hard.sum(), z)
    p = z.detach().sigmoid()
    assert torch.allclose(gradient, p * (1 - p))


def test_noise_is_standard_logistic_and_hangs_on_seed_step_and_trace():
    trace, other = made_trace(12), made_trace(13)
    x = logistic_noise(Batch([trace], 0, 0), trace, (200_000,))
    for level in (-2.0, 0.0, 1.5):
        assert (x < level).float().mean().item() == pytest.approx(torch.tensor(level).sigmoid().item(), abs=0.005)
    draws = [logistic_noise(Batch([t], seed, step), t, (4,)) for t, seed, step in ((trace, 0, 1), (trace, 1, 0), (other, 0, 0))]
    assert not any(torch.equal(d, x[:4]) for d in draws)
    assert torch.equal(logistic_noise(Batch([other, trace], 0, 0), trace, (200_000,)), x)


def test_the_schedule_reaches_eight_at_step_238_and_sixteen_at_510():
    gate = DMS(DMSConfig(), base())
    assert gate.target(0) == 0
    assert gate.target(238) == pytest.approx(1 - 1 / 8)
    assert gate.target(510) == gate.target(9999) == pytest.approx(1 - 1 / 16)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_loss_is_divergence_and_what_evictions_lack(direction):
    gate, trace = made_gate("dms", replace(SMALL["dms"], divergence=direction)), made_trace(20)
    ids = torch.cat([trace.ids, *(x for q in trace.questions for x in (q.question, q.answer))])
    batch = Batch([trace], 3, 4)
    noise, hard = logistic_noise(batch, trace, (3, 2, len(ids))), []

    def attend(seen):
        x = seen.block_input[0].double()
        normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        z = (100 * normed @ gate.weight[seen.layer].double() - 5).T.float() + noise[seen.layer]
        hard.append((z > 0).float().mean())
        shifted = torch.cat([z[:, 1:], torch.zeros(2, 1)], 1)[None] / 0.1
        return gated_attention(seen, partial(outside_window, 6), torch.sigmoid(-shifted.double()).log().float())

    with torch.no_grad():
        plain = model()(ids[None]).logits[0, :-1].log_softmax(-1)
        with soft_attention(model(), attend):
            gated = model()(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    p, q = (plain, gated) if direction == "forward" else (gated, plain)
    want = (p.exp() * (p - q)).sum(-1).mean() + (0.75 - torch.stack(hard).mean()).clamp(min=0)
    assert gate.loss(batch)["loss"].item() == pytest.approx(want.item(), abs=1e-4)


@torch.no_grad()
def test_served_it_keeps_the_window_and_what_was_not_decided_away():
    gate, trace = made_gate("dms"), made_trace(40)
    policy = METHODS["dms"](10_000, num_sinks=0, num_recent=SMALL["dms"].window, gate=gate)
    assert policy.allocate == Threshold(0.0)
    emitted = gate(trace.block_input, slice(None))
    with attach(model()):
        cache = EvictionCache(policy, model())
        model()(trace.ids[None], cache=cache)
        held, cache.frozen = cache.kept_positions(), True
        got = model()(trace.ids[None, :3], cache=cache).logits
    lengths = set()
    for layer, positions in enumerate(held):
        for h, found in enumerate(positions[0].tolist()):
            want = [i for i in range(40) if i >= 34 or emitted[layer, h, i + 1] <= 0]
            assert [i for i in found if i >= 0] == want
            lengths.add(len(want))
    assert len(lengths) > 1  # up to the data
    assert torch.allclose(got, masked_logits(model(), trace.ids[None], trace.ids[None, :3], held), atol=1e-5)


@torch.no_grad()
def test_a_sure_gate_answers_in_training_what_it_answers_when_served():
    """Decisions without noise or softness: the gated run's last row is a decode step after eviction to the same window."""
    gate, trace, W = made_gate("dms"), made_trace(40), SMALL["dms"].window

    def attend(seen):
        z = gate.of_layer(seen.layer, seen.block_input)
        return gated_attention(seen, partial(outside_window, W), -1e9 * (of_next(z, 0.0) > 0))

    with soft_attention(model(), attend):
        want = model()(trace.ids[None], use_cache=False).logits[0, -1]
    with attach(model()):
        cache = EvictionCache(METHODS["dms"](10_000, num_sinks=0, num_recent=W, gate=gate), model())
        for token in trace.ids:
            got = model()(token.view(1, 1), cache=cache).logits[0, -1]
    assert torch.allclose(got, want, atol=1e-4)


def test_the_paper_recipe_builds_on_the_meta_device():
    command = settings.load(["recipe=paper/dms"], TrainCommand)
    with torch.device("meta"):
        gate = DMS(settings.build(DMSConfig, command.gate, "gate"), QWEN3_8B)
    assert sum(p.numel() for p in gate.parameters()) == 36 * 4096 * 8


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"divergence": "forwards"}, "forward"),
        ({"learn_from": "answer"}, "answers"),
        ({"window": 0}, "window=0"),
        ({"ratio_steps": 0}, "ratio_steps=0"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"ratio": 0.5}, "ratio=0.5"),
    ],
)
def test_impossible_knobs_are_refused(knobs, says):
    with pytest.raises(ValueError, match=says):
        DMSConfig(**knobs)
