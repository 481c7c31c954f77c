"""Log-sum-exp, mass and remembered mass of attention over pages, against the same sums written plainly in float64."""

import pytest
import torch

from learnkv import ops

NAN = float("nan")
P, D, SCALE = 4, 8, 0.3


def make_call():
    """Two rows that share a page, one head without a page; NaN keys in free pages and unused slots."""
    torch.manual_seed(0)
    table = torch.tensor([[[3, 0, 5], [-1, -1, -1]], [[3, 6, -1], [1, -1, -1]]], dtype=torch.int32)
    keys, values = torch.randn(7, P, D), torch.randn(7, P, D)
    positions = torch.arange(7, dtype=torch.int32)[:, None] * P + torch.arange(P, dtype=torch.int32)
    positions[5, 2:], positions[6, 1:], positions[[2, 4]] = -1, -1, -1
    keys[positions < 0] = NAN
    values[positions < 0] = 0
    query_positions = torch.tensor([[-1, 2, 30], [4, 12, 13]])
    return torch.randn(2, 6, 3, D), keys, values, positions, table, query_positions, SCALE


def weights(call):
    """Logits [T] of each row, head and query head over the head's slots, -inf where unseen: a dict of [T, L] float64."""
    queries, keys, _, positions, table, query_positions, scale = call
    B, H, G = *table.shape[:2], queries.shape[1] // table.shape[1]
    out = {}
    for b in range(B):
        for q in range(H * G):
            pages = table[b, q // G]
            where = positions[pages.clamp(min=0).long()].masked_fill(pages[:, None] < 0, -1).flatten()
            k = keys[pages.clamp(min=0).long()].flatten(0, 1).double()
            logits = queries[b, q].double() @ k.mT * scale
            out[b, q] = logits.masked_fill((where < 0) | (where > query_positions[b, :, None]), float("-inf"))
    return out


def test_lse_equals_a_plain_sum_of_exponentials():
    call = make_call()
    out, lse = ops.attend_with_lse(*call)
    want = torch.stack([torch.stack([weights(call)[b, q].logsumexp(-1) for q in range(6)]) for b in range(2)])
    assert torch.equal(out, ops.attend(*call)) and (want == float("-inf")).any()
    torch.testing.assert_close(lse.double(), want, atol=1e-5, rtol=0)


def test_mass_equals_a_plain_sum_of_weights():
    call = make_call()
    out, mass = ops.attend_with_mass(*call)
    want = torch.zeros(2, 2, 3 * P, dtype=torch.float64)
    for (b, q), logits in weights(call).items():
        want[b, q // 3] += logits.softmax(-1).nan_to_num(0).sum(0)
    torch.testing.assert_close(out, ops.attend(*call))
    torch.testing.assert_close(mass.double(), want, atol=1e-5, rtol=0)


def test_mass_is_added_to_one_column_of_held_pages():
    table = torch.tensor([[[2, 0], [4, -1]]], dtype=torch.int32)
    memory, mass = torch.randn(5, P, 3), torch.rand(1, 2, 2 * P)
    want = memory.clone()
    for h, column, page in ((0, 0, 2), (0, 1, 0), (1, 0, 4)):
        want[page, :, 1] = 0.5 * want[page, :, 1] + mass[0, h, column * P : column * P + P]
    ops.mass_update(memory[..., 1], table, mass, 0.5)
    torch.testing.assert_close(memory, want)


EMPTY = [
    {"B": 0, "N": 0, "pages": 0},
    {"B": 0},
    {"H": 0},
    {"T": 0},
    {"N": 0},
    {"N": 0, "pages": 0},
    {"pages": 0},
    {"pages": 0, "T": 5, "N": 40},
]


@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_attention_over_nothing_is_0_and_its_lse_minus_infinity(sizes):
    B, H, T, N, pages = ({"B": 2, "H": 2, "T": 3, "N": 4, "pages": 2} | sizes).values()
    queries, keys, values = torch.ones(B, H * 3, T, D), torch.ones(N, P, D), torch.ones(N, P, D)
    table, positions = torch.full((B, H, pages), -1, dtype=torch.int32), torch.full((N, P), -1, dtype=torch.int32)
    call = queries, keys, values, positions, table, torch.full((B, T), 9), SCALE
    (with_lse, lse), (with_mass, mass) = ops.attend_with_lse(*call), ops.attend_with_mass(*call)
    for out in (ops.attend(*call), with_lse, with_mass):
        assert torch.equal(out, torch.zeros_like(queries))
    assert torch.equal(lse, torch.full(queries.shape[:3], float("-inf"))) and torch.equal(mass, torch.zeros(B, H, pages * P))
