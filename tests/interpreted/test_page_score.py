"""page_score in Triton against plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from learnkv import ops
from learnkv.kernels import page_score as module
from learnkv.kernels import reference
from tests.interpreted.strict import strict
from tests.test_reference_pages import ragged_positions

P = 16


def case(L: int, heads=((1.0, 0.4, 0.0), (0.9, 1.0, 0.02)), seed: int = 0):
    """Heads that hold a share of L slots, one of them none; NaN in every slot that is not filled, one pin, some -inf."""
    lengths = (torch.tensor(heads) * L).ceil().long()
    positions = ragged_positions(lengths, L, seed)
    scores = torch.randn(positions.shape, generator=torch.Generator().manual_seed(seed + 1))
    scores[0, 1, 0], scores[1, 0, L // 2], scores[1, 1, L // 2] = -math.inf, math.inf, -math.inf
    return scores.masked_fill(positions < 0, math.nan), positions, positions.amax((1, 2)).long() + 1, P


def run(case, **how):
    with strict(**how) as seen, ops.use("triton"):
        got = ops.page_score(*case, num_sinks=4, num_recent=20)
    assert ops.last_used == "triton"
    return got, seen


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("L", [1, 15, 16, 17, 63, 129 * P - 1, 129 * P + 1])
def test_values_are_those_of_plain_torch(reduce, L):
    inputs = case(L)
    with strict(), ops.use("triton"):
        got = ops.page_score(*inputs, num_sinks=4, num_recent=20, reduce=reduce)
    torch.testing.assert_close(got, reference.page_score(*inputs, num_sinks=4, num_recent=20, reduce=reduce), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("page_size", [1, 5, 700])
def test_pages_of_any_size_are_scored(page_size):
    inputs = (*case(700)[:3], page_size)
    got, _ = run(inputs)
    torch.testing.assert_close(got, reference.page_score(*inputs, num_sinks=4, num_recent=20), rtol=1e-5, atol=1e-6)


def test_order_of_programs_changes_no_bit():
    inputs = case(129 * P + 1)
    want, _ = run(inputs, order="grid")
    for how in ({"order": "reverse"}, {"order": "shuffle", "seed": 1}, {"order": "shuffle", "seed": 2}):
        assert torch.equal(run(inputs, **how)[0], want)


def test_inputs_with_gaps_between_rows_are_read_where_they_lie():
    scores, positions, num_seen, _ = case(63)
    wide = torch.full((2, 3, 80), math.nan)
    wide[..., :63] = scores
    got, _ = run((wide[..., :63], positions, num_seen, P))
    assert torch.equal(got, run((scores, positions, num_seen, P))[0])


def test_only_filled_slots_are_read():
    inputs = case(40 * P)
    _, seen = run(inputs)
    slots, filled = inputs[1].numel(), int((inputs[1] >= 0).sum())
    programs = 2 * 3
    assert seen.stats["page_reduce"].load_bytes == 4 * slots + 4 * filled + 8 * programs


def test_nothing_cached_launches_nothing():
    empty = torch.zeros(2, 3, 0)
    got, seen = run((empty, empty.int(), torch.zeros(2, dtype=torch.int64), P))
    assert got.shape == (2, 3, 0) and not seen.stats


def test_heads_past_2_to_the_31_elements_are_found():
    L = 2**30 + P  # virtual memory: the first tile of each head is touched
    scores, positions = torch.empty(1, 3, L), torch.empty(1, 3, L, dtype=torch.int32)
    launch = module.tile(P)
    tile = P * launch.blocks["BLOCK_N"]
    scores[..., :tile], positions[..., :tile] = torch.randn(1, 3, tile), torch.arange(tile)
    out = torch.empty(1, 3, L // P)
    with strict(races=False):
        module.page_reduce[3, 1](
            scores, positions, torch.tensor([L]), out, L, L // P, 0, 0, H=3, P=P, REDUCE="max", **launch.blocks, **launch.options
        )
    assert torch.equal(out[..., : tile // P], scores[..., :tile].unflatten(-1, (-1, P)).amax(-1))
