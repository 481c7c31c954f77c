"""append_kv in Triton writes each row's real tokens where the reference writes them, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from learnkv import ops
from learnkv.kernels import reference
from tests.compact_parts import append_case, equal_pools
from tests.interpreted.strict import strict


@pytest.mark.parametrize("dtype, D", [(torch.float32, 4), (torch.bfloat16, 80), (torch.bfloat16, 128), (torch.float16, 256)])
@pytest.mark.parametrize("T, padding", [(1, False), (1, True), (3, True), (100, True), (65, False)])
def test_append_kv_equals_the_reference(dtype, D, T, padding):
    pools, table, lengths, *new = append_case(T, padding, D=D, dtype=dtype)
    want = [x.clone() for x in pools]
    want_slots = reference.append_kv(*want[:3], table, lengths, *new)
    with ops.use("triton"), strict(order="shuffle"):
        slots = ops.append_kv(*pools[:3], table, lengths, *new)
    assert ops.last_used == "triton"
    assert torch.equal(slots, want_slots) and equal_pools(pools, want)


def test_append_kv_takes_tokens_laid_out_as_projections_leave_them():
    pools, table, lengths, keys, values, positions = append_case(7, True, D=16)
    keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))  # [B, T, H, D] in memory
    want = [x.clone() for x in pools]
    reference.append_kv(*want[:3], table, lengths.int(), keys, values, positions.int())
    with ops.use("triton"), strict():
        ops.append_kv(*pools[:3], table, lengths.int(), keys, values, positions.int())
    assert equal_pools(pools, want)


def test_append_kv_does_not_depend_on_the_order_of_programs():
    found = []
    for order, seed in (("grid", 0), ("reverse", 0), ("shuffle", 1), ("shuffle", 2)):
        pools, table, lengths, *new = append_case(70, True)
        with ops.use("triton"), strict(order=order, seed=seed):
            ops.append_kv(*pools[:3], table, lengths, *new)
        found.append(pools)
    assert all(equal_pools(found[0], pools) for pools in found[1:])


def test_a_decode_step_is_one_launch_and_reads_no_more_than_its_tokens():
    pools, table, lengths, *new = append_case(1, False, D=64, dtype=torch.bfloat16)
    with ops.use("triton"), strict() as run:
        ops.append_kv(*pools[:3], table, lengths, *new)
    assert list(run.stats) == ["append_rows"]
    traffic = run.stats["append_rows"]
    assert traffic.load_bytes == lengths.numel() * (2 * 64 * 2 + 8 + 8 + 4) and traffic.store_bytes == lengths.numel() * (
        2 * 64 * 2 + 4 + 8
    )


def test_rows_of_padding_alone_leave_all_as_it_was():
    pools, table, lengths, keys, values, _ = append_case(3, False)
    before = [x.clone() for x in pools]
    with ops.use("triton"), strict():
        slots = ops.append_kv(*pools[:3], table, lengths, keys * math.nan, values * math.nan, torch.full((2, 3), -1))
    assert (slots == -1).all() and equal_pools(pools, before)


def test_no_tokens_take_no_slots():
    pools, table, lengths, *_ = append_case(1, False)
    nothing = torch.zeros(2, 3, 0, 4)
    with ops.use("triton"), strict():
        assert ops.append_kv(*pools[:3], table, lengths, nothing, nothing, torch.zeros(2, 0).long()).shape == (2, 3, 0)


def test_append_kv_writes_rows_past_two_to_the_31_elements():
    D, far = 128, 2**20 + 5  # a page holds 2**11 numbers: page `far` begins past 2**31
    keys, values = (torch.empty(far + 1, 16, D, dtype=torch.bfloat16) for _ in range(2))
    positions = torch.empty(far + 1, 16, dtype=torch.int32)
    table, lengths = torch.tensor([[[1, far]]], dtype=torch.int32), torch.tensor([[15]])
    new = torch.randn(1, 1, 3, D).bfloat16()
    assert keys.numel() > 2**31
    with ops.use("triton"), strict(races=False):
        slots = ops.append_kv(keys, values, positions, table, lengths, new, new + 1, torch.tensor([[30, 31, 32]]))
    assert slots.tolist() == [[[15, 16, 17]]] and positions[far, :2].tolist() == [31, 32]
    assert torch.equal(keys[far, :2], new[0, 0, 1:]) and torch.equal(values[1, 15], new[0, 0, 0] + 1)
