"""What selection, compaction, append and eviction of one slot mean, against loops over single slots."""

from __future__ import annotations

import math

import pytest
import torch

from learnkv import ops
from tests.compact_parts import append_case, appended, compacted, copied, equal_pools, pool_case, target_case


def test_select_gives_no_place_to_nan():
    scores = torch.tensor([math.nan, 2.0, -math.nan, 1.0, -math.inf])
    positions = torch.arange(5, dtype=torch.int32)
    chosen = [ops.select(scores, positions, torch.tensor(count)).tolist() for count in (1, 2, 5)]
    assert chosen == [[False, True, False, False, False], [False, True, False, True, False], [False, True, False, True, False]]


@pytest.mark.parametrize("seed", range(3))
def test_evict_slot_is_the_one_that_select_of_all_but_one_leaves_out(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-1, 2, (2, 3, 20), generator=generator).float()
    positions = torch.randint(0, 6, (2, 3, 20), generator=generator, dtype=torch.int32)
    protected = torch.rand(2, 3, 20, generator=generator) < 0.3
    slots = ops.evict_slot(scores, positions, protected)
    free = scores.masked_fill(protected, -math.inf)
    chosen = ops.select(free, positions, (~protected).sum(-1) - 1)
    assert torch.equal(chosen | protected, torch.arange(20) != slots[..., None])


def test_evict_slot_is_minus_one_where_no_slot_may_go():
    positions = torch.tensor([[[0, 1, 2], [-1, -1, -1], [4, -1, -1]]], dtype=torch.int32)
    protected = torch.tensor([[[True, True, True], [False, False, False], [False, True, False]]])
    assert ops.evict_slot(torch.zeros(1, 3, 3), positions, protected).tolist() == [[-1, -1, 0]]


@pytest.mark.parametrize("C", [0, 3])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_compact_equals_the_loop(C, share):
    pools, table, lengths, keep = pool_case(C=C, share=share)
    want, want_lengths = compacted(pools, table, lengths, keep)
    got_lengths = ops.compact(*pools, table, lengths, keep)
    assert torch.equal(got_lengths, want_lengths) and got_lengths.dtype == lengths.dtype
    assert equal_pools(pools, want)


def test_compact_that_drops_nothing_touches_nothing():
    pools, table, lengths, keep = pool_case(share=1.0)
    before = [x.clone() for x in pools]
    assert torch.equal(ops.compact(*pools, table, lengths, keep), lengths)
    assert equal_pools(pools, before)


def test_compact_leaves_no_nan_where_it_gave_slots_up():
    pools, table, lengths, keep = pool_case(C=1, share=0.0)
    pools[1].fill_(math.nan)
    ops.compact(*pools, table, lengths, keep)
    pages = table[table >= 0].long()
    held = torch.arange(table.shape[2] * 16) < lengths[..., None]
    assert not pools[1][pages].isnan()[held[(table >= 0).repeat_interleave(16, -1)].view(-1, 16)].any()


@pytest.mark.parametrize("columns", [slice(None), slice(1, 3), slice(2, 2)])
def test_copy_kept_equals_the_loop(columns):
    pools, table, lengths, keep = pool_case(C=3)
    pools[3] = pools[3][..., columns]
    targets, target_table = target_case(pools, table, lengths, keep, slice(None))
    want, want_lengths = copied(pools, table, lengths, keep, targets, target_table)
    got_lengths = ops.copy_kept(*pools, table, lengths, keep, *targets, target_table)
    assert torch.equal(got_lengths, want_lengths) and equal_pools(targets, want)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("T", [1, 20])
def test_append_kv_equals_the_loop_and_leaves_lengths_alone(T, padding):
    pools, table, lengths, *new = append_case(T, padding)
    want, want_slots = appended(pools, table, lengths, *new)
    before = lengths.clone()
    slots = ops.append_kv(*pools[:3], table, lengths, *new)
    assert torch.equal(slots, want_slots) and torch.equal(lengths, before) and equal_pools(pools, want)


def test_compact_then_append_lets_nothing_stale_be_seen():
    pools, table, lengths, keep = pool_case(C=1, share=0.4)
    lengths = ops.compact(*pools, table, lengths, keep)
    ops.append_kv(*pools[:3], table, lengths, torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 4), torch.tensor([[900], [901]]))
    positions = ops.gather_pages(pools[2][..., None], table, lengths + 1)[..., 0]
    held = torch.arange(positions.shape[2]) < (lengths + 1)[..., None]
    assert torch.equal((positions == torch.tensor([900, 901])[:, None, None]).sum(-1), torch.ones_like(lengths))
    assert torch.equal(held.sum(-1), lengths + 1) and (positions[held] >= 0).all()
