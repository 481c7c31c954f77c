"""select and evict_slot in Triton choose exactly the slots that the reference chooses, in any order of programs."""

from __future__ import annotations

import math

import pytest
import torch

from learnkv import ops
from learnkv.kernels import reference
from learnkv.kernels.select import ROW_BLOCKS
from tests.interpreted.strict import strict

KINDS = ["distinct", "ties", "zeros", "tiny"]
LONG = ROW_BLOCKS[-1] + 3  # a row for several programs


def scored(kind, rows, L, seed=0):
    """scores [rows, L] and positions [rows, L], of which several are equal; in the second row none is worth choosing."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, L, generator=generator)
    if kind == "ties":
        values = torch.tensor([math.inf, -math.inf, math.nan, -math.nan, -0.0, 0.0, 1.5, -2.0, 3e38, -3e38])
        scores = values[torch.randint(len(values), (rows, L), generator=generator)]
    elif kind == "zeros":
        scores = torch.zeros(rows, L)
    elif kind == "tiny":
        scores = scores * 1e-42  # denormals, which are not 0
    positions = torch.randint(-1, max(2, L // 3), (rows, L), generator=generator, dtype=torch.int32)
    if rows > 1:
        scores[1] = torch.where(torch.arange(L) % 2 == 0, -math.inf, math.nan)
    return scores, positions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("L", [1, 63, 129, 1025])
def test_select_of_short_rows_equals_the_reference_bit_for_bit(kind, L):
    scores, positions = scored(kind, 6, L)
    count = torch.tensor([0, 1, L // 3, L, L + 5, -2])
    with ops.use("triton"), strict(order="shuffle"):
        got = ops.select(scores, positions, count)
    assert ops.last_used == "triton"
    assert torch.equal(got, reference.select(scores, positions, count))


@pytest.mark.parametrize("kind, wanted", [("distinct", LONG // 3), ("ties", LONG // 3), ("zeros", 5000), ("ties", LONG + 1), ("tiny", 0)])
def test_select_of_long_rows_equals_the_reference_bit_for_bit(kind, wanted):
    scores, positions = scored(kind, 2, LONG)
    count = torch.tensor([wanted, 5])
    with ops.use("triton"), strict(order="shuffle"):
        got = ops.select(scores, positions, count)
    assert torch.equal(got, reference.select(scores, positions, count))


@pytest.mark.parametrize("L", [100, LONG])
def test_select_does_not_depend_on_the_order_of_programs(L):
    scores, positions = scored("zeros", 1, L)
    scores[0, ::3] = 1.0
    count = torch.tensor([L // 2])
    found = []
    for order, seed in (("grid", 0), ("reverse", 0), ("shuffle", 1), ("shuffle", 2)):
        with ops.use("triton"), strict(order=order, seed=seed):
            found.append(ops.select(scores, positions, count))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_launches_of_select_do_not_depend_on_the_scores():
    count, launches = torch.tensor([7]), []
    for kind in ("distinct", "zeros", "ties"):
        scores, positions = scored(kind, 1, LONG)
        with ops.use("triton"), strict(order="reverse") as run:
            ops.select(scores, positions, count)
        launches.append({name: traffic.launches for name, traffic in run.stats.items()})
    assert launches[0] == launches[1] == launches[2] == {"count_digits": 8, "count_ties": 1, "mark": 1}


def test_a_short_row_is_one_launch():
    scores, positions = scored("distinct", 3, 200)
    with ops.use("triton"), strict() as run:
        ops.select(scores, positions, torch.tensor([7, 9, 11]))
    assert {name: traffic.launches for name, traffic in run.stats.items()} == {"select_row": 1}


def test_select_takes_views_and_counts_that_are_spread_out():
    scores, _ = scored("ties", 6, 40)
    scores, positions = scores.view(2, 3, 40)[..., :33], torch.arange(33, dtype=torch.int32).expand(2, 3, 33)
    count = torch.tensor([4, 11])[:, None].expand(2, 3)
    with ops.use("triton"), strict():
        got = ops.select(scores, positions, count)
    assert torch.equal(got, reference.select(scores, positions, count))


def test_select_of_nothing_is_nothing():
    with ops.use("triton"), strict():
        assert ops.select(torch.zeros(2, 3, 0), torch.zeros(2, 3, 0, dtype=torch.int32), torch.ones(2, 3).long()).shape == (2, 3, 0)
        assert not ops.select(torch.zeros(9), torch.arange(9, dtype=torch.int32), torch.tensor(0)).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("L", [1, 63, 2049])
def test_evict_slot_equals_the_reference(kind, L):
    scores, positions = scored(kind, 6, L)
    protected = torch.rand(6, L, generator=torch.Generator().manual_seed(1)) < 0.4
    protected[0], positions[2] = True, -1
    case = [x.view(2, 3, L) for x in (scores, positions, protected)]
    with ops.use("triton"), strict(order="shuffle"):
        got = ops.evict_slot(*case)
    assert torch.equal(got, reference.evict_slot(*case))


def test_evict_slot_reads_no_score_of_an_empty_or_protected_slot():
    scores, positions = torch.tensor([[[3.0, math.nan, math.nan, 1.0]]]), torch.tensor([[[5, 6, -1, 7]]], dtype=torch.int32)
    with ops.use("triton"), strict() as run:
        slot = ops.evict_slot(scores, positions, torch.tensor([[[False, True, False, False]]]))
    assert slot.tolist() == [[3]] and run.stats["worst_slot"].load_bytes == 4 * 4 + 3 + 2 * 4


def test_evict_slot_of_heads_without_slots_is_minus_one():
    with ops.use("triton"), strict():
        nothing = torch.zeros(1, 2, 0)
        assert ops.evict_slot(nothing, nothing.int(), nothing.bool()).tolist() == [[-1, -1]]


def test_a_count_that_all_rows_share_without_a_copy_is_read_for_each():
    scores, positions = torch.randn(1, 3, 45), torch.arange(45, dtype=torch.int32).expand(1, 3, 45)
    count = torch.tensor([4])[:, None].expand(1, 3)
    with strict(), ops.use("triton"):
        got = ops.select(scores, positions, count)
    assert torch.equal(got, reference.select(scores, positions, count))


def test_scores_that_are_not_float32_are_refused_in_words():
    scores, positions = torch.rand(2, 5).double(), torch.arange(5, dtype=torch.int32).expand(2, 5)
    with pytest.raises(ValueError, match="ranks float32 scores"), ops.use("triton"):
        ops.select(scores, positions, torch.full((2,), 3))
    with pytest.raises(ValueError, match="ranks float32 scores"), ops.use("triton"):
        ops.evict_slot(scores, positions, positions < 0)
