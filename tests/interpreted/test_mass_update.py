"""Remembered mass in the strict interpreter, against the reference."""

import pytest
import torch

from learnkv import ops
from learnkv.kernels import reference
from tests.interpreted.strict import strict


def make_call(lengths, P=16, C=3, column=1, seed=0):
    """Memory whose free pages are NaN, of which one column is meant, a table of shuffled pages, and mass that is NaN past them."""
    torch.manual_seed(seed)
    counts = -(-torch.tensor(lengths) // P)
    pages = int(counts.max()) + 1
    order = torch.randperm(int(counts.sum()) + 3).int()
    table = torch.full((*counts.shape, pages), -1, dtype=torch.int32)
    table[torch.arange(pages) < counts[..., None]] = order[: int(counts.sum())]
    memory = torch.full((len(order), P, C), float("nan"))
    memory[table[table >= 0].long()] = torch.randn(int(counts.sum()), P, C)
    mass = torch.rand(*counts.shape, pages * P)
    mass[(table < 0).repeat_interleave(P, -1)] = float("nan")
    return memory, column, table, mass


@pytest.mark.parametrize("P", [1, 5, 16, 700])
@pytest.mark.parametrize("C", [1, 3])
def test_memory_is_decayed_and_added_to_over_held_pages_only(P, C):
    memory, column, table, mass = make_call([[130, 1], [0, 16]], P=P, C=C, column=C - 1)
    want = memory.clone()
    reference.mass_update(want[..., column], table, mass, 0.75)
    with strict(), ops.use("triton"):
        ops.mass_update(memory[..., column], table, mass, 0.75)
    assert ops.last_used == "triton"
    torch.testing.assert_close(memory, want, equal_nan=True, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("options", [{"order": "reverse"}, {"order": "shuffle", "seed": 1}, {"order": "shuffle", "seed": 2}])
def test_any_order_of_programs_gives_equal_bits(options):
    memory, column, table, mass = make_call([[900, 40]])
    again = memory.clone()
    with strict(), ops.use("triton"):
        ops.mass_update(memory[..., column], table, mass, 0.9)
    with strict(**options), ops.use("triton"):
        ops.mass_update(again[..., column], table, mass, 0.9)
    assert torch.equal(memory.view(torch.int32), again.view(torch.int32))


def test_memory_of_more_than_2_31_numbers():
    N = (1 << 31) // 16 + 10
    memory = torch.empty(N, 16)
    memory[-3:] = torch.tensor([3.0, 4.0, 3.0])[:, None]
    table = torch.tensor([[[N - 1, N - 3, -1]]], dtype=torch.int32)
    with strict(races=False), ops.use("triton"):
        ops.mass_update(memory, table, torch.ones(1, 1, 48), 0.5)
    assert (memory[-3:] == torch.tensor([2.5, 4.0, 2.5])[:, None]).all()


def test_mass_of_another_capacity_is_refused():
    memory, column, table, mass = make_call([[40]])
    with strict(), ops.use("triton"), pytest.raises(ValueError, match="room for"):
        ops.mass_update(memory[..., column], table, mass[..., :-1], 0.5)
