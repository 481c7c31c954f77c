"""Which slots a Policy keeps, against plain loops over random ragged heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learnkv.budgets import Adaptive, Ratio, adaptive, adaptive_global, uniform
from learnkv.heuristics.chunkkv import ChunkKV
from learnkv.heuristics.random import Random
from learnkv.heuristics.snapkv import SnapKV
from learnkv.heuristics.streaming_llm import StreamingLLM
from learnkv.observation import Observation, Scorer
from learnkv.policy import Policy
from tests.observations import Row, make_row, observe


@dataclass(frozen=True, eq=False)
class ByPosition(Scorer):
    """score = table[layer][position], the same for every row and head; what lies on empty slots is NaN."""

    table: Tensor  # [layers, positions]

    def score(self, obs: Observation) -> Tensor:
        return self.table[obs.layer][obs.positions.clamp(min=0).long()].masked_fill(~obs.filled, float("nan"))


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Rows of up to 14 tokens, heads that lost different ones, the last two tokens and the first held by all."""
    rows = []
    H = draw(st.integers(1, 3))
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(1, 14))
        kept = []
        for _ in range(H):
            lost = draw(st.sets(st.integers(1, 12)))
            kept.append([p for p in range(n) if p not in lost or p >= n - 2])
        x = torch.zeros(H, n, 1)
        rows.append(Row(x, x, x, x, torch.zeros(n).long(), kept, min(1, n), [torch.zeros(len(k), 0) for k in kept]))
    return rows


TABLES = st.lists(st.sampled_from([-math.inf, -2.0, 0.0, 0.25, 3.0, math.inf]), min_size=14, max_size=14).map(
    lambda x: torch.tensor([x, x[::-1]])
)


def kept_positions(keep: Tensor, obs: Observation) -> list[list[list[int]]]:
    """[row][head] positions of the kept slots."""
    return [[obs.positions[b, h][keep[b, h]].tolist() for h in range(keep.shape[1])] for b in range(keep.shape[0])]


def expect(positions: list[int], worth: list[float], count: int, num_seen: int, sinks: int, recent: int, pins: set[int]) -> list[int]:
    """One head in plain Python: protected ones, then the best by (score, position) until `count` are kept."""
    safe = {p for p in positions if p < sinks or p >= num_seen - recent or p in pins}
    others = sorted((p for p in positions if p not in safe), key=lambda p: (worth[p], p), reverse=True)
    return sorted(safe | set(others[: max(0, count - len(safe))]))


@given(batches(), TABLES, st.integers(2, 9), st.integers(0, 1), st.integers(0, 1), st.sets(st.integers(0, 13)), st.sampled_from([None, 2]))
@settings(max_examples=200, deadline=None)
def test_uniform_keeps_the_protected_then_the_best_of_each_head(rows, table, budget, sinks, recent, pins, page):
    obs = observe(rows, page=page)
    policy = Policy(ByPosition(table), budget, num_sinks=sinks, num_recent=recent)
    pinned = torch.isin(obs.positions, torch.tensor(sorted(pins), dtype=torch.int32)) & obs.filled
    keep = policy.select([obs], [pinned])[0]
    want = [[expect(head, table[0].tolist(), budget, row.num_seen, sinks, recent, pins) for head in row.kept] for row in rows]
    assert kept_positions(keep, obs) == want


