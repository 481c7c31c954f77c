"""The reference ops against float64 loops, their gradients, and what padding may not change."""

from __future__ import annotations

import math

import pytest
import torch

from learnkv import ops
from learnkv.kernels import reference


def plackett_luce(scores: torch.Tensor) -> torch.Tensor:
    return torch.stack([scores[..., j] - scores[..., j:].logsumexp(-1) for j in range(scores.shape[-1])], -1)


@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
def test_pl_logprob_and_its_gradient_equal_the_definition(spread):
    scores = (torch.randn(3, 9, generator=torch.Generator().manual_seed(0)) * spread).requires_grad_()
    weight = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    exact = scores.detach().double().requires_grad_()
    torch.testing.assert_close(ops.pl_logprob(scores), plackett_luce(exact).float(), rtol=1e-5, atol=1e-5)
    (ops.pl_logprob(scores) * weight).sum().backward()
    (plackett_luce(exact) * weight).sum().backward()
    torch.testing.assert_close(scores.grad, exact.grad.float(), rtol=1e-4, atol=2e-5)


def test_pl_logprob_of_padding_is_0_and_changes_neither_value_nor_gradient():
    alone = torch.tensor([0.3, -1.2, 2.0], requires_grad=True)
    padded = torch.tensor([[0.3, -1.2, 2.0, -math.inf, -math.inf], [-math.inf] * 5], requires_grad=True)
    weight = torch.tensor([1.0, -2.0, 0.5])
    (ops.pl_logprob(alone) * weight).sum().backward()
    out = ops.pl_logprob(padded)
    (out * torch.cat([weight, torch.ones(2)])).sum().backward()
    torch.testing.assert_close(out[0, :3], ops.pl_logprob(alone))
    assert (out[0, 3:] == 0).all() and (out[1] == 0).all()
    torch.testing.assert_close(padded.grad[0, :3], alone.grad)
    assert (padded.grad[0, 3:] == 0).all() and (padded.grad[1] == 0).all()


def test_budget_reward_is_the_utility_evicted_summed_over_budgets():
    utility = torch.tensor([3.0, 0.5, 2.0, 0.0])
    assert float(ops.budget_reward(utility)) == -sum(float(utility[kept:].sum()) for kept in range(4))


