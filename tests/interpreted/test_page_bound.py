"""page_minmax and page_bound in Triton against plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from learnkv import ops
from learnkv.kernels import reference
from tests.interpreted.strict import strict
from tests.test_reference_pages import bound_case, logits_of

# infinite extremes of a page without tokens make NaN in its own row, which is then replaced
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def error(got, want):
    """Relative norm of the difference where both are finite; infinities have to agree."""
    assert torch.equal(got == -math.inf, want == -math.inf)
    got, want = (x.double().masked_fill(want == -math.inf, 0) for x in (got, want))
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def minmax(keys, positions, **how):
    with strict(**how) as seen, ops.use("triton"):
        got = ops.page_minmax(keys, positions)
    assert ops.last_used == "triton"
    return got, seen


def bound(*inputs, reduce="max", **how):
    with strict(**how) as seen, ops.use("triton"):
        got = ops.page_bound(*inputs, reduce=reduce)
    assert ops.last_used == "triton"
    return got, seen


def assert_equal(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 80, 128])
def test_extremes_are_exact_and_infinite_where_a_page_is_empty(dtype, D):
    _, keys, positions, _ = bound_case(dtype, D=D)
    assert_equal(minmax(keys, positions)[0], reference.page_minmax(keys, positions))


@pytest.mark.parametrize("P", [1, 63, 129, 300])
def test_extremes_of_a_dense_head_are_exact(P):
    keys, positions = torch.randn(3, P, 20), torch.arange(P).expand(3, P).clone().int()
    positions[1, P // 2 :], positions[2] = -1, -1
    keys[positions < 0] = math.nan
    assert_equal(minmax(keys, positions)[0], reference.page_minmax(keys, positions))


def test_extremes_do_not_depend_on_the_order_of_programs():
    _, keys, positions, _ = bound_case(torch.bfloat16, D=64)
    want, _ = minmax(keys, positions, order="grid")
    for how in ({"order": "reverse"}, {"order": "shuffle", "seed": 1}, {"order": "shuffle", "seed": 2}):
        assert_equal(minmax(keys, positions, **how)[0], want)


def test_extremes_read_filled_slots_only():
    _, keys, positions, _ = bound_case(torch.bfloat16, D=64)
    _, seen = minmax(keys, positions)
    traffic = seen.stats["page_extremes"]
    assert traffic.load_bytes == 4 * positions.numel() + 64 * 2 * int((positions >= 0).sum())
    assert traffic.store_bytes == 2 * 64 * 2 * len(keys)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, G, T", [(64, 1, None), (80, 3, 1), (128, 4, 3), (128, 7, None), (8, 20, 2), (256, 4, None)])
def test_bound_is_as_near_as_plain_torch(dtype, D, G, T):
    queries, keys, positions, table = bound_case(dtype, G=G, T=T, D=D)
    inputs = (queries, *reference.page_minmax(keys, positions), table)
    want = reference.page_bound(*(x.float() for x in inputs[:3]), table)
    assert error(bound(*inputs)[0], want) <= 2 * error(reference.page_bound(*inputs), want) + 1e-5


@pytest.mark.parametrize("G, T", [(1, None), (3, 3), (7, None)])
def test_bound_summed_over_the_group_is_as_near_as_plain_torch(G, T):
    queries, keys, positions, table = bound_case(torch.bfloat16, G=G, T=T, D=64)
    inputs = (queries, *reference.page_minmax(keys, positions), table)
    want = reference.page_bound(*(x.float() for x in inputs[:3]), table, reduce="sum")
    assert error(bound(*inputs, reduce="sum")[0], want) <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_bound_is_no_less_than_any_logit_of_the_page(dtype):
    case = bound_case(dtype, G=4, T=2, D=64)
    queries, keys, positions, table = case
    got, _ = bound(queries, *minmax(keys, positions)[0], table)
    highest = logits_of(*case).amax((3, 4, 5))
    assert (got + 1e-4 >= highest).all() and torch.equal(got == -math.inf, highest == -math.inf)


@pytest.mark.parametrize("pages", [1, 63, 64, 65, 129])
def test_any_number_of_pages_is_bounded(pages):
    minimum = torch.randn(2 * pages + 3, 64)
    maximum = minimum + torch.rand(2 * pages + 3, 64)
    table = torch.randperm(len(minimum))[: 2 * pages].view(1, 2, pages).int()
    table[0, 1, pages // 2 :] = -1
    inputs = (torch.randn(1, 6, 64), minimum, maximum, table)
    assert error(bound(*inputs)[0], reference.page_bound(*inputs)) <= 1e-5


def test_pages_of_nobody_are_not_read():
    queries, keys, positions, table = bound_case(D=64)
    minimum, maximum = reference.page_minmax(keys, positions)
    want, _ = bound(queries, minimum, maximum, table)
    free = torch.ones(len(keys), dtype=torch.bool)
    free[table[table >= 0].long()] = False
    minimum[free], maximum[free] = math.nan, math.nan
    assert torch.equal(bound(queries, minimum, maximum, table)[0], want) and not want.isnan().any()


@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_a_page_without_tokens_is_bounded_by_nothing_whatever_the_query(reduce):
    queries = torch.zeros(1, 2, 64)
    queries[0, 1, 0] = 1.0
    minimum, maximum = reference.page_minmax(torch.randn(2, 16, 64), torch.tensor([[0] * 16, [-1] * 16]))
    got, _ = bound(queries, minimum, maximum, torch.tensor([[[0, 1], [1, 0]]], dtype=torch.int32), reduce=reduce)
    assert (got[0] == -math.inf).tolist() == [[False, True], [True, False]]


def test_a_head_without_pages_is_bounded_by_nothing():
    got, _ = bound(torch.randn(1, 6, 64), torch.randn(4, 64), torch.randn(4, 64), torch.full((1, 2, 3), -1, dtype=torch.int32))
    assert (got == -math.inf).all()


def test_queries_with_gaps_between_heads_are_read_where_they_lie():
    queries, keys, positions, table = bound_case(torch.bfloat16, T=2, D=64)
    extremes = reference.page_minmax(keys, positions)
    assert torch.equal(
        bound(queries.transpose(1, 2).contiguous().transpose(1, 2), *extremes, table)[0], bound(queries, *extremes, table)[0]
    )


def test_bound_does_not_depend_on_the_order_of_programs():
    queries, keys, positions, table = bound_case(torch.bfloat16, T=2, D=64)
    inputs = (queries, *reference.page_minmax(keys, positions), table)
    want, _ = bound(*inputs, order="grid")
    for how in ({"order": "reverse"}, {"order": "shuffle", "seed": 1}, {"order": "shuffle", "seed": 2}):
        assert torch.equal(bound(*inputs, **how)[0], want)


def test_bound_reads_little_more_than_the_extremes_of_the_heads_pages():
    pages, D = 129, 128
    minimum = torch.randn(2 * pages, D).bfloat16()
    table = torch.arange(2 * pages).view(1, 2, pages).int()
    queries = torch.randn(1, 8, D).bfloat16()
    _, seen = bound(queries, minimum, minimum + 1, table)
    assert seen.stats["page_reach"].load_bytes <= 1.05 * (2 * minimum.nbytes + queries.nbytes)


def test_pages_past_2_to_the_31_elements_are_found():
    N, D = 2**24 + 8, 128
    minimum, maximum = torch.empty(N, D, dtype=torch.bfloat16), torch.empty(N, D, dtype=torch.bfloat16)  # virtual memory
    low = torch.randn(3, D).bfloat16()
    minimum[-3:], maximum[-3:] = low, low + 1
    queries = torch.randn(1, 4, D).bfloat16()
    got, _ = bound(queries, minimum, maximum, torch.tensor([[[N - 1, N - 2, N - 3]]], dtype=torch.int32), races=False)
    want = reference.page_bound(queries, low.flip(0), (low + 1).flip(0), torch.tensor([[[0, 1, 2]]], dtype=torch.int32))
    assert error(got, want) <= 1e-5