@given(batches(), TABLES, st.integers(2, 9), st.sampled_from([uniform, adaptive, adaptive_global, Adaptive(floor=0.5)]))
@settings(max_examples=150, deadline=None)
def test_every_allocator_keeps_exactly_the_budget_or_all_there_is(rows, table, budget, allocate):
    layers = [observe(rows, layer=layer) for layer in (0, 1)]
    policy = Policy(ByPosition(table), budget, allocate, num_sinks=1, num_recent=1)
    keeps = policy.select(layers) if policy.scope == "model" else [policy.select([obs])[0] for obs in layers]
    for b, row in enumerate(rows):
        held = torch.tensor([len(head) for head in row.kept] * 2)
        kept = torch.cat([keep[b].sum(-1) for keep in keeps])
        if allocate is uniform:
            assert torch.equal(kept, held.clamp(max=budget))
        elif policy.scope == "model":
            assert kept.sum() == min(budget * len(held), int(held.sum()))
        else:
            assert (kept.view(2, -1).sum(-1) == min(budget * len(held) // 2, int(held.sum()) // 2)).all()


@given(batches(), TABLES, st.floats(0.05, 1.0), st.sampled_from([uniform, adaptive]))
@settings(max_examples=100, deadline=None)
def test_a_row_keeps_in_a_batch_what_it_keeps_alone(rows, table, ratio, allocate):
    policy = Policy(ByPosition(table), Ratio(ratio), allocate, num_sinks=1, num_recent=2)
    obs = observe(rows, page=4, padding=2)
    together = kept_positions(policy.select([obs])[0], obs)
    for b, row in enumerate(rows):
        alone = observe([row])
        assert together[b] == kept_positions(policy.select([alone])[0], alone)[0]


@pytest.mark.parametrize("allocate", [uniform, adaptive, adaptive_global])
def test_a_row_within_its_budget_keeps_everything(allocate):
    obs = observe([make_row(12), make_row(5)])
    assert torch.equal(Policy(StreamingLLM(), 12, allocate, num_sinks=1, num_recent=1).select([obs])[0], obs.filled)


@pytest.mark.parametrize("allocate", [uniform, adaptive, adaptive_global])
def test_protected_tokens_stay_where_they_exceed_the_budget(allocate):
    obs = observe([make_row(40)])
    keep = Policy(ByPosition(torch.rand(2, 40)), Ratio(0.05), allocate, num_sinks=4, num_recent=16).select([obs])[0]
    assert kept_positions(keep, obs) == [[[*range(4), *range(24, 40)]] * 2]


def test_protection_counts_real_tokens_and_not_padding():
    obs = observe([make_row(30), make_row(9)], padding=5)
    keep = Policy(ByPosition(torch.rand(2, 30)), 5, num_sinks=2, num_recent=3).select([obs])[0]
    assert kept_positions(keep, obs)[1] == [[0, 1, 6, 7, 8]] * 2


def test_a_global_budget_moves_tokens_to_the_layer_that_scores_higher():
    table = torch.stack([torch.arange(20.0), torch.arange(20.0) + 100])
    layers = [observe([make_row(20)], layer=layer) for layer in (0, 1)]
    keeps = Policy(ByPosition(table), 6, adaptive_global, num_sinks=1, num_recent=1).select(layers)
    assert [keep.sum(-1).tolist() for keep in keeps] == [[[2, 2]], [[10, 10]]]


def test_an_adaptive_layer_budget_stays_in_its_layer_when_all_layers_are_shown():
    table = torch.stack([torch.arange(20.0), torch.arange(20.0) + 100])
    layers = [observe([make_row(20)], layer=layer) for layer in (0, 1)]
    keeps = Policy(ByPosition(table), 6, adaptive, num_sinks=1, num_recent=1).select(layers)
    assert [int(keep.sum()) for keep in keeps] == [12, 12]


def test_a_budget_and_scores_given_are_used_as_they_are():
    obs = observe([make_row(20), make_row(9)])
    table = torch.arange(20.0).flip(0).expand(2, 20)
    policy = Policy(StreamingLLM(), Ratio(0.5), num_sinks=0, num_recent=0)
    keep = policy.select([obs], budget=torch.tensor([3, 2]), scores=[ByPosition(table).score(obs)])[0]
    assert kept_positions(keep, obs) == [[[0, 1, 2]] * 2, [[0, 1]] * 2]


def test_scores_of_infinity_compete_and_do_not_protect():
    table = torch.full((2, 20), math.inf)
    obs = observe([make_row(20)])
    keep = Policy(ByPosition(table), 6, num_sinks=1, num_recent=1).select([obs])[0]
    assert kept_positions(keep, obs) == [[[0, 15, 16, 17, 18, 19]] * 2]


def test_scores_of_minus_infinity_still_fill_the_budget():
    obs = observe([make_row(20)])
    keep = Policy(ByPosition(torch.full((2, 20), -math.inf)), 6, num_sinks=1, num_recent=1).select([obs])[0]
    assert keep.sum(-1).tolist() == [[6, 6]]


def test_nan_scores_are_refused_with_the_scorer_and_the_layer():
    table = torch.zeros(2, 20)
    table[1, 7] = math.nan
    with pytest.raises(ValueError, match="ByPosition gave NaN scores in layer 1"):
        Policy(ByPosition(table), 6, num_sinks=0, num_recent=0).select([observe([make_row(20)], layer=1)])


def test_layers_before_a_nan_are_not_said_to_be_as_they_were():
    table = torch.full((2, 20), math.nan)
    with pytest.raises(ValueError, match="layer 1, which keeps all it holds; earlier layers may have evicted already: reset"):
        Policy(ByPosition(table), 6, num_sinks=0, num_recent=0).select([observe([make_row(20)], layer=1)])


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        (None, "NoneType for scores"),
        ([1.0, 2.0], "list for scores"),
        (torch.zeros(1, 1, 20), r"scores of shape \[1, 1, 20\]"),
        (torch.zeros(20), r"scores of shape \[20\]"),
        (torch.zeros(1, 2, 19), r"scores of shape \[1, 2, 19\]"),
    ],
)
def test_scores_of_another_kind_or_shape_are_refused_with_the_scorer_and_the_layer(scores, text):
    class Odd(Scorer):
        def score(self, obs: Observation) -> Tensor:
            return scores

    with pytest.raises(ValueError, match=rf"Odd gave {text} in layer 1; a scorer gives a tensor \[B, H, L\], here \[1, 2, 20\]"):
        Policy(Odd(), 6, num_sinks=0, num_recent=0).select([observe([make_row(20)], layer=1)])