def attention_case(B=2, H=2, G=3, T=5, L=7, D=4, seed=0):
    """Row 1 starts with two padded queries; head 1 of row 1 holds 4 slots, head 1 of row 0 none; the first query may see nothing."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = torch.randn(B, H * G, T, D, generator=generator), torch.randn(B, H, L, D, generator=generator)
    query_positions = torch.tensor([[4, 5, 6, 7, 8], [-1, -1, 0, 1, 2]])
    key_positions = torch.tensor([[[0, 1, 2, 5, 6, 7, 8], [-1] * 7], [[0, 1, 2, -1, -1, -1, -1], [1, 2, 3, 4, -1, -1, -1]]])
    return queries, keys, query_positions, key_positions


def loop_mass(queries, keys, query_positions, key_positions, scale, over_group, over_queries):
    (B, Q, T, _), (H, L) = queries.shape, keys.shape[1:3]
    reduce = {"sum": sum, "mean": lambda x: sum(x) / max(1, len(x)), "max": lambda x: max(x, default=0.0)}
    out = torch.zeros(B, H, L, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            rows = []
            for t in (t for t in range(T) if query_positions[b, t] >= 0):
                group = range(h * (Q // H), (h + 1) * (Q // H))
                sees = (key_positions[b, h] >= 0) & (key_positions[b, h] <= query_positions[b, t])
                weights = [(keys[b, h].double() @ queries[b, q, t].double() * scale).exp() * sees for q in group]
                weights = [w / w.sum().clamp(min=1e-300) for w in weights]
                rows.append([reduce[over_group]([float(w[j]) for w in weights]) for j in range(L)])
            for j in range(L):
                out[b, h, j] = reduce[over_queries]([row[j] for row in rows])
    return out.float()


@pytest.mark.parametrize("over_group", ["sum", "mean", "max"])
@pytest.mark.parametrize("over_queries", ["sum", "mean", "max"])
@pytest.mark.parametrize("block", [1, 2**24])
def test_column_mass_equals_the_loop_whatever_the_block(over_group, over_queries, block, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
    case = attention_case()
    got = ops.column_mass(*case, 0.7, over_group=over_group, over_queries=over_queries)
    torch.testing.assert_close(got, loop_mass(*case, 0.7, over_group, over_queries), rtol=1e-5, atol=1e-6)


def test_column_mass_of_real_queries_sums_to_the_group_and_ignores_what_padding_holds():
    queries, keys, query_positions, key_positions = attention_case()
    mass = ops.column_mass(queries, keys, query_positions, key_positions, 0.7)
    torch.testing.assert_close(mass.sum(-1), torch.tensor([[15.0, 0.0], [9.0, 6.0]]))
    junk = queries.clone()
    junk[1, :, :2] = 1e30
    keys[key_positions < 0] = 1e30
    assert torch.equal(ops.column_mass(junk, keys, query_positions, key_positions, 0.7), mass)


def test_column_mass_is_finite_for_huge_logits():
    queries, keys, query_positions, key_positions = attention_case()
    assert ops.column_mass(queries * 1e15, keys * 1e15, query_positions, key_positions, 1.0).isfinite().all()


@pytest.mark.parametrize("block", [1, 2**24])
def test_row_lse_equals_logsumexp_and_is_minus_infinity_where_a_query_sees_nothing(block, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
    queries, keys, query_positions, key_positions = attention_case()
    got = ops.row_lse(queries, keys, query_positions, key_positions, 0.7)
    for b in range(2):
        for q in range(6):
            for t in range(5):
                sees = (key_positions[b, q // 3] >= 0) & (key_positions[b, q // 3] <= query_positions[b, t])
                want = (keys[b, q // 3][sees] @ queries[b, q, t] * 0.7).logsumexp(-1) if sees.any() else torch.tensor(-math.inf)
                torch.testing.assert_close(got[b, q, t], want, rtol=1e-5, atol=1e-6)


def test_gather_pages_lays_a_heads_pages_side_by_side_and_zeroes_the_rest():
    pages = torch.arange(1.0, 13.0).view(4, 3, 1)
    table, lengths = torch.tensor([[[2, 0], [3, -1]]], dtype=torch.int32), torch.tensor([[4, 2]], dtype=torch.int32)
    assert ops.gather_pages(pages, table, lengths)[..., 0].tolist() == [[[7, 8, 9, 1], [10, 11, 0, 0]]]


def test_gather_pages_of_empty_heads_is_empty():
    pages, table = torch.ones(2, 3, 1), torch.full((1, 2, 1), -1, dtype=torch.int32)
    assert ops.gather_pages(pages, table, torch.zeros(1, 2, dtype=torch.int32)).shape == (1, 2, 0, 1)


def test_select_takes_the_best_and_of_equal_scores_the_later_position():
    scores = torch.tensor([1.0, 2.0, 2.0, 2.0, -math.inf])
    positions = torch.tensor([9, 4, 7, 5, 8])
    chosen = [ops.select(scores, positions, torch.tensor(count)).tolist() for count in (0, 1, 2, 4, 9)]
    assert chosen == [
        [False] * 5,
        [False, False, True, False, False],
        [False, False, True, True, False],
        [True] * 4 + [False],
        [True] * 4 + [False],
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_scores_that_are_not_float32_are_refused_in_words(dtype):
    scores, positions = torch.rand(1, 2, 5).to(dtype), torch.arange(5, dtype=torch.int32).expand(1, 2, 5)
    with pytest.raises(ValueError, match=r"ops\.select ranks float32 scores, these are"):
        ops.select(scores, positions, torch.full((1, 2), 3))
    with pytest.raises(ValueError, match=r"ops\.evict_slot ranks float32 scores, these are"):
        ops.evict_slot(scores, positions, positions < 0)


@pytest.mark.parametrize("knob", ["over_group", "over_queries"])
def test_column_mass_refuses_a_reduction_it_does_not_have(knob):
    with pytest.raises(ValueError, match=rf'ops\.column_mass\({knob}="median"\): there are sum, mean, max'):
        ops.column_mass(*attention_case(), 0.7, **{knob: "median"})


@pytest.mark.parametrize("sizes", [{"B": 0}, {"H": 0}, {"T": 0}, {"L": 0}, {"B": 0, "T": 1}])
def test_mass_of_nothing_is_nothing(sizes):
    B, H, T, L = ({"B": 2, "H": 2, "T": 5, "L": 7} | sizes).values()
    queries, keys = torch.ones(B, H * 3, T, 4), torch.ones(B, H, L, 4)
    positions = torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, H, L, dtype=torch.int32)
    assert torch.equal(ops.row_lse(queries, keys[:, :, :0], positions[0], positions[1][..., :0], 1.0), torch.full((B, H * 3, T), -math.inf))
    for over_queries in ("sum", "mean", "max"):
        mass = ops.column_mass(queries, keys, *positions, 1.0, over_queries=over_queries)
        assert mass.shape == (B, H, L) and (T > 0 or not mass.any())
