"""Pooling against plain loops, and column mass of a given LSE, of rows in no order and of blocks that see a part of the slots."""

from __future__ import annotations

import pytest
import torch

from learnkv import ops
from learnkv.kernels import reference


@pytest.mark.parametrize(("pooling", "reduce"), [("max", max), ("mean", lambda found: sum(found) / len(found))])
@pytest.mark.parametrize("kernel_size", [1, 3, 7])
@pytest.mark.parametrize("L", [1, 4, 23])
def test_pool_is_of_the_filled_slots_around_a_slot_and_0_on_empty_ones(pooling, reduce, kernel_size, L):
    torch.manual_seed(L)
    mass, filled = torch.randn(2, 2, L), torch.rand(2, 2, L) < 0.7
    positions, half = torch.arange(L).expand(2, 2, L).masked_fill(~filled, -1), kernel_size // 2
    got = ops.pool(mass.masked_fill(~filled, torch.nan), positions, kernel_size=kernel_size, pooling=pooling)
    for b, h, n in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(L)).tolist():
        around = [float(mass[b, h, s]) for s in range(max(0, n - half), min(L, n + half + 1)) if filled[b, h, s]]
        assert got[b, h, n].item() == pytest.approx(reduce(around) if filled[b, h, n] else 0.0, abs=1e-5)


def make_case(seed: int = 0):
    """Two rows of 40 slots that end at position 39, the last 9 queries of each; row 0 starts with two padded ones, head 1 is half empty."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = torch.randn(2, 6, 9, 8, generator=generator), torch.randn(2, 2, 40, 8, generator=generator)
    query_positions, key_positions = torch.arange(31, 40).repeat(2, 1), torch.arange(40).repeat(2, 2, 1)
    query_positions[0, :2] = -1
    key_positions[:, 1, 20:] = -1
    return queries, keys, query_positions, key_positions


REDUCTIONS = [(group, queries) for group in ("sum", "mean", "max") for queries in ("sum", "mean", "max")]


@pytest.mark.parametrize(("over_group", "over_queries"), REDUCTIONS)
@pytest.mark.parametrize("block", [1, 2**24])
def test_mass_with_its_own_lse_given_is_the_mass(over_group, over_queries, block, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
    case, reduce = make_case(), {"over_group": over_group, "over_queries": over_queries}
    given = ops.column_mass(*case, 0.4, **reduce, lse=ops.row_lse(*case, 0.4))
    torch.testing.assert_close(given, ops.column_mass(*case, 0.4, **reduce), rtol=1e-5, atol=1e-6)


def test_mass_with_an_lse_of_more_keys_is_its_share_of_them():
    case = make_case()
    own = ops.row_lse(*case, 0.4)
    lse = torch.logaddexp(own, torch.tensor(1.0))
    share = (own - lse).exp().view(2, 2, 3, 9).sum((2, 3))
    torch.testing.assert_close(ops.column_mass(*case, 0.4, lse=lse).sum(-1), share)


def test_mass_and_lse_do_not_depend_on_the_order_of_queries_and_slots():
    queries, keys, query_positions, key_positions = make_case()
    rows, slots = torch.randperm(9), torch.randperm(40)
    other = queries[:, :, rows], keys[:, :, slots], query_positions[:, rows], key_positions[..., slots]
    case = queries, keys, query_positions, key_positions
    torch.testing.assert_close(ops.column_mass(*other, 0.4), ops.column_mass(*case, 0.4)[..., slots])
    torch.testing.assert_close(ops.row_lse(*other, 0.4), ops.row_lse(*case, 0.4)[..., rows])


def test_rows_are_computed_with_the_slots_they_see_alone():
    queries, keys = torch.randn(1, 2, 40, 8), torch.randn(1, 1, 40, 8)
    positions = torch.arange(40)[None]
    blocks = reference.row_blocks(queries[:, :, 10:20], keys, positions[:, 10:20], positions[None], 1.0)
    assert [logits.shape[-1] for _, logits in blocks] == [20]


@pytest.mark.parametrize("T", [1, 5])
def test_mass_of_queries_older_than_every_slot_is_0_and_their_lse_minus_infinity(T):
    case = torch.randn(1, 2, T, 8), torch.randn(1, 1, 7, 8), torch.full((1, T), 3), torch.arange(4, 11).view(1, 1, 7)
    assert not ops.column_mass(*case, 1.0).any()
    assert (ops.row_lse(*case, 1.0) == -torch.inf).all()


def test_without_slots_mass_is_empty_and_lse_minus_infinity():
    case = torch.ones(1, 2, 3, 8), torch.ones(1, 1, 0, 8), torch.ones(1, 3).long(), torch.ones(1, 1, 0).long()
    assert ops.column_mass(*case, 1.0).shape == (1, 1, 0)
    assert (ops.row_lse(*case, 1.0) == -torch.inf).all()


@pytest.mark.parametrize(
    ("knobs", "text"),
    [({"pooling": "median"}, "there are max, mean"), ({"kernel_size": 4}, "has no middle slot"), ({"kernel_size": -1}, "no middle")],
)
def test_pool_refuses_a_reduction_it_does_not_have_and_a_size_without_a_middle(knobs, text):
    with pytest.raises(ValueError, match=rf"ops\.pool\(.*{text}"):
        ops.pool(torch.rand(1, 2, 9), torch.arange(9).expand(1, 2, 9), **{"kernel_size": 3, "pooling": "max", **knobs})
