"""Reference ops against the same sums written plainly in float64."""

import pytest
import torch

from learnkv import ops
from learnkv.kernels import reference
from learnkv.observation import Slots

GROUPS = [1, 2, 4]


def make_pages(lengths, page, dim, seed=0):
    """Heads of unequal length in shuffled pages, free pages between them: (Slots, dense keys, dense values [B, H, L, D])."""
    torch.manual_seed(seed)
    B, H = lengths.shape
    L, counts = int(lengths.max()), -(-lengths // page)
    order = torch.randperm(int(counts.sum()) + 3).int()
    table = torch.full((B, H, int(counts.max())), -1, dtype=torch.int32)
    table[torch.arange(table.shape[2]) < counts[..., None]] = order[: int(counts.sum())]
    keys, values, memory = torch.randn(B, H, L, dim), torch.randn(B, H, L, dim), torch.randn(B, H, L, 2)
    positions = torch.sort(torch.rand(B, H, 3 * L).argsort(-1)[..., :L], -1).values.int()
    shapes = [(dim,), (dim,), (), (2,)]
    pools = [torch.full((len(order), page, *s), 9.0) for s in shapes[:2]] + [torch.full((len(order), page), -1, dtype=torch.int32)]
    pools.append(torch.zeros(len(order), page, 2))
    for b in range(B):
        for h in range(H):
            for s in range(int(lengths[b, h])):
                for pool, dense in zip(pools, (keys, values, positions, memory), strict=True):
                    pool[table[b, h, s // page], s % page] = dense[b, h, s]
    return Slots(*pools, table=table, lengths=lengths.int()), keys, values, positions


def plain_attention(queries, keys, values, positions, lengths, query_positions, scale):
    """One query at a time in float64."""
    B, Q, T, _ = queries.shape
    G = Q // keys.shape[1]
    out = torch.zeros(queries.shape, dtype=torch.float64)
    for b in range(B):
        for q in range(Q):
            n = int(lengths[b, q // G])
            k, v, p = (x[b, q // G, :n] for x in (keys.double(), values.double(), positions))
            for t in range(T):
                seen = p <= query_positions[b, t]
                if seen.any():
                    out[b, q, t] = (k[seen] @ queries[b, q, t].double() * scale).softmax(0) @ v[seen]
    return out


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("T", [1, 5])
def test_attend_equals_plain_attention_over_ragged_heads(group, T):
    lengths = torch.tensor([[63, 1, 17], [16, 0, 40]])
    slots, keys, values, positions = make_pages(lengths, 16, 8)
    queries, query_positions = torch.randn(2, 3 * group, T, 8), torch.randint(30, 190, (2, T))
    query_positions[0, 0] = -1
    got = ops.attend(queries, slots.key_pages, slots.value_pages, slots.position_pages, slots.table, query_positions, 0.3)
    want = plain_attention(queries, keys, values, positions, lengths, query_positions, 0.3)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    assert not got[0, :, 0].any()


def test_attend_in_blocks_of_queries_equals_attend_at_once(monkeypatch):
    slots, *_ = make_pages(torch.tensor([[63, 20]]), 16, 8)
    arguments = (slots.key_pages, slots.value_pages, slots.position_pages, slots.table, torch.arange(100, 107)[None], 0.3)
    queries = torch.randn(1, 4, 7, 8)
    want = reference.attend(queries, *arguments)
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 600)
    torch.testing.assert_close(reference.attend(queries, *arguments), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attend_in_half_precision_is_as_close_as_its_inputs(dtype):
    slots, *_ = make_pages(torch.tensor([[63, 20]]), 16, 8)
    half = [x.to(dtype) for x in (torch.randn(1, 4, 1, 8), slots.key_pages, slots.value_pages)]
    rest = (slots.position_pages, slots.table, torch.tensor([[400]]), 0.3)
    want = reference.attend(*(x.float() for x in half), *rest)
    got = reference.attend(*half, *rest)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)


def test_gather_pages_gives_each_head_its_slots_and_zeros_after_them():
    lengths = torch.tensor([[5, 63, 0], [16, 17, 1]])
    slots, keys, values, positions = make_pages(lengths, 16, 4)
    empty = torch.arange(63) >= lengths[..., None]
    assert torch.equal(slots.keys, keys.masked_fill(empty[..., None], 0))
    assert torch.equal(slots.values, values.masked_fill(empty[..., None], 0))
    assert torch.equal(slots.positions, positions.masked_fill(empty, -1))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("over_group", ["sum", "mean", "max"])
@pytest.mark.parametrize("over_queries", ["sum", "mean", "max"])
def test_column_mass_equals_the_full_attention_matrix_reduced(group, over_group, over_queries, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 500)
    queries, keys = torch.randn(2, 2 * group, 7, 8), torch.randn(2, 2, 21, 8)
    positions = torch.arange(21).expand(2, 2, 21).clone()
    positions[1, 0, 13:] = -1
    query_positions = torch.arange(14, 21).repeat(2, 1)
    query_positions[0, :2] = -1
    got = ops.column_mass(queries, keys, query_positions, positions, 0.4, over_group=over_group, over_queries=over_queries)
    logits = torch.einsum("bhgtd,bhld->bhgtl", queries.view(2, 2, group, 7, 8).double(), keys.double()) * 0.4
    seen = (positions >= 0)[:, :, None] & (positions[:, :, None] <= query_positions[:, None, :, None])
    weights = logits.masked_fill(~seen[:, :, None], -torch.inf).softmax(-1).nan_to_num(0)
    mass = {"sum": weights.sum(2), "mean": weights.mean(2), "max": weights.amax(2)}[over_group]
    real = (query_positions >= 0).sum(-1)[:, None, None]
    want = {"sum": mass.sum(2), "mean": mass.sum(2) / real, "max": mass.amax(2)}[over_queries]
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


def test_row_lse_equals_the_log_of_the_summed_exponentials():
    queries, keys = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 21, 8)
    positions = torch.arange(21).expand(1, 2, 21)
    got = ops.row_lse(queries, keys, torch.arange(14, 21)[None], positions, 0.4)
    for q in range(4):
        for t in range(7):
            logits = keys[0, q // 2, : 15 + t].double() @ queries[0, q, t].double() * 0.4
            assert got[0, q, t].item() == pytest.approx(logits.exp().sum().log().item(), abs=1e-5)


def test_select_takes_the_highest_and_of_equals_the_later():
    scores = torch.tensor([[3.0, 1.0, 3.0, -torch.inf, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 3, 9, 1, 5]], dtype=torch.int32)
    assert ops.select(scores, positions, torch.tensor([1, 2])).tolist() == [[0, 0, 1, 0, 0], [1, 0, 1, 0, 0]]
    assert ops.select(scores, positions, torch.tensor([9, 0])).tolist() == [[1, 1, 1, 0, 1], [0, 0, 0, 0, 0]]


def test_select_orders_by_score_then_position_then_place_whatever_the_signs():
    values = torch.tensor([-torch.inf, -3e38, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 7.5, 3e38, torch.inf])
    scores = values[torch.randint(len(values), (4, 60))]
    positions = torch.randint(-1, 9, (4, 60), dtype=torch.int32)
    kept = ops.select(scores, positions, torch.full((4,), 25))
    for row in range(4):
        found = [i for i in range(60) if scores[row, i] > -torch.inf]
        best = sorted(found, key=lambda i: (-float(scores[row, i]), -int(positions[row, i]), i))[:25]
        assert kept[row].nonzero()[:, 0].tolist() == sorted(best)


@pytest.mark.parametrize("L", [1, 63])
def test_select_keeps_exactly_count_of_distinct_scores(L):
    scores, positions = torch.randn(3, 2, L), torch.arange(L, dtype=torch.int32).expand(3, 2, L)
    count = torch.randint(0, L + 1, (3, 2))
    kept = ops.select(scores, positions, count)
    assert torch.equal(kept.sum(-1), count)
    lowest = scores.masked_fill(~kept, torch.inf).amin(-1)
    highest = scores.masked_fill(kept, -torch.inf).amax(-1)
    assert (lowest >= highest).all()
