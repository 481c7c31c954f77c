"""Column mass and row LSE in Triton against their references; poison in padding and empty slots; bytes, orders, far addresses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from learnkv import ops
from learnkv.kernels import column_mass, reference
from tests.interpreted.strict import strict

REDUCTIONS = [(group, queries) for group in ("sum", "mean", "max") for queries in ("sum", "mean", "max")]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#  B, H, T, L, D
SHAPES = {
    "one query, one slot": (1, 1, 1, 1, 64),
    "one query": (2, 3, 1, 63, 64),
    "window": (2, 2, 32, 129, 64),
    "window of a head of 80": (1, 2, 33, 63, 80),
    "all queries": (1, 1, 200, 200, 128),
    "all queries of a head of 256": (1, 1, 70, 130, 256),
    "a chunk": (2, 1, 66, 127, 96),
}


def make_case(B: int, H: int, T: int, L: int, D: int, G: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Queries at the last T of L positions.  Row 0 starts with padding; the last head lacks a third of its slots; both hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(B, H * G, T, D, generator=generator)
    keys = torch.randn(B, H, L, D, generator=generator)
    query_positions = torch.arange(L - T, L).repeat(B, 1)
    query_positions[0, : T // 3] = -1
    key_positions = torch.arange(L, dtype=torch.int32).repeat(B, H, 1)
    key_positions[-1, -1, L - L // 3 :] = -1
    queries.masked_fill_((query_positions < 0)[:, None, :, None], torch.nan)
    keys.masked_fill_((key_positions < 0)[..., None], torch.nan)
    return [queries.to(dtype), keys.to(dtype), query_positions, key_positions]


def shuffled(case: list[Tensor], seed: int = 0) -> list[Tensor]:
    """The same case, its query rows and slots in no order."""
    queries, keys, query_positions, key_positions = case
    generator = torch.Generator().manual_seed(seed)
    rows, slots = torch.randperm(queries.shape[2], generator=generator), torch.randperm(keys.shape[2], generator=generator)
    return [queries[:, :, rows], keys[:, :, slots], query_positions[:, rows], key_positions[..., slots]]


def error(got: Tensor, want: Tensor) -> float:
    """Relative norm."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def assert_as_good(got: Tensor, plain: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.dtype == torch.float32
    assert error(got, want) <= 2 * error(plain, want) + 1e-5


