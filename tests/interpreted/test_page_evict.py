"""page_evict in Triton against plain torch: tables, lengths and lists are equal."""

from __future__ import annotations

import pytest
import torch

from learnkv import ops
from learnkv.kernels import reference
from tests.interpreted.strict import strict
from tests.test_reference_pages import P, ragged_table


def case(pages: int, share: float, dtype=torch.int64, seed: int = 0):
    """Six heads, one full, one without a token, one of a single token; `share` of the pages stay."""
    most = pages * P
    lengths = torch.tensor([[most, 0, min(1, most)], [max(0, most - 5), most // 2, most // 3 + 1]])
    table = ragged_table(lengths, spare=0, seed=seed)
    keep = torch.rand(table.shape, generator=torch.Generator().manual_seed(seed)) < share
    return table, lengths.to(dtype), keep, P


def run(case, **how):
    with strict(**how) as seen, ops.use("triton"):
        got = ops.page_evict(*case)
    assert ops.last_used == "triton"
    return got, seen


def assert_equal(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("pages", [1, 63, 129])
def test_results_are_those_of_plain_torch(pages, share):
    inputs = case(pages, share)
    assert_equal(run(inputs)[0], reference.page_evict(*inputs))


@pytest.mark.parametrize("pages", [1023, 1024, 1025, 2500])
def test_heads_of_several_blocks_are_carried_over(pages):
    inputs = case(pages, 0.5)
    assert_equal(run(inputs)[0], reference.page_evict(*inputs))


def test_lengths_stay_in_their_type():
    inputs = case(63, 0.5, torch.int32)
    assert_equal(run(inputs)[0], reference.page_evict(*inputs))


def test_pages_without_tokens_are_kept_or_given_up_like_any_other():
    _, lengths, _, _ = case(63, 0.5)
    table = ragged_table(lengths, spare=3)
    keep = torch.rand(table.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    inputs = (table, lengths, keep, P)
    assert_equal(run(inputs)[0], reference.page_evict(*inputs))


def test_columns_that_keep_lacks_are_given_up():
    table, lengths, keep, _ = case(63, 0.8)
    inputs = (table, lengths, keep[..., :40], P)
    assert_equal(run(inputs)[0], reference.page_evict(*inputs))


def test_order_of_programs_changes_nothing():
    inputs = case(129, 0.5)
    want, _ = run(inputs, order="grid")
    for how in ({"order": "reverse"}, {"order": "shuffle", "seed": 1}, {"order": "shuffle", "seed": 2}):
        assert_equal(run(inputs, **how)[0], want)


def test_the_table_given_is_left_as_it_was():
    inputs = case(63, 0.5)
    before = [x.clone() for x in inputs[:3]]
    run(inputs)
    assert_equal(inputs[:3], before)


def test_a_page_of_several_heads_is_listed_by_each_that_gives_it_up():
    table = torch.tensor([[[3, 8]], [[3, 9]]], dtype=torch.int32)
    keep = torch.tensor([[[False, True]], [[False, False]]])
    _, lengths, given_up, counts = run((table, torch.tensor([[20], [32]]), keep, P))[0]
    assert given_up.tolist() == [3, 3, 9, -1] and counts.tolist() == [[1], [2]] and lengths.tolist() == [[4], [0]]


def test_no_heads_and_no_pages_give_nothing():
    for B, pages in ((0, 3), (2, 0)):
        inputs = (torch.empty(B, 1, pages, dtype=torch.int32), torch.zeros(B, 1).long(), torch.empty(B, 1, pages, dtype=torch.bool), P)
        assert_equal(run(inputs)[0], reference.page_evict(*inputs))
