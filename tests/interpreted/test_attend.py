"""Attention over pages in the strict interpreter, against the reference."""

import pytest
import torch

from learnkv import ops
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
