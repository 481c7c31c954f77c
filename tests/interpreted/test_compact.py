"""compact and copy_kept in Triton leave exactly what the reference leaves, without races, at the price of the rows that move."""

from __future__ import annotations

import math

import pytest
import torch

from learnkv import ops
from learnkv.kernels import compact as kernels
from learnkv.kernels import reference
from tests.compact_parts import equal_pools, pool_case, target_case
from tests.interpreted.strict import strict

ORDERS = [("grid", 0), ("reverse", 0), ("shuffle", 1), ("shuffle", 2)]
CASES = [  # dtype, D, C
    (torch.float32, 4, 1),
    (torch.bfloat16, 80, 3),
    (torch.bfloat16, 128, 0),
    (torch.float16, 64, 1),
    (torch.float32, 80, 0),
]


@pytest.mark.parametrize("dtype, D, C", CASES)
@pytest.mark.parametrize("share", [0.2, 0.9])
def test_compact_equals_the_reference(dtype, D, C, share):
    pools, table, lengths, keep = pool_case(D=D, C=C, dtype=dtype, share=share)
    want = [x.clone() for x in pools]
    want_lengths = reference.compact(*want, table, lengths, keep)
    with ops.use("triton"), strict(order="shuffle"):
        got = ops.compact(*pools, table, lengths, keep)
    assert ops.last_used == "triton"
    assert torch.equal(got, want_lengths) and equal_pools(pools, want)


@pytest.mark.parametrize("lengths", [[[1, 15], [16, 17]], [[0, 0]], [[1100, 1025], [3, 1024]]])
def test_compact_equals_the_reference_at_the_edges_of_pages_and_tiles(lengths):
    pools, table, lengths, keep = pool_case(lengths, share=0.5)
    want = [x.clone() for x in pools]
    want_lengths = reference.compact(*want, table, lengths.int(), keep)
    with ops.use("triton"), strict(order="reverse"):
        got = ops.compact(*pools, table, lengths.int(), keep)
    assert got.dtype == torch.int32 and torch.equal(got, want_lengths) and equal_pools(pools, want)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_compact_of_all_or_nothing_moves_no_row(share):
    pools, table, lengths, keep = pool_case(share=share)
    want = [x.clone() for x in pools]
    reference.compact(*want, table, lengths, keep)
    with ops.use("triton"), strict() as run:
        ops.compact(*pools, table, lengths, keep)
    assert equal_pools(pools, want)
    assert run.stats["move_rows"].store_bytes == 0 and (share == 0 or run.stats["clear_stale"].store_bytes == 0)


def test_compact_does_not_depend_on_the_order_of_programs(monkeypatch):
    monkeypatch.setattr(kernels, "list_tile", lambda arch: kernels.Tile({"BLOCK_L": 16, "BLOCK_T": 2}))
    found = []
    for order, seed in ORDERS:
        pools, table, lengths, keep = pool_case(share=0.5)
        with ops.use("triton"), strict(order=order, seed=seed):
            ops.compact(*pools, table, lengths, keep)
        found.append(pools)
    want, table, lengths, keep = pool_case(share=0.5)
    reference.compact(*want, table, lengths, keep)
    assert all(equal_pools(want, pools) for pools in found)


def test_launches_of_compact_do_not_depend_on_what_is_kept():
    launches = []
    for share in (0.0, 0.5, 1.0):
        pools, table, lengths, keep = pool_case(share=share)
        with ops.use("triton"), strict() as run:
            ops.compact(*pools, table, lengths, keep)
        launches.append({name: (traffic.launches, traffic.programs) for name, traffic in run.stats.items()})
    assert launches[0] == launches[1] == launches[2] and len(launches[0]) == 4