def assert_mass_as_reference(case: list[Tensor], over_group: str, over_queries: str) -> None:
    scale, reduce = case[0].shape[-1] ** -0.5, {"over_group": over_group, "over_queries": over_queries}
    with strict(), ops.use("triton"):
        got = ops.column_mass(*case, scale, **reduce)
    assert ops.last_used == "triton"
    want = reference.column_mass(case[0].float(), case[1].float(), *case[2:], scale, **reduce)
    assert_as_good(got, reference.column_mass(*case, scale, **reduce), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_mass_of_any_shape_is_as_the_reference_has_it(shape, dtype):
    assert_mass_as_reference(make_case(*SHAPES[shape], dtype=dtype), "sum", "sum")


@pytest.mark.parametrize(("over_group", "over_queries"), REDUCTIONS)
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize(("B", "T", "L"), [(2, 20, 40), (1, 66, 129)])
def test_mass_of_any_reduction_and_group_is_as_the_reference_has_it(over_group, over_queries, group, B, T, L):
    assert_mass_as_reference(make_case(B, 1, T, L, 8, group), over_group, over_queries)


@pytest.mark.parametrize(("over_group", "over_queries"), [("sum", "sum"), ("max", "sum"), ("max", "max")])
def test_mass_does_not_depend_on_the_order_of_queries_and_slots(over_group, over_queries):
    assert_mass_as_reference(shuffled(make_case(1, 2, 130, 140, 8)), over_group, over_queries)


def test_mass_of_queries_older_than_every_slot_is_0():
    queries, keys, query_positions, key_positions = make_case(2, 2, 70, 140, 8)
    case = queries.nan_to_num(), keys, query_positions - 70, key_positions.where(key_positions < 0, key_positions + 70)
    with strict(), ops.use("triton"):
        assert not ops.column_mass(*case, 0.3).any()
        assert (ops.row_lse(*case, 0.3) == -torch.inf).all()


def test_mass_of_a_head_without_slots_is_0():
    queries, keys, query_positions, key_positions = make_case(1, 2, 66, 70, 8)
    keys[0, 1], key_positions[0, 1] = torch.nan, -1
    with strict(), ops.use("triton"):
        got = ops.column_mass(queries, keys, query_positions, key_positions, 0.3)
        lse = ops.row_lse(queries, keys, query_positions, key_positions, 0.3)
    assert not got[0, 1].any() and got[0, 0].any()
    assert (lse[0, 3:] == -torch.inf).all()


@pytest.mark.parametrize(("T", "L"), [(0, 5), (5, 0)])
def test_without_queries_or_slots_mass_is_0_and_lse_minus_infinity(T, L):
    case = torch.ones(1, 2, T, 8), torch.ones(1, 1, L, 8), torch.full((1, T), 9), torch.arange(L, dtype=torch.int32).expand(1, 1, L)
    for side in ("reference", "triton"):
        with strict(), ops.use(side):
            mass, lse = ops.column_mass(*case, 1.0, over_queries="mean"), ops.row_lse(*case, 1.0)
        assert mass.shape == (1, 1, L) and not mass.any()
        assert lse.shape == (1, 2, T) and (lse == -torch.inf).all()


@pytest.mark.parametrize("T", [32, 70])
def test_mass_with_the_lse_given_takes_it_and_leaves_the_pass_over_the_keys(T):
    case = make_case(2, 2, T, 129, 64)
    lse = reference.row_lse(*case, 0.125) + 0.5  # of more keys than these
    lse.masked_fill_((case[2] < 0)[:, None], torch.nan)
    with strict() as run, ops.use("triton"):
        got = ops.column_mass(*case, 0.125, lse=lse)
    want = reference.column_mass(*case, 0.125) * torch.tensor(-0.5).exp()
    assert set(run.stats) == {"column_mass_tiles"}
    assert error(got, want) < 1e-5
    assert error(reference.column_mass(*case, 0.125, lse=lse.nan_to_num(-torch.inf, neginf=-torch.inf)), want) < 1e-5


def test_mass_is_finite_for_huge_logits_and_an_lse_rounded_otherwise():
    queries, keys, *positions = make_case(1, 2, 70, 129, 8)
    case = queries * 1e15, keys * 1e15, *positions
    for lse in (None, reference.row_lse(*case, 1.0) * (1 - 1e-6)):
        with strict(), ops.use("triton"):
            assert ops.column_mass(*case, 1.0, lse=lse).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_lse_of_any_shape_is_as_the_reference_has_it(shape, dtype):
    case = make_case(*SHAPES[shape], dtype=dtype)
    with strict(), ops.use("triton"):
        got = ops.row_lse(*case, 0.2)
    want, plain = reference.row_lse(case[0].float(), case[1].float(), *case[2:], 0.2), reference.row_lse(*case, 0.2)
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    seen = want > -torch.inf
    assert_as_good(got[seen], plain[seen], want[seen])


def test_lse_does_not_depend_on_the_order_of_queries_and_slots():
    case = shuffled(make_case(1, 2, 130, 140, 8, 7))
    with strict(), ops.use("triton"):
        got = ops.row_lse(*case, 0.3)
    torch.testing.assert_close(got, reference.row_lse(*case, 0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("L", [191, 192, 193])
def test_lse_of_many_rows_takes_the_last_slot_and_no_later_one(L):
    positions = torch.arange(L)[None]
    case = torch.randn(1, 1, 130, 8), torch.randn(1, 1, L, 8), positions[:, -130:], positions[None]
    with strict(), ops.use("triton"):
        got = ops.row_lse(*case, 0.3)
    torch.testing.assert_close(got, reference.row_lse(*case, 0.3), rtol=1e-5, atol=1e-5)


def test_lse_of_few_rows_is_split_over_many_programs():
    case = make_case(1, 1, 32, 600, 8)
    with strict() as run, ops.use("triton"):
        got = ops.row_lse(*case, 0.3)
    assert run.stats["row_lse_split"].programs == 8
    torch.testing.assert_close(got, reference.row_lse(*case, 0.3), rtol=1e-5, atol=1e-5)


def results(order: str, seed: int) -> list[Tensor]:
    """Mass and LSE of a window and of all queries."""
    out = []
    for T in (20, 66):
        case = make_case(1, 2, T, 140, 8)
        with strict(order=order, seed=seed), ops.use("triton"):
            lse = ops.row_lse(*case, 0.3)
            out += [lse, *(ops.column_mass(*case, 0.3, over_group=group, lse=lse) for group in ("sum", "max"))]
    return out


def test_bits_do_not_depend_on_the_order_of_programs():
    want = results("grid", 0)
    for order, seed in (("reverse", 0), ("shuffle", 1), ("shuffle", 2)):
        assert all(torch.equal(a, b) for a, b in zip(results(order, seed), want, strict=True))


@pytest.mark.parametrize("T", [32, 64])
def test_a_window_reads_the_keys_once_and_little_else(T):
    """Ideal: keys, positions and mass once; each program reads the window again, out of the level-2 cache."""
    B, H, G, L, D = 1, 2, 4, 512, 128
    queries, keys, query_positions, _ = (x.nan_to_num() for x in make_case(B, H, T, L, D, G, torch.bfloat16))
    case = queries, keys, query_positions.clamp(min=0), torch.arange(L, dtype=torch.int32).expand(B, H, L)
    lse = torch.zeros(B, H * G, T)
    with strict() as run, ops.use("triton"):
        ops.column_mass(*case, 0.1, lse=lse)
    traffic = run.stats["column_mass_tiles"]
    once, window = B * H * L * (D * 2 + 4), B * H * G * T * (D * 2 + 4)
    programs = B * H * L // column_mass.mass_tile(90, D, torch.bfloat16, T, G, each=False).blocks["BLOCK_N"]
    assert traffic.store_bytes == B * H * L * 4
    assert traffic.unique_bytes <= 1.05 * (once + window + traffic.store_bytes)
    assert traffic.load_bytes <= 1.05 * (once + programs * window // (B * H))


def test_all_queries_are_read_by_the_key_tiles_that_they_see_alone():
    """Ideal: keys once; each key tile reads the queries from its first slot on, with their LSE and whatever the diagonal needs."""
    H, G, L, D = 1, 2, 1024, 128
    queries, keys = torch.randn(1, H * G, L, D).bfloat16(), torch.randn(1, H, L, D).bfloat16()
    with strict() as run, ops.use("triton"):
        ops.column_mass(
            queries, keys, torch.arange(L)[None], torch.arange(L, dtype=torch.int32).expand(1, H, L), 0.1, lse=torch.zeros(1, H * G, L)
        )
    block = column_mass.mass_tile(90, D, torch.bfloat16, L, G, each=False).blocks["BLOCK_N"]
    rows = sum(L - first for first in range(0, L, block))
    assert run.stats["column_mass_tiles"].load_bytes <= 1.05 * H * (L * (D * 2 + 4) + G * rows * (D * 2 + 4))


def test_keys_and_queries_beyond_2_to_the_31_elements_are_found():
    step = 2**30 + 16
    far = torch.empty(2 * step + 2**12, dtype=torch.bfloat16)  # virtual memory, of which a few rows are touched
    near = make_case(1, 1, 3, 3, 16, 3, torch.bfloat16)
    near[0], near[1] = torch.randn(1, 3, 3, 16).bfloat16(), torch.randn(1, 1, 3, 16).bfloat16()
    near[2], near[3] = torch.arange(3)[None], torch.arange(3, dtype=torch.int32).view(1, 1, 3)
    keys = far.as_strided((1, 1, 3, 16), (0, 0, step, 1))
    queries = far[64:].as_strided((1, 3, 3, 16), (0, 16, step, 1))
    keys.copy_(near[1])
    queries.copy_(near[0])
    with strict(races=False), ops.use("triton"):
        got = ops.column_mass(queries, keys, *near[2:], 0.3), ops.row_lse(queries, keys, *near[2:], 0.3)
        want = ops.column_mass(*near, 0.3), ops.row_lse(*near, 0.3)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("knob", ["over_group", "over_queries"])
def test_a_reduction_that_there_is_not_is_refused(knob):
    queries, positions = torch.ones(1, 2, 3, 16), torch.arange(3)[None]
    with pytest.raises(ValueError, match=knob), ops.use("triton"):
        ops.column_mass(queries, queries, positions, positions[:, None].expand(1, 2, 3), 1.0, **{knob: "median"})


@pytest.mark.parametrize("sizes", [{"B": 0}, {"H": 0}, {"T": 0}, {"L": 0}], ids=str)
def test_mass_of_nothing_is_the_references(sizes):
    B, H, T, L = ({"B": 2, "H": 2, "T": 5, "L": 7} | sizes).values()
    call = torch.ones(B, H * 3, T, 16), torch.ones(B, H, L, 16), torch.zeros(B, T).long(), torch.zeros(B, H, L).int(), 1.0
    with strict(), ops.use("triton"):
        got = ops.column_mass(*call), ops.row_lse(*call)
    torch.testing.assert_close(got, (reference.column_mass(*call), reference.row_lse(*call)))