@dataclass(frozen=True, eq=False)
class Reversed(ByPosition):
    """Scores as the table says, and has the last word the other way round; NaN where the policy decides."""

    def refine(self, scores: Tensor, kept: Tensor, obs: Observation) -> Tensor:
        return (-scores).masked_fill(scores == -math.inf, math.nan)


def test_scores_say_how_many_stay_and_the_scorers_last_word_says_which():
    """The first head has the two large scores, so it keeps two slots beside those that stay whatever is said: its two worst."""
    table = torch.tensor([[0.0, 9, 8, 1, 2, 3]] * 2)
    obs = observe([replace(make_row(6, num_new=1), kept=[[0, 1, 2, 4, 5], [0, 3, 5]], memory=[torch.zeros(5, 0), torch.zeros(3, 0)])])
    scorer = Reversed(table)
    count = Policy(ByPosition(table), 3, adaptive, num_sinks=1, num_recent=1).select([obs])[0].sum(-1)
    keep = Policy(scorer, 3, adaptive, num_sinks=1, num_recent=1).select([obs])[0]
    assert torch.equal(keep.sum(-1), count) and count.tolist() == [[4, 2]]
    assert kept_positions(keep, obs) == [[[0, 2, 4, 5], [0, 5]]]


def test_a_last_word_of_nan_is_refused():
    @dataclass(frozen=True, eq=False)
    class Lost(ByPosition):
        def refine(self, scores: Tensor, kept: Tensor, obs: Observation) -> Tensor:
            return scores * math.nan

    with pytest.raises(ValueError, match="Lost gave NaN scores in layer 0"):
        Policy(Lost(torch.zeros(2, 9)), 3, num_sinks=0, num_recent=0).select([observe([make_row(9)])])


def test_half_precision_scores_are_compared_in_float32():
    @dataclass(frozen=True)
    class Half(Scorer):
        def score(self, obs: Observation) -> Tensor:
            return obs.positions.half()

    obs = observe([make_row(9)])
    policy = Policy(Half(), 3, num_sinks=0, num_recent=0)
    assert policy.mask(policy.scorer.score(obs), obs, torch.zeros_like(obs.filled)).dtype == torch.float32


@pytest.mark.parametrize(
    ("knobs", "text"),
    [
        ({"budget": 12}, r"budget=12 is smaller than num_sinks \+ num_recent = 36"),
        ({"budget": -1}, "budget=-1 is smaller"),
        ({"budget": 0, "num_sinks": 0, "num_recent": 0}, "budget=0 is smaller than 1"),
        ({"budget": 0.2}, r"budget=0.2 is neither"),
        ({"budget": True}, "budget=True is neither"),
        ({"budget": 2**63}, r"budget=9223372036854775808 is above 2\*\*31 - 1"),
        ({"num_recent": 10**24}, "num_recent=10+ is above"),
        ({"interval": 10**24}, "interval=10+ is above"),
        ({"num_sinks": 4.5}, r"num_sinks=4\.5 is no whole number"),
        ({"allocate": 3}, r'allocate is 3, no Allocator; give one, as budgets\.ALLOCATORS\["adaptive"\] is'),
        ({"allocate": "adaptive"}, "allocate is 'adaptive', no Allocator"),
        ({"scorer": "snapkv"}, r"scorer is 'snapkv', no Scorer; methods\.METHODS"),
        ({"scorer": SnapKV(observation_window=10**24)}, "SnapKV: observation_window=10+ is above"),
        ({"scorer": ChunkKV(SnapKV(kernel_size=10**24 + 1))}, "SnapKV: kernel_size=10+1 is above"),
        ({"num_sinks": -1}, "num_sinks=-1"),
        ({"num_recent": -2}, "num_recent=-2"),
        ({"interval": 0}, "interval=0"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(knobs, text):
    with pytest.raises(ValueError, match=text):
        Policy(**{"scorer": StreamingLLM(), "budget": 64, **knobs})


def test_a_seed_counts_nothing_and_may_be_any_number():
    assert Policy(Random(seed=2**40), 64).scorer == Random(seed=2**40)


@pytest.mark.parametrize(
    ("scorer_scope", "allocate", "scope"), [("layer", adaptive, "layer"), ("layer", adaptive_global, "model"), ("model", uniform, "model")]
)
def test_the_scope_is_the_wider_of_scorer_and_allocator(scorer_scope, allocate, scope):
    scorer = StreamingLLM()
    object.__setattr__(scorer, "scope", scorer_scope)
    assert replace(Policy(scorer, 64), allocate=allocate).scope == scope