@pytest.mark.parametrize("dtype, D, C", [(torch.bfloat16, 128, 1), (torch.float32, 64, 0)])
def test_bytes_of_compact_are_those_of_the_rows_that_move_and_are_cleared(dtype, D, C):
    pools, table, lengths, keep = pool_case([[700, 640]], D=D, C=C, dtype=dtype, share=0.5)
    keep &= torch.arange(keep.shape[2]) < lengths[..., None]
    row, beside = D * dtype.itemsize, 4 + 4 * C
    new = keep.sum(-1)
    moved = int((new - (keep & (torch.arange(keep.shape[2]) < new[..., None])).sum(-1)).sum())
    cleared = int((lengths - new).sum())
    # keys, values, position and memory read and written; value, position and memory written; the mask once; two lists written and read
    ideal = moved * 2 * (2 * row + beside) + cleared * (row + beside) + keep.numel() + moved * 2 * 2 * 4
    with ops.use("triton"), strict() as run:
        ops.compact(*pools, table, lengths, keep)
    assert ideal <= sum(traffic.load_bytes + traffic.store_bytes for traffic in run.stats.values()) <= 1.05 * ideal


def test_compact_reads_and_writes_rows_past_two_to_the_31_elements():
    D, far = 128, 2**20 + 5  # a page holds 2**11 numbers: page `far` begins past 2**31
    keys, values = (torch.empty(far + 1, 16, D, dtype=torch.bfloat16) for _ in range(2))
    positions, memory = torch.empty(far + 1, 16, dtype=torch.int32), torch.empty(far + 1, 16, 1)
    table, lengths = torch.tensor([[[far, 1]]], dtype=torch.int32), torch.tensor([[20]])
    keep = torch.arange(20) % 3 == 2
    for page in (far, 1):
        for pool, number in ((keys, 1.0), (values, 2.0), (memory, 3.0)):
            pool[page] = number
        positions[page] = torch.arange(16, dtype=torch.int32) + 16 * (page == 1)
    assert keys.numel() > 2**31
    with ops.use("triton"), strict(races=False):
        new = ops.compact(keys, values, positions, memory, table, lengths, keep[None, None])
    assert int(new) == 6 and positions[far].tolist() == [8, 11, 2, 14, 17, 5] + [-1] * 10


@pytest.mark.parametrize("dtype, D, C", CASES)
def test_copy_kept_equals_the_reference(dtype, D, C):
    pools, table, lengths, keep = pool_case(D=D, C=C, dtype=dtype, share=0.6)
    targets, target_table = target_case(pools, table, lengths, keep, slice(None))
    want = [x.clone() for x in targets]
    want_lengths = reference.copy_kept(*pools, table, lengths, keep, *want, target_table)
    before = [x.clone() for x in pools]
    with ops.use("triton"), strict(order="shuffle"):
        got = ops.copy_kept(*pools, table, lengths, keep, *targets, target_table)
    assert torch.equal(got, want_lengths) and equal_pools(targets, want) and equal_pools(pools, before)


@pytest.mark.parametrize("lengths", [[[1, 15], [16, 17]], [[0, 0]], [[1100, 1025], [3, 1024]]])
def test_copy_kept_equals_the_reference_at_the_edges_of_pages_and_tiles(lengths):
    pools, table, lengths, keep = pool_case(lengths, share=0.7)
    targets, target_table = target_case(pools, table, lengths, keep, slice(None))
    want = [x.clone() for x in targets]
    reference.copy_kept(*pools, table, lengths, keep, *want, target_table)
    with ops.use("triton"), strict(order="reverse"):
        ops.copy_kept(*pools, table, lengths, keep, *targets, target_table)
    assert equal_pools(targets, want)


def test_copy_kept_takes_columns_of_a_wider_memory_and_leaves_the_others_alone():
    pools, table, lengths, keep = pool_case(C=5, share=0.6)
    wide = torch.full((20, 16, 4), math.nan)
    pools[3] = pools[3][..., 1:3]
    targets, target_table = target_case(pools, table, lengths, keep, slice(None))
    targets[3] = wide[: len(targets[0]), :, 2:]
    want = [x.clone() for x in targets]
    reference.copy_kept(*pools, table, lengths, keep, *want, target_table)
    with ops.use("triton"), strict():
        ops.copy_kept(*pools, table, lengths, keep, *targets, target_table)
    assert equal_pools(targets, want) and wide[..., :2].isnan().all()


def test_a_page_in_two_places_of_the_table_is_a_race():
    pools, table, lengths, keep = pool_case([[40, 40]], share=0.5)
    table[0, 1] = table[0, 0]
    with ops.use("triton"), strict(), pytest.raises(AssertionError, match="move_rows"):
        ops.compact(*pools, table, lengths, keep)
