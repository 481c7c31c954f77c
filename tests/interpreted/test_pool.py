"""Pooling in Triton against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from learnkv import ops
from learnkv.kernels import reference
from tests.interpreted.strict import strict


def make_case(L: int, share: float = 0.7) -> tuple[Tensor, Tensor]:
    """Scores of either sign, NaN on the empty slots that lie here and there."""
    generator = torch.Generator().manual_seed(L)
    mass, filled = torch.randn(2, 3, L, generator=generator), torch.rand(2, 3, L, generator=generator) < share
    positions = torch.arange(L, dtype=torch.int32).expand(2, 3, L).masked_fill(~filled, -1)
    return mass.masked_fill(~filled, torch.nan), positions


@pytest.mark.parametrize("pooling", ["max", "mean"])
@pytest.mark.parametrize("kernel_size", [1, 3, 7, 31])
@pytest.mark.parametrize("L", [1, 5, 63, 512, 515])
def test_pool_is_as_the_reference_has_it(pooling, kernel_size, L):
    mass, positions = make_case(L)
    with strict(order="shuffle"), ops.use("triton"):
        got = ops.pool(mass, positions, kernel_size=kernel_size, pooling=pooling)
    assert ops.last_used == "triton"
    torch.testing.assert_close(got, reference.pool(mass, positions, kernel_size=kernel_size, pooling=pooling), rtol=1e-5, atol=1e-6)


def test_pool_of_positions_that_all_heads_have_in_common_takes_them_as_they_are():
    mass, positions = torch.rand(2, 3, 40), torch.arange(40).expand(2, 3, 40)
    with strict(), ops.use("triton"):
        got = ops.pool(mass, positions, kernel_size=5, pooling="max")
    assert torch.equal(got, reference.pool(mass, positions, kernel_size=5, pooling="max"))


@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_pool_gives_the_same_bits_in_any_order_of_programs(pooling):
    mass, positions = make_case(1030)
    found = []
    for order, seed in (("grid", 0), ("reverse", 0), ("shuffle", 1), ("shuffle", 2)):
        with strict(order=order, seed=seed), ops.use("triton"):
            found.append(ops.pool(mass, positions, kernel_size=7, pooling=pooling))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_pool_reads_and_stores_each_score_once_but_for_what_neighbours_share():
    mass, positions = torch.rand(1, 2, 1024), torch.arange(1024, dtype=torch.int32).expand(1, 2, 1024).contiguous()
    with strict() as run, ops.use("triton"):
        ops.pool(mass, positions, kernel_size=7, pooling="max")
    assert run.stats["pool_tiles"].unique_bytes == 3 * 4 * mass.numel()


def test_pool_of_no_slots_is_empty():
    for side in ("reference", "triton"):
        with strict(), ops.use(side):
            assert ops.pool(torch.ones(1, 2, 0), torch.ones(1, 2, 0).int(), kernel_size=7, pooling="max").shape == (1, 2, 0)


@pytest.mark.parametrize("knobs", [{"pooling": "median"}, {"kernel_size": 4}])
def test_what_the_reference_refuses_is_refused(knobs):
    with pytest.raises(ValueError, match=r"ops\.pool"), ops.use("triton"):
        ops.pool(*make_case(9), **{"kernel_size": 3, "pooling": "max", **knobs})
