"""KVP: the loss is Plackett-Luce's, the network scores a trace as it scores a cache, and every knob trains."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from learnkv import ops
from learnkv.gates.kvp import KVP, KVPConfig, positive_fit
from learnkv.gates.neighbours import neighbourhood_mean, with_neighbours
from learnkv.gates.ranking import LOSSES, Items, normalised_reward, order_reward, ranks_of, reward_of, sample, soft_rank
from learnkv.models import BaseModel
from learnkv.observation import Observation
from learnkv.rope import turn_back
from tests.observations import Row, observe
from tests.training_parts import BASE, batch_of, losses_over, made_gate, made_trace

SMALL = KVPConfig(branch_width=6, width=10, permutations=4, num_sinks=0, num_recent=0)


def items_of(utility: Tensor, lengths: list[int] | None = None) -> Items:
    """utility [B, n] of a single head."""
    B, n = utility.shape
    traces = [made_trace(2, seed=b) for b in range(B)]
    return Items(utility[None, None], torch.tensor(lengths or [n] * B), batch_of(*traces))


def row_of(trace, layer: int, kept: list[list[int]]) -> Row:
    keys, values = trace.keys[layer], trace.values[layer]
    n = keys.shape[1]
    queries = torch.zeros(BASE.num_query_heads, n, BASE.head_dim)
    return Row(keys, values, queries, queries, torch.zeros(n, dtype=torch.int64), kept, 1, [torch.zeros(len(k), 0) for k in kept])


# ---- the loss


def test_log_probability_of_the_worked_example():
    picked = torch.tensor([1.0, -1.0, 0.0])  # scores 1, 0, -1 in the order 0, 2, 1
    assert ops.pl_logprob(picked).sum().item() == pytest.approx(-1.72087, abs=1e-5)


def test_reward_of_the_worked_example():
    items = items_of(torch.tensor([[0.5, 0.3, 0.2]]))
    reward = order_reward(torch.tensor([2, 1, 0]).view(1, 1, 1, 1, 3), items)
    assert reward.item() == pytest.approx(-1.35294, abs=1e-5)


def test_oracle_order_has_reward_minus_one():
    utility = torch.rand(2, 3, 17)
    assert torch.allclose(reward_of(utility, utility), torch.tensor(-1.0))


def test_of_equal_scores_the_later_token_stays():
    utility = torch.tensor([[[0.0, 0.0, 1.0]]])
    assert reward_of(torch.zeros(1, 1, 3), utility).item() == -1


def test_sorting_with_gumbel_noise_draws_from_plackett_luce():
    scores, count = torch.tensor([0.7, 0.0, -1.1]), 40_000
    order = sample(scores.view(1, 1, 1, 3), items_of(torch.zeros(1, 3)), count).view(count, 3)
    for each in permutations(range(3)):
        expected = ops.pl_logprob(scores[list(each)]).sum().exp().item()
        found = (order == torch.tensor(each)).all(-1).double().mean().item()
        assert found == pytest.approx(expected, abs=4 * (expected * (1 - expected) / count) ** 0.5)


def test_no_token_beats_its_noise_into_infinity():
    order = sample(torch.zeros(1, 1, 2, 50), items_of(torch.zeros(2, 50), [50, 20]), 300)
    assert (order[:, 0, 0, 1, :20] < 20).all()  # padding stays at the tail


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "plackett_luce_batch"])
def test_padding_changes_neither_loss_nor_gradient(loss):
    gate = made_gate(replace(SMALL, loss=loss))
    short, long = made_trace(15, 1), made_trace(23, 2)
    apart = [gate.loss(batch_of(t)) for t in (short, long)]
    wanted = torch.autograd.grad(sum(a["loss"] for a in apart) / 2, list(gate.parameters()))
    together = gate.loss(batch_of(short, long))
    found = torch.autograd.grad(together["loss"], list(gate.parameters()))
    assert torch.allclose(together["losses"], torch.cat([a["losses"] for a in apart]), atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def test_layers_in_chunks_give_the_same_loss_and_gradient(monkeypatch):
    gate, batch = made_gate(SMALL), batch_of(made_trace(15, 1), made_trace(23, 2))
    whole = gate.loss(batch)
    wanted = torch.autograd.grad(whole["loss"], list(gate.parameters()))
    monkeypatch.setattr("learnkv.gates.kvp.CHUNK_FLOATS", 1)
    assert len(gate.layer_chunks(batch)) == BASE.num_layers
    chunked = gate.loss(batch)
    found = torch.autograd.grad(chunked["loss"], list(gate.parameters()))
    assert torch.allclose(chunked["losses"], whole["losses"], atol=1e-6)
    assert torch.allclose(chunked["reward"], whole["reward"], atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


def test_draws_hang_on_seed_step_and_trace_only():
    gate, first, second = made_gate(SMALL), made_trace(15, 1), made_trace(15, 2)
    alone = gate.loss(batch_of(first))["losses"]
    torch.manual_seed(99)
    assert torch.allclose(gate.loss(batch_of(second, first))["losses"][1:], alone, atol=1e-6)
    assert not torch.allclose(gate.loss(batch_of(first, step=1))["losses"], alone)
    assert not torch.allclose(gate.loss(batch_of(first, seed=1))["losses"], alone)


def test_gradient_raises_what_the_better_half_of_the_orders_kept():
    utility = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    scores = torch.zeros(1, 1, 1, 4, requires_grad=True)
    loss, _ = LOSSES["plackett_luce"](scores, items_of(utility), 512)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert gradient.argmin().item() == 0


def test_soft_ranks_become_ranks_where_scores_lie_far_apart():
    scores = torch.tensor([300.0, -100.0, 100.0]).view(1, 1, 1, 3)
    loss, _ = soft_rank(scores, items_of(torch.tensor([[0.6, 0.1, 0.3]])), 1)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert ranks_of(torch.tensor([2, 0, 1])).tolist() == [2, 3, 1]


def test_reward_of_scores_ignores_padding():
    utility = torch.rand(1, 12)
    alone = normalised_reward(torch.arange(12.0).view(1, 1, 1, 12), items_of(utility))
    padded = torch.cat([torch.arange(12.0), torch.full((5,), 1e9)]).view(1, 1, 1, 17)
    items = items_of(torch.cat([utility, torch.zeros(1, 5)], 1), [12])
    assert torch.allclose(normalised_reward(padded, items), alone)


@pytest.mark.parametrize("n", [1, 4, 20, 21])
@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "plackett_luce_batch"])
def test_contexts_that_are_protected_as_a_whole_have_a_loss(loss, n):
    gate = made_gate(replace(SMALL, loss=loss, num_sinks=4, num_recent=16))
    found = gate.loss(batch_of(made_trace(n)))
    found["loss"].backward()
    assert found["loss"].isfinite() and all(p.grad.isfinite().all() for p in gate.parameters())
    assert reward_of(torch.rand(2, 2, n), torch.rand(2, 2, n), num_sinks=4, num_recent=16).isfinite().all()


def test_too_few_permutations_are_refused():
    permutations = 1
    with pytest.raises(ValueError, match="2 or more"):
        made_gate(replace(SMALL, permutations=permutations)).loss(batch_of(made_trace(9)))


def test_batch_form_wants_a_batch():
    with pytest.raises(ValueError, match=r"train\.batch"):
        made_gate(replace(SMALL, loss="plackett_luce_batch")).loss(batch_of(made_trace(9)))


def test_what_a_policy_keeps_anyway_has_no_part_in_the_loss():
    gate = made_gate(replace(SMALL, loss="listnet_model", num_sinks=2, num_recent=3))
    trace, other = made_trace(24, 1), made_trace(24, 1)
    for target in (other.targets["utility"],):
        target[..., :2] += 7
        target[..., -3:] += 7
    assert torch.equal(gate.loss(batch_of(trace))["loss"], gate.loss(batch_of(other))["loss"])


def test_reward_leaves_out_what_a_policy_keeps_anyway():
    utility, scores = torch.rand(1, 2, 30), torch.rand(1, 2, 30)
    inner = reward_of(scores[..., 4:-6], utility[..., 4:-6])
    assert torch.allclose(reward_of(scores, utility, num_sinks=4, num_recent=6), inner)


def test_only_the_loss_over_all_heads_sees_what_heads_owe_each_other():
    utility = torch.rand(2, 1, 1, 9)
    items = items_of(torch.zeros(1, 9))
    items = replace(items, utility=utility)
    scores, shift = torch.randn(2, 1, 1, 9), torch.tensor([3.0, 0.0]).view(2, 1, 1, 1)
    moved = {
        name: (LOSSES[name](scores + shift, items, 4)[0] - LOSSES[name](scores, items, 4)[0]).sum() for name in ("listnet", "listnet_model")
    }
    assert moved["listnet"].abs() < 1e-5 < moved["listnet_model"].abs()


def test_scores_of_the_loss_over_all_heads_are_not_calibrated_again():
    gate, trace = made_gate(replace(SMALL, loss="listnet_model")), made_trace(24, 1)
    before = gate.score_trace(trace)
    gate.calibrate([trace])
    assert torch.equal(gate.score_trace(trace), before)


# ---- the network

KNOBS = [
    SMALL,
    replace(SMALL, depth=1),
    replace(SMALL, depth=3),
    replace(SMALL, positions="table", max_positions=16),
    replace(SMALL, positions="none"),
    replace(SMALL, inputs=("keys",)),
    replace(SMALL, inputs=("values",)),
    replace(SMALL, inputs=()),
    replace(SMALL, inputs=(), positions="table", max_positions=64),
    replace(SMALL, shared=True),
    replace(SMALL, shared=True, positions="table", max_positions=64),
    *(replace(SMALL, loss=loss) for loss in LOSSES),
]


@pytest.mark.parametrize("config", KNOBS, ids=str)
def test_gradient_reaches_every_weight(config):
    gate = made_gate(config)
    gate.loss(batch_of(made_trace(24, 1), made_trace(31, 2)))["loss"].backward()
    idle = [name for name, p in gate.named_parameters() if p.grad is None or not p.grad.any() or not p.grad.isfinite().all()]
    assert idle == []


@pytest.mark.parametrize("loss", LOSSES)
def test_reward_rises_on_one_batch(loss):
    gate, traces = made_gate(replace(SMALL, loss=loss)), [made_trace(24, seed) for seed in range(4)]
    before = torch.stack([reward_of(gate.score_trace(t), t.targets["utility"]) for t in traces]).mean()
    losses = losses_over(gate, lambda step: batch_of(*traces, step=step), lr=1e-2, steps=60)
    after = torch.stack([reward_of(gate.score_trace(t), t.targets["utility"]) for t in traces]).mean()
    assert after > before + (-1 - before) / 3  # at least a third of the way to the oracle
    if not loss.startswith("plackett_luce"):  # a policy gradient's loss is no measure of progress
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("config", KNOBS[:11], ids=str)
@pytest.mark.parametrize("page", [None, 4])
def test_a_trace_and_a_live_cache_score_identically(config, page):
    gate, traces = made_gate(config), [made_trace(19, 1), made_trace(26, 2)]
    gate.calibrate(traces)
    for layer in range(BASE.num_layers):
        everything = [row_of(t, layer, [list(range(len(t.ids)))] * BASE.num_kv_heads) for t in traces]
        live = gate.score(observe(everything, page=page, layer=layer, num_layers=BASE.num_layers))
        for b, trace in enumerate(traces):
            assert torch.allclose(live[b, :, : len(trace.ids)], gate.score_trace(trace)[layer], atol=1e-6)


@pytest.mark.parametrize("config", KNOBS[:11], ids=str)
def test_without_pooling_a_token_keeps_its_score_when_others_are_evicted(config):
    gate, trace = made_gate(replace(config, pooling=0)), made_trace(26, 2)
    kept = [[0, 3, 4, 11, 25], list(range(20, 26))]
    live = gate.score(observe([row_of(trace, 1, kept)], page=4, layer=1, num_layers=BASE.num_layers))
    whole = gate.score_trace(trace)[1]
    for h, positions in enumerate(kept):
        assert torch.allclose(live[0, h, : len(positions)], whole[h, positions], atol=1e-6)


def test_the_neighbourhood_is_what_is_held_within_reach():
    positions = torch.tensor([[[0, 1, 3, 9, 10, 12], [4, 5, 6, 7, -1, -1]]], dtype=torch.int32)
    scores = torch.randn(positions.shape)
    mean = neighbourhood_mean(scores, positions, 2)
    for h, held in enumerate(positions[0].tolist()):
        for slot, position in enumerate(held):
            if position >= 0:
                near = [scores[0, h, i] for i, other in enumerate(held) if other >= 0 and abs(other - position) <= 2]
                assert mean[0, h, slot].item() == pytest.approx(torch.stack(near).mean().item(), abs=1e-6)


def test_a_reach_beyond_the_context_is_the_whole_context():
    scores = torch.randn(1, 2, 5)
    mean = neighbourhood_mean(scores, torch.arange(5).expand(1, 2, 5), 64)
    assert torch.allclose(mean, scores.mean(-1, keepdim=True).expand(1, 2, 5))


def test_without_pooling_an_infinite_score_stays_its_own():
    scores = torch.tensor([[[1.0, float("inf"), 3.0]]])
    assert torch.equal(with_neighbours(scores, torch.arange(3).expand(1, 1, 3), 0.0, 2), scores)


def test_a_served_score_holds_its_neighbourhoods_share_and_the_loss_none_of_it():
    alone, trace = made_gate(replace(SMALL, pooling=0)), made_trace(20)
    gate = made_gate(replace(SMALL, pooling=0.75, reach=1))
    own = alone.score_trace(trace)
    around = torch.stack([own[..., max(0, i - 1) : i + 2].mean(-1) for i in range(20)], -1)
    assert torch.allclose(gate.score_trace(trace), 0.25 * own + 0.75 * around, atol=1e-6)
    assert torch.equal(gate.loss(batch_of(trace))["losses"], alone.loss(batch_of(trace))["losses"])


@pytest.mark.parametrize("group", [1, 4, 7])
def test_query_groups_of_any_size(group):
    base = replace(BASE, num_query_heads=group * BASE.num_kv_heads)
    gate, trace = made_gate(SMALL, base=base), made_trace(20, base=base)
    assert gate.loss(batch_of(trace))["loss"].isfinite()
    assert gate.score_trace(trace).shape == (3, 2, 20)


@pytest.mark.parametrize("n", [1, 2])
def test_the_shortest_contexts_are_scored(n):
    assert made_gate(SMALL).score_trace(made_trace(n)).isfinite().all()


def test_bfloat16_cache_is_scored_in_float32():
    gate, trace = made_gate(SMALL), made_trace(20)
    scores = gate.score_trace(trace.to(torch.bfloat16))
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, gate.score_trace(trace), atol=0.1)


@pytest.mark.parametrize("inputs", [("keys",), ("values",), ()])
def test_a_live_score_gathers_what_its_branches_read_and_no_more(inputs, monkeypatch):
    gate, trace, gathered = made_gate(replace(SMALL, inputs=inputs)), made_trace(9), []
    obs = observe([row_of(trace, 1, [list(range(9))] * 2)], layer=1, num_layers=BASE.num_layers)
    for name in ("keys", "values"):
        monkeypatch.setattr(Observation, name, property(lambda self, name=name: gathered.append(name) or getattr(self.slots, name)))
    assert torch.allclose(gate.score(obs)[0], gate.score_trace(trace)[1], rtol=1e-5, atol=1e-6)
    assert gathered == list(inputs)


def test_a_trace_need_not_hold_what_no_branch_reads():
    gate, trace = made_gate(replace(SMALL, inputs=("keys",))), made_trace(20)
    assert torch.equal(gate.score_trace(replace(trace, values=None)), gate.score_trace(trace))


def test_log_positions_tell_far_tokens_apart():
    gate = made_gate(replace(SMALL, inputs=()))
    features = gate.trace_features([made_trace(5000, base=replace(BASE, num_layers=3))], slice(None))
    scores = gate(features, slice(None))
    assert (scores[0, 0, 1000:].diff().abs() > 0).float().mean() > 0.9


def rotated(keys: Tensor, start: int) -> Tensor:
    """Keys [..., n, 8] at RoPE positions start, start + 1, ..."""
    angle = -(start + torch.arange(keys.shape[-2]))[:, None] * torch.tensor(BASE.frequencies)
    return turn_back(keys, angle.cos(), angle.sin())


@pytest.mark.parametrize("unrotate", [True, False])
def test_scores_hang_on_where_the_text_stands_only_where_rope_stays_on_the_keys(unrotate):
    gate, trace = made_gate(replace(SMALL, unrotate=unrotate)), made_trace(9)
    seen = []
    for start in (0, 5000):
        obs = observe([row_of(replace(trace, keys=rotated(trace.keys, start)), 0, [list(range(9))] * 2)], num_layers=3)
        seen.append(gate.score(replace(obs, rope_offset=torch.tensor([start]))))
    assert torch.allclose(*seen, atol=1e-4) == unrotate


def test_a_bound_gate_takes_off_the_rope_that_its_model_puts_on():
    model = nn.Linear(1, 1)
    model.register_buffer("inv_freq", torch.tensor([0.5, 0.05, 0.005]))
    gate = made_gate(SMALL)
    assert torch.equal(gate.bind(model).frequencies, model.inv_freq)
    assert gate.frequencies.tolist() == pytest.approx(BASE.frequencies)


def test_a_model_whose_rope_is_unknown_is_refused():
    with pytest.raises(ValueError, match=r"RoPE of model tiny .* gate.unrotate=false"):
        KVP(SMALL, replace(BASE, frequencies=()))


def test_shared_agents_are_one_set_of_weights():
    sizes = [sum(p.numel() for p in made_gate(replace(SMALL, shared=s)).parameters()) for s in (True, False)]
    assert sizes[1] == sizes[0] * BASE.num_layers * BASE.num_kv_heads


def test_a_gate_for_another_geometry_is_refused_with_both_sides():
    trace = made_trace(9)
    obs = observe([row_of(trace, 0, [list(range(9))] * 2)], layer=0, num_layers=7)
    with pytest.raises(ValueError, match=r"3 layers x 2 KV heads of 8 dimensions \(tiny\), the cache has 7 layers"):
        made_gate(SMALL).score(obs)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"loss": "listnett"}, "listnet"),
        ({"positions": "logs"}, "log"),
        ({"inputs": ("kees",)}, "keys"),
        ({"inputs": (), "positions": "none"}, "nothing to read"),
        ({"width": 0}, "1 or more"),
    ],
)
def test_impossible_knobs_are_refused(knobs, says):
    with pytest.raises(ValueError, match=says):
        KVPConfig(**knobs)


def test_a_trace_without_targets_is_refused_by_id():
    trace = replace(made_trace(9), targets={})
    with pytest.raises(ValueError, match=trace.id):
        made_gate(SMALL).loss(batch_of(trace))


# ---- calibration


def test_calibration_keeps_the_order_within_a_head():
    gate, traces = made_gate(SMALL), [made_trace(40, s) for s in range(3)]
    before = [gate.score_trace(t) for t in traces]
    gate.calibrate(traces)
    assert (gate.scale > 0).all()
    for trace, scores in zip(traces, before, strict=True):
        assert (gate.score_trace(trace).gather(-1, scores.argsort(-1)).diff() >= 0).all()


def test_calibration_makes_scores_the_log_of_utility():
    n = 50
    score = torch.randn(2, 3, n)
    slope, offset = positive_fit(score, 0.5 * score - 3)
    assert torch.allclose(slope, torch.tensor(0.5), atol=1e-5)
    assert torch.allclose(offset, torch.tensor(-3.0), atol=1e-5)


def test_calibration_never_turns_a_head_around():
    score = torch.randn(2, 3, 50)
    slope, _ = positive_fit(score, -score)
    assert (slope > 0).all()


def test_calibrating_twice_is_calibrating_once():
    gate, traces = made_gate(SMALL), [made_trace(40, s) for s in range(3)]
    gate.calibrate(traces)
    first = gate.scale.clone()
    gate.calibrate(traces)
    assert torch.equal(gate.scale, first)


def test_published_network_has_the_published_size():
    config = KVPConfig(branch_width=256, width=256, positions="table", max_positions=6000, unrotate=False, pooling=0)
    one = KVP(config, BaseModel("one", "", 1, 1, 1, 128, 128))
    # 465,729 in the authors' code, less weight and bias of two norms that the next linear absorbs, and the last linear's bias
    assert sum(p.numel() for p in one.parameters()) == 465_729 - 4 * 256 - 1
