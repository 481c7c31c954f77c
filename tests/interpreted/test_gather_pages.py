"""gather_pages in Triton lays each head's slots side by side as the reference does, and reads no page that the head does not hold."""

from __future__ import annotations

import pytest
import torch

from learnkv import ops
from learnkv.kernels import reference
from tests.compact_parts import pool_case
from tests.interpreted.strict import strict


@pytest.mark.parametrize("dtype, D", [(torch.float32, 4), (torch.bfloat16, 80), (torch.bfloat16, 128), (torch.float16, 256)])
@pytest.mark.parametrize("lengths", [[[63, 1, 16], [17, 0, 129]], [[1]], [[16, 15], [1, 17]]])
def test_gather_pages_equals_the_reference(dtype, D, lengths):
    pools, table, lengths, _ = pool_case(lengths, D=D, dtype=dtype)
    want = reference.gather_pages(pools[0], table, lengths)
    with ops.use("triton"), strict(order="shuffle"):
        got = ops.gather_pages(pools[0], table, lengths)
    assert ops.last_used == "triton" and got.dtype == dtype
    assert torch.equal(got, want) and not got.isnan().any()  # what no head holds is NaN there


@pytest.mark.parametrize("columns", [slice(None), slice(1, 3), slice(2, 3), slice(1, 1)])
def test_gather_pages_of_columns_equals_the_reference(columns):
    pools, table, lengths, _ = pool_case(C=3)
    memory = pools[3][..., columns]
    want = reference.gather_pages(memory, table, lengths)
    with ops.use("triton"), strict():
        assert torch.equal(ops.gather_pages(memory, table, lengths), want)


def test_gather_pages_of_positions_equals_the_reference():
    pools, table, lengths, _ = pool_case([[2000, 3], [0, 1030]])
    want = reference.gather_pages(pools[2][..., None], table, lengths)
    with ops.use("triton"), strict(order="reverse"):
        assert torch.equal(ops.gather_pages(pools[2][..., None], table, lengths.int()), want)


def test_gather_pages_of_rows_that_share_pages_equals_the_reference():
    pools, table, lengths, _ = pool_case()
    table[1], lengths[1] = table[0], lengths[0] - 1
    lengths.clamp_(min=0)
    want = reference.gather_pages(pools[1], table, lengths)
    with ops.use("triton"), strict(order="shuffle", seed=3):
        assert torch.equal(ops.gather_pages(pools[1], table, lengths), want)


def test_gather_pages_of_one_page_a_head_equals_the_reference():
    pages, table, lengths = torch.randn(4, 37, 5), torch.arange(4, dtype=torch.int32).view(2, 2, 1), torch.tensor([[37, 1], [0, 36]])
    want = reference.gather_pages(pages, table, lengths)
    with ops.use("triton"), strict():
        assert torch.equal(ops.gather_pages(pages, table, lengths), want)


def test_gather_pages_of_empty_heads_is_empty():
    pools, table, lengths, _ = pool_case()
    with ops.use("triton"), strict():
        assert ops.gather_pages(pools[0], table, lengths * 0).shape == (2, 3, 0, 4)


def test_gather_pages_reads_each_slot_once():
    pools, table, lengths, _ = pool_case(D=64, dtype=torch.bfloat16)
    with ops.use("triton"), strict() as run:
        out = ops.gather_pages(pools[0], table, lengths)
    traffic = run.stats["gather_rows"]
    assert traffic.store_bytes == out.nbytes and traffic.load_bytes <= 1.1 * int(lengths.sum()) * 64 * 2


def test_gather_pages_reads_pages_past_two_to_the_31_elements():
    far = 2**20 + 5  # a page holds 2**11 numbers: page `far` begins past 2**31
    pages = torch.empty(far + 1, 16, 128, dtype=torch.bfloat16)
    pages[far] = torch.randn(16, 128).bfloat16()
    with ops.use("triton"), strict(races=False):
        got = ops.gather_pages(pages, torch.tensor([[[far]]], dtype=torch.int32), torch.tensor([[9]]))
    assert torch.equal(got[0, 0], pages[far, :9])
