"""Attention over pages in the strict interpreter, against the reference."""

import pytest
import torch

from learnkv import ops
from learnkv.kernels import attend as kernels
from learnkv.kernels import reference
from tests.interpreted.strict import strict

NAN = float("nan")


def make_call(lengths, G=2, T=1, D=64, P=16, dtype=torch.float32, spare=1, seed=0):
    """Arguments of `attend` with everything unread poisoned: NaN in free pages and unused slots.  Also where each head's slots lie.

    The heads' pages lie in shuffled order, with free ones between them, and the table is `spare` pages wider than the longest head.
    """
    torch.manual_seed(seed)
    lengths = torch.tensor(lengths)
    B, H = lengths.shape
    counts = -(-lengths // P)
    pages = int(counts.max()) + spare
    order = torch.randperm(int(counts.sum()) + 3).int()
    table = torch.full((B, H, pages), -1, dtype=torch.int32)
    table[torch.arange(pages) < counts[..., None]] = order[: int(counts.sum())]
    keys, values = torch.full((len(order), P, D), NAN), torch.full((len(order), P, D), NAN)
    positions = torch.full((len(order), P), -1, dtype=torch.int32)
    for b in range(B):
        for h in range(H):
            n = int(lengths[b, h])
            slot = torch.arange(n)
            at = table[b, h, slot // P].long(), slot % P
            keys[at], values[at] = torch.randn(n, D), torch.randn(n, D)
            positions[at] = (torch.randperm(n + n // 2)[:n].sort().values).int()
    longest = int(lengths.max() * 1.5)
    query_positions = longest - T + torch.arange(T).expand(B, T)
    queries = torch.randn(B, H * G, T, D)
    return [queries.to(dtype), keys.to(dtype), values.to(dtype), positions, table, query_positions.clone(), D**-0.5]


def cleaned(call, dtype=None):
    """The same without poison, for the reference; in another type where one is given."""
    queries, keys, values, *rest = call
    return [*(x.nan_to_num(0).to(dtype or x.dtype) for x in (queries, keys, values)), *rest]


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def close(got, plain, want):
    return error(got, want) <= 2 * error(plain, want) + 1e-5


def run(op, call, **options):
    with strict(**options), ops.use("triton"):
        out = getattr(ops, op)(*call)
    assert ops.last_used == "triton"
    return out


def same_lse(got, want):
    seen = want > float("-inf")
    assert torch.equal(got > float("-inf"), seen)
    torch.testing.assert_close(got[seen], want[seen], atol=2e-5, rtol=1e-5)


RAGGED = [[63, 1, 129], [16, 0, 33]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 3, 17, 70])
def test_output_lse_and_mass_equal_the_reference_over_ragged_heads(dtype, T):
    call = make_call(RAGGED, G=4, T=T, dtype=dtype)
    out, lse = run("attend_with_lse", call)
    again, mass = run("attend_with_mass", call)
    want, want_lse = reference.attend_with_lse(*cleaned(call, torch.float32))
    want_mass = reference.attend_with_mass(*cleaned(call, torch.float32))[1]
    assert out.dtype == dtype and torch.equal(out, again)
    assert close(out, reference.attend(*cleaned(call)), want)
    same_lse(lse, want_lse)
    torch.testing.assert_close(mass, want_mass, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("G", [1, 3, 7])
@pytest.mark.parametrize("T", [1, 10])
def test_group_sizes_that_are_no_powers_of_two(G, T):
    call = make_call([[40, 17]], G=G, T=T)
    out, mass = run("attend_with_mass", call)
    want, want_mass = reference.attend_with_mass(*cleaned(call))
    assert error(out, want) < 1e-5 and error(mass, want_mass) < 1e-5


@pytest.mark.parametrize("D", [8, 80, 96, 256])
@pytest.mark.parametrize("T", [1, 40])
def test_head_sizes_that_are_no_block(D, T):
    call = make_call([[17, 50]], D=D, T=T)
    out, mass = run("attend_with_mass", call)
    want, want_mass = reference.attend_with_mass(*cleaned(call))
    assert error(out, want) < 1e-5 and error(mass, want_mass) < 1e-5


@pytest.mark.parametrize("length", [1, 63, 129])
@pytest.mark.parametrize("T", [1, 70])
def test_dense_tensors_of_any_length_are_one_page_per_head(length, T):
    call = make_call([[length, max(1, length // 2)]], T=T, P=length, spare=0)
    assert call[4].shape[2] == 1
    out, mass = run("attend_with_mass", call)
    want, want_mass = reference.attend_with_mass(*cleaned(call))
    assert error(out, want) < 1e-5 and error(mass, want_mass) < 1e-5


@pytest.mark.parametrize("P", [4, 24, 128])
@pytest.mark.parametrize("T", [1, 70])
def test_pages_of_other_sizes(P, T):
    call = make_call([[150, 3]], T=T, P=P)
    out, mass = run("attend_with_mass", call)
    want, want_mass = reference.attend_with_mass(*cleaned(call))
    assert error(out, want) < 1e-5 and error(mass, want_mass) < 1e-5


@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65])
def test_lengths_beside_the_border_of_a_page(length):
    call = make_call([[length, 0]], T=2)
    out, mass = run("attend_with_mass", call)
    want, want_mass = reference.attend_with_mass(*cleaned(call))
    assert error(out, want) < 1e-5 and error(mass, want_mass) < 1e-5


@pytest.mark.parametrize("T", [3, 70])
def test_padding_rows_and_queries_before_every_slot_give_nothing(T):
    call = make_call(RAGGED, T=T)
    queries, positions, query_positions = call[0], call[3], call[5]
    positions += (positions >= 0).int() * 5  # nothing at 0..4
    query_positions[0, :2] = -1
    queries[0, :, :2] = NAN
    query_positions[1, 0] = 4
    (out, lse), (_, mass) = run("attend_with_lse", call), run("attend_with_mass", call)
    want, want_lse = reference.attend_with_lse(*cleaned(call))
    blind = want_lse == float("-inf")
    assert blind[0, :, :2].all() and blind[1, :, 0].all() and not blind[0, :, 2].any()
    assert not out[blind].any() and error(out, want) < 1e-5
    same_lse(lse, want_lse)
    assert error(mass, reference.attend_with_mass(*cleaned(call))[1]) < 1e-5


@pytest.mark.parametrize("T", [1, 70])
def test_heads_without_a_single_slot(T):
    call = make_call([[0, 0]], T=T)
    call[5] += 9
    (out, lse), (_, mass) = run("attend_with_lse", call), run("attend_with_mass", call)
    assert not out.any() and not mass.any() and (lse == float("-inf")).all()


@pytest.mark.parametrize("T", [1, 70])
def test_pages_that_rows_have_in_common(T):
    call = make_call([[100, 40], [100, 40]], T=T)
    table, query_positions = call[4], call[5]
    table[1, :, :3] = table[0, :, :3]
    table[1, 1] = table[0, 1]
    query_positions[1] -= 20
    out, mass = run("attend_with_mass", call)
    want, want_mass = reference.attend_with_mass(*cleaned(call))
    assert error(out, want) < 1e-5 and error(mass, want_mass) < 1e-5


@pytest.mark.parametrize("T", [3, 150])
def test_positions_in_any_order(T):
    call = make_call([[200, 77]], G=2, T=T)
    positions, query_positions = call[3], call[5]
    for page in positions:
        used = (page >= 0).nonzero()[:, 0]
        page[used] = page[used][torch.randperm(len(used))]
    table = call[4]
    table[0, 0, :13] = table[0, 0, torch.randperm(13)]
    query_positions[0] = query_positions[0, torch.randperm(T)] - 30
    out, mass = run("attend_with_mass", call)
    want, want_mass = reference.attend_with_mass(*cleaned(call))
    assert error(out, want) < 1e-5 and error(mass, want_mass) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_by_splits_equal_the_same_by_tiles(dtype):
    call = make_call([[300, 41]], G=3, T=5, dtype=dtype)
    with strict():
        split, tiled = kernels.split_attention(*call)[:2], kernels.tiled_attention(*call)
    want = reference.attend(*cleaned(call, torch.float32))
    plain = reference.attend(*cleaned(call))
    assert close(split[0], plain, want) and close(tiled[0], plain, want)
    torch.testing.assert_close(split[1], tiled[1], atol=1e-5, rtol=1e-5)


def test_mass_of_kept_logits_equals_mass_from_the_keys():
    call = make_call(RAGGED, G=3, T=4)
    with strict():
        _, lse, logits = kernels.split_attention(*call, spill=True)
        kept = kernels.mass_of_logits(logits, lse, call[4], 16)
        again = kernels.mass_of_slots(call[0], call[1], *call[3:6], lse, call[6])
    assert error(again, kept) < 1e-5


def test_mass_sums_to_the_number_of_queries_that_see_something():
    call = make_call([[90, 33]], G=2, T=7)
    mass = run("attend_with_mass", call)[1]
    torch.testing.assert_close(mass.sum(-1), torch.full((1, 2), 14.0))


@pytest.mark.parametrize("T", [1, 70])
def test_any_order_of_programs_gives_equal_bits(T):
    call = make_call([[600, 41]], T=T, dtype=torch.bfloat16)
    want = run("attend_with_mass", call)
    for options in ({"order": "reverse"}, {"order": "shuffle", "seed": 1}, {"order": "shuffle", "seed": 2}):
        got = run("attend_with_mass", call, **options)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_decode_reads_and_writes_hardly_more_than_keys_and_values():
    call = make_call([[1024] * 4], G=4, dtype=torch.bfloat16, spare=8)
    with strict() as counted:
        kernels.split_attention(*call)
    used = counted.stats["decode_split"]
    ideal = 4 * 1024 * 64 * 2 * 2 + 2 * call[0].nbytes
    assert used.load_bytes + used.store_bytes <= 1.05 * ideal


def test_launches_depend_on_shapes_alone():
    counts = []
    for lengths in ([[600, 41]], [[590, 0]]):
        with strict() as counted:
            kernels.split_attention(*make_call(lengths))
        counts.append({name: (used.launches, used.programs) for name, used in counted.stats.items()})
    assert counts[0] == counts[1] and counts[0]["decode_split"] == (1, 2 * 3)


@pytest.mark.parametrize("T", [1, 70])
def test_a_pool_of_more_than_2_31_numbers(T):
    small = make_call([[40, 35]], D=128, T=T, dtype=torch.bfloat16)
    N = (1 << 31) // (16 * 128) + 50
    keys, values = torch.empty(N, 16, 128, dtype=torch.bfloat16), torch.empty(N, 16, 128, dtype=torch.bfloat16)
    positions = torch.empty(N, 16, dtype=torch.int32)
    table, count = small[4].clone(), len(small[3])
    table[table >= 0] += N - count
    keys[-count:], values[-count:], positions[-count:] = small[1], small[2], small[3]
    with strict(races=False), ops.use("triton"):
        got = ops.attend_with_mass(small[0], keys, values, positions, table, *small[5:])
        want = ops.attend_with_mass(*small)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_arguments_that_do_not_fit_are_refused():
    call = make_call([[40, 35]])
    with pytest.raises(ValueError, match="do not fit"):
        kernels.attend(call[0][:, :3], *call[1:])
    with pytest.raises(ValueError, match="store both alike"):
        kernels.attend(call[0], call[1], call[2].half(), *call[3:])


@pytest.mark.parametrize("sizes", [{"B": 0}, {"H": 0}, {"T": 0}, {"T": 70, "N": 0}, {"N": 0, "pages": 0}, {"pages": 0}], ids=str)
def test_attention_over_nothing_is_the_references(sizes):
    B, H, T, N, pages = ({"B": 2, "H": 2, "T": 3, "N": 4, "pages": 2} | sizes).values()
    table, positions = torch.full((B, H, pages), -1, dtype=torch.int32), torch.full((N, 16), -1, dtype=torch.int32)
    keys = torch.ones(N, 16, 64)
    call = torch.ones(B, H * 3, T, 64), keys, keys, positions, table, torch.full((B, T), 9), 0.3
    for op in ("attend_with_lse", "attend_with_mass"):
        for got, want in zip(run(op, call), getattr(reference, op)(*call), strict=True):
            assert torch.equal(got, want)
