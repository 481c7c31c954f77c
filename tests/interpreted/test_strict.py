"""The strict interpreter: it fires on each planted fault, keeps quiet on right kernels, and its numbers are torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests import planted
from tests.interpreted.strict import Bf16Arithmetic, OutOfBounds, Race, strict, to_bfloat16, to_float32


@triton.jit
def column_sum(KEYS, OUT, COUNT, length, stride, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    """Right in every respect: sums of the rows of KEYS [length, D] by tl.dot with ones, a block of columns per program; counts its rows."""
    columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    sums = tl.zeros([16, BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_L):
        rows = (start + tl.arange(0, BLOCK_L)).to(tl.int64)
        inside = (rows < length)[:, None] & (columns < D)[None, :]
        keys = tl.load(KEYS + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)  # [BLOCK_L, BLOCK_D]
        sums = tl.dot(tl.full([16, BLOCK_L], 1.0, keys.dtype), keys, sums)
        tl.atomic_add(COUNT, tl.sum((rows < length).to(tl.int32), 0))
    once = (tl.arange(0, 16) == 0)[:, None] & (columns < D)[None, :]
    tl.store(OUT + tl.zeros([16, 1], tl.int32) + columns[None, :], sums, mask=once)


def run_column_sum(keys, **how):
    """(sums [D], rows counted, its Traffic)"""
    (L, D), out, count = keys.shape, torch.empty(keys.shape[1]), torch.zeros(1, dtype=torch.int32)
    with strict(**how) as run:
        column_sum[(triton.cdiv(D, 16),)](keys, out, count, L, keys.stride(0), D=D, BLOCK_L=16, BLOCK_D=16)
    return out, int(count), run.stats["column_sum"]


def numbers():
    """float32 of every kind: normal, halfway between two bfloat16, subnormal, infinite, and any bit pattern that is not NaN."""
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=torch.Generator().manual_seed(0)).int()
    halfway = bits & ~0xFFFF | 0x8000
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-45, torch.inf, -torch.inf, 3.4e38, 3.3961775e38])
    every = torch.cat([bits.view(torch.float32), halfway.view(torch.float32), special])
    return every[~every.isnan()]


def test_bf16_rounding_equals_torchs_bit_for_bit():
    want = numbers().bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(to_bfloat16(numbers().numpy()), want)


def test_every_bf16_widens_to_torchs_float32_and_back():
    bits = np.arange(2**16, dtype=np.uint16)
    wide = torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
    assert np.array_equal(to_float32(bits).view(np.uint32), wide.view(np.uint32))
    assert (
        np.array_equal(to_bfloat16(wide)[~np.isnan(wide)], bits[~np.isnan(wide)])
        and np.isnan(to_float32(to_bfloat16(wide[np.isnan(wide)]))).all()
    )


@triton.jit
def copy_cast(X, OUT, length, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at, mask=at < length, other=0.0).to(OUT.dtype.element_ty), mask=at < length)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
def test_casts_within_a_kernel_equal_torchs(source, target):
    x = numbers().to(source)
    out = torch.empty(x.shape, dtype=target)
    with strict():
        copy_cast[(triton.cdiv(len(x), 1024),)](x, out, len(x), BLOCK=1024)
    assert torch.equal(out, x.to(target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dot_multiplies_exactly_and_sums_in_float32(dtype):
    keys = torch.randn(40, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    out, count, _ = run_column_sum(keys)
    torch.testing.assert_close(out, keys.float().sum(0), rtol=1e-6, atol=1e-5)
    assert count == 2 * 40


def test_bytes_are_those_of_the_elements_not_masked():
    keys = torch.ones(40, 20, dtype=torch.bfloat16)
    _, _, traffic = run_column_sum(keys)
    assert (traffic.launches, traffic.programs) == (1, 2)
    assert (traffic.load_bytes, traffic.store_bytes, traffic.atomic_bytes) == (40 * 20 * 2, 20 * 4, 6 * 4)
    assert traffic.unique_bytes == 40 * 20 * 2 + 20 * 4 + 4


@pytest.mark.parametrize(
    "how", [{"order": "reverse"}, {"order": "shuffle"}, {"order": "shuffle", "seed": 1}, {"races": False, "bounds": False}]
)
def test_right_kernel_gives_the_same_bits_in_every_order(how):
    keys = torch.randn(33, 70, generator=torch.Generator().manual_seed(0))
    assert torch.equal(run_column_sum(keys, **how)[0], run_column_sum(keys)[0])


def test_programs_run_in_the_order_asked():
    def ran(**how):
        out, turn = torch.full((6,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        with strict(**how):
            take_turns[(2, 3)](out, turn)
        return out.tolist()

    assert ran() == [0, 1, 2, 3, 4, 5] and ran(order="reverse") == [5, 4, 3, 2, 1, 0]
    assert ran(order="shuffle") == ran(order="shuffle") != ran(order="shuffle", seed=1)


@triton.jit
def take_turns(OUT, TURN):
    tl.store(OUT + tl.program_id(0) * 3 + tl.program_id(1), tl.atomic_add(TURN, 1))


# ---- faults


def test_unmasked_load_is_out_of_bounds():
    with strict(), pytest.raises(OutOfBounds, match=r"unmasked_load, program \(2, 0, 0\): reads 8 of 16 elements outside KEYS"):
        planted.unmasked_load[(3,)](torch.ones(40), torch.empty(40), 40, BLOCK_L=16)


def test_the_view_is_the_bound_not_the_storage_nor_the_neighbour():
    memory = torch.ones(96)
    with strict(), pytest.raises(OutOfBounds, match="outside KEYS"):
        planted.unmasked_load[(3,)](memory[:40], memory[40:80], 40, BLOCK_L=16)


def test_gaps_between_the_rows_of_a_view_are_out_of_bounds():
    with strict(), pytest.raises(OutOfBounds, match="reads 10 of 16 elements outside KEYS"):
        planted.unmasked_load[(1,)](torch.ones(8, 8)[:, :3], torch.empty(16), 16, BLOCK_L=16)


def test_int32_address_is_out_of_bounds_and_int64_is_not():
    """The pool is virtual memory: 4.3 GB of addresses, of which only the rows touched become real."""
    rows = 2**31 // 64 + 2
    keys, out = torch.empty(rows, 64, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
    keys[-1] = 3
    with strict():
        wide_row[(1,)](keys, out, rows - 1, D=64)
    assert (out == 3).all()
    with strict(), np.errstate(over="ignore"), pytest.raises(OutOfBounds, match=r"narrow_row.* outside KEYS"):
        planted.narrow_row[(1,)](keys, out, rows - 1, D=64)


@triton.jit
def wide_row(KEYS, OUT, row, D: tl.constexpr):
    at = tl.arange(0, D)
    tl.store(OUT + at, tl.load(KEYS + row.to(tl.int64) * D + at))


def test_compaction_in_place_is_a_race_in_every_order():
    chosen = torch.arange(0, 64, 2)
    for order in ("grid", "reverse", "shuffle"):
        with strict(order=order), pytest.raises(Race, match="elements of KEYS that program"):
            planted.racy_compaction[(2,)](torch.randn(64, 16), chosen, len(chosen), D=16, BLOCK_L=16)


def test_race_is_not_looked_for_where_it_is_allowed():
    chosen = torch.arange(0, 64, 2)
    with strict(races=False):
        planted.racy_compaction[(2,)](torch.randn(64, 16), chosen, len(chosen), D=16, BLOCK_L=16)


def test_overlapping_views_share_what_was_touched():
    memory = torch.ones(64)
    with strict(), pytest.raises(Race, match="elements of KEYS that program"):
        planted.unmasked_load[(2,)](memory[:32], memory[16:48], 32, BLOCK_L=16)


def test_bf16_arithmetic_is_refused():
    keys = torch.ones(16, dtype=torch.bfloat16)
    with strict(), pytest.raises(Bf16Arithmetic, match="bf16_sum"):
        planted.bf16_sum[(1,)](keys, torch.empty_like(keys), BLOCK_L=16)


def test_one_store_to_an_address_twice_is_a_race():
    with strict(), pytest.raises(Race, match="stores to 8 of 16 elements of OUT that the same store names twice"):
        planted.double_write[(1,)](torch.empty(16), BLOCK_L=16)


def test_two_programs_that_store_to_an_address_are_a_race():
    with strict(), pytest.raises(Race, match=r"program \(1, 0, 0\): stores to 16 of 16 elements of OUT that program \(0, 0, 0\) stored"):
        planted.shared_row[(2,)](torch.empty(16), D=16)


def test_reading_back_wants_a_barrier():
    keys, out, total = torch.ones(16), torch.empty(16), torch.empty(1)
    with strict():
        planted.read_back[(1,)](keys, out, total, BLOCK_L=16, BARRIER=True)
    assert float(total) == 16
    with strict(), pytest.raises(Race, match="OUT that it stored itself with no barrier since"):
        planted.read_back[(1,)](keys, out, total, BLOCK_L=16, BARRIER=False)


def test_float_atomic_is_a_race():
    with strict(), pytest.raises(Race, match="an atomic sum of floats"):
        planted.float_atomic[(2,)](torch.ones(32), torch.zeros(1), BLOCK_L=16)


def test_the_interpreter_is_as_before_afterwards():
    with strict():
        pass
    planted.shared_row[(2,)](out := torch.empty(16), D=16)
    assert torch.equal(out, torch.arange(16.0))


def test_what_is_allocated_here_is_poisoned():
    assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(2)).isnan().all() and torch.ones(1).new_empty(2).isnan().all()
