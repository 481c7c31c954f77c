"""Ops on whole pages in plain torch, against loops over slots in float64."""

from __future__ import annotations

import math

import pytest
import torch

from learnkv import ops

P = 16
LENGTHS = torch.tensor([[63, 1, 17], [16, 0, 40]])


def ragged_positions(lengths: torch.Tensor, L: int, seed: int = 0) -> torch.Tensor:
    """[B, H, L] int32 ascending in each head's first slots, -1 behind them."""
    drawn = torch.rand(*lengths.shape, 2 * L + 1, generator=torch.Generator().manual_seed(seed)).argsort(-1)[..., :L].sort(-1).values
    return drawn.masked_fill(torch.arange(L) >= lengths[..., None], -1).int()


def ragged_table(lengths: torch.Tensor, spare: int = 1, seed: int = 0) -> torch.Tensor:
    """[B, H, pages] int32 of shuffled pages, `spare` more than each head fills."""
    counts = -(-lengths // P) + spare
    order = torch.randperm(int(counts.sum()) + 3, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.full((*lengths.shape, int(counts.max()) + 1), -1, dtype=torch.int32)
    table[torch.arange(table.shape[-1]) < counts[..., None]] = order[: int(counts.sum())]
    return table


def loop_page_score(scores, positions, num_seen, num_sinks, num_recent, reduce):
    B, H, L = scores.shape
    out = torch.full((B, H, -(-L // P)), -math.inf)
    for b in range(B):
        for h in range(H):
            for j in range(out.shape[-1]):
                slots = [s for s in range(j * P, min(j * P + P, L)) if positions[b, h, s] >= 0]
                seen = [int(positions[b, h, s]) for s in slots]
                worth = [float(scores[b, h, s]) for s in slots]
                if any(p < num_sinks or p >= num_seen[b] - num_recent for p in seen) or math.inf in worth:
                    out[b, h, j] = math.inf
                elif slots:
                    out[b, h, j] = {"sum": sum(worth), "mean": sum(worth) / len(worth), "max": max(worth)}[reduce]
    return out


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("L", [63, 64, 65])
def test_page_score_equals_the_loop(reduce, L):
    positions = ragged_positions(LENGTHS, L)
    scores = torch.randn(positions.shape, generator=torch.Generator().manual_seed(1)).masked_fill(positions < 0, math.nan)
    num_seen = positions.amax((1, 2)) + 1
    got = ops.page_score(scores, positions, num_seen, P, num_sinks=4, num_recent=9, reduce=reduce)
    torch.testing.assert_close(got, loop_page_score(scores, positions, num_seen, 4, 9, reduce))


def test_a_pinned_slot_protects_its_page_whatever_lies_beside_it():
    scores = torch.zeros(1, 1, 40)
    scores[..., 17], scores[..., 18] = math.inf, -math.inf
    positions, num_seen = torch.arange(40).view(1, 1, -1), torch.tensor([40])
    for reduce in ("sum", "mean", "max"):
        assert ops.page_score(scores, positions, num_seen, P, reduce=reduce).tolist() == [[[0.0, math.inf, 0.0]]]


def test_mean_of_a_part_full_page_is_over_its_own_slots():
    positions = torch.arange(20).masked_fill(torch.arange(20) >= 18, -1).view(1, 1, -1)
    scores = torch.full((1, 1, 20), 3.0)
    assert ops.page_score(scores, positions, torch.tensor([18]), P).tolist() == [[[3.0, 3.0]]]


def test_nothing_cached_has_no_pages():
    empty = torch.zeros(2, 3, 0)
    assert ops.page_score(empty, empty.int(), torch.zeros(2), P).shape == (2, 3, 0)


@pytest.mark.parametrize("op", ["page_score", "page_bound"])
def test_an_unknown_reduction_is_refused_by_name(op):
    arguments = {"page_score": (torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), torch.ones(1), P), "page_bound": [torch.zeros(1, 1, 1)] * 4}
    with pytest.raises(ValueError, match=f'ops.{op}.reduce="median"'):
        getattr(ops, op)(*arguments[op], reduce="median")


def held(table: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """Every head's slots by their place in the pool, in order."""
    pages, ends = table.flatten(0, 1).tolist(), lengths.flatten().tolist()
    return [[row[s // P] * P + s % P for s in range(n)] for row, n in zip(pages, ends, strict=True)]


@pytest.mark.parametrize("seed", range(6))
def test_page_evict_leaves_the_slots_of_the_pages_kept_in_their_order(seed):
    table = ragged_table(LENGTHS, seed=seed)
    keep = torch.rand(table.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    closed, lengths, given_up, counts = ops.page_evict(table, LENGTHS, keep, P)
    chosen = [set(row[kept].tolist()) for row, kept in zip(table.flatten(0, 1), keep.flatten(0, 1), strict=True)]
    want = [[place for place in places if place // P in pages] for places, pages in zip(held(table, LENGTHS), chosen, strict=True)]
    assert held(closed, lengths) == want
    pairs = list(zip(table.flatten(0, 1).tolist(), chosen, strict=True))
    gone = [page for row, pages in pairs for page in row if page >= 0 and page not in pages]
    assert given_up.tolist() == gone + [-1] * (table.numel() - len(gone)) and int(counts.sum()) == len(gone)


def test_evicting_the_open_page_leaves_whole_pages_and_keeping_it_keeps_it_last():
    table, lengths = torch.tensor([[[7, 3, 5, -1]] * 2], dtype=torch.int32), torch.tensor([[37, 37]])
    keep = torch.tensor([[[True, True, False, False], [False, True, True, False]]])
    closed, left, given_up, counts = ops.page_evict(table, lengths, keep, P)
    assert closed.tolist() == [[[7, 3, -1, -1], [3, 5, -1, -1]]]
    assert left.tolist() == [[32, 21]] and left.dtype == lengths.dtype
    assert given_up.tolist()[:3] == [5, 7, -1] and counts.tolist() == [[1, 1]]


def test_pages_without_tokens_stay_behind_the_others_where_they_are_kept():
    table = torch.tensor([[[4, 9, 2]]], dtype=torch.int32)
    closed, lengths, given_up, _ = ops.page_evict(table, torch.tensor([[20]]), torch.tensor([[[False, True, True]]]), P)
    assert closed.tolist() == [[[9, 2, -1]]] and lengths.tolist() == [[4]] and given_up.tolist() == [4, -1, -1]


def test_columns_that_nobody_asked_to_keep_are_given_up():
    table = torch.tensor([[[4, 9, 2]]], dtype=torch.int32)
    closed, lengths, given_up, _ = ops.page_evict(table, torch.tensor([[20]]), torch.tensor([[[True]]]), P)
    assert closed.tolist() == [[[4, -1, -1]]] and lengths.tolist() == [[16]] and given_up.tolist() == [9, 2, -1]


def bound_case(dtype=torch.float32, G=3, T=None, D=8, seed=0):
    """Queries, pages of keys with NaN in every slot that is not filled, positions and table of ragged heads."""
    generator = torch.Generator().manual_seed(seed)
    table = ragged_table(LENGTHS, seed=seed)
    N = int(table.max()) + 4
    positions = torch.full((N, P), -1, dtype=torch.int32)
    for b, h in ((b, h) for b in range(2) for h in range(3)):
        for s in range(int(LENGTHS[b, h])):
            positions[table[b, h, s // P], s % P] = s
    keys = torch.randn(N, P, D, generator=generator).masked_fill((positions < 0)[..., None], math.nan).to(dtype)
    queries = torch.randn(2, 3 * G, *([] if T is None else [T]), D, generator=generator).to(dtype)
    return queries, keys, positions, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_page_minmax_is_over_filled_slots_and_infinite_where_there_is_none(dtype):
    _, keys, positions, _ = bound_case(dtype)
    minimum, maximum = ops.page_minmax(keys, positions)
    assert minimum.dtype == maximum.dtype == dtype
    for page, filled, low, high in zip(keys, positions >= 0, minimum, maximum, strict=True):
        rows = page[filled]
        assert torch.equal(low, rows.amin(0) if len(rows) else torch.full_like(low, math.inf))
        assert torch.equal(high, rows.amax(0) if len(rows) else torch.full_like(high, -math.inf))


def logits_of(queries, keys, positions, table):
    """[B, H, pages, G, T, P] float64 q . k, -inf where the slot is empty or no page is there."""
    q = (queries if queries.dim() == 4 else queries[:, :, None]).unflatten(1, (table.shape[1], -1)).double()
    pages = table.clamp(min=0).long()
    logits = torch.einsum("bhgtd,bhnpd->bhngtp", q, keys.double().nan_to_num()[pages])
    filled = (positions[pages] >= 0) & (table >= 0)[..., None]
    return logits.masked_fill(~filled[:, :, :, None, None], -math.inf)


@pytest.mark.parametrize("T", [None, 1, 3])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_page_bound_is_no_less_than_any_logit_of_the_page(T, reduce):
    case = bound_case(T=T)
    queries, keys, positions, table = case
    bound = ops.page_bound(queries, *ops.page_minmax(keys, positions), table, reduce=reduce)
    highest = logits_of(*case).amax(-1)  # [B, H, pages, G, T]
    reached = highest.amax((3, 4)) if reduce == "max" else highest.amax(4).sum(3)
    assert (bound + 1e-5 >= reached).all()
    assert torch.equal(bound == -math.inf, reached == -math.inf)


@pytest.mark.parametrize("T", [None, 3])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_page_bound_equals_the_papers_formula(T, reduce):
    queries, keys, positions, table = bound_case(T=T)
    minimum, maximum = ops.page_minmax(keys, positions)
    q = (queries if T else queries[:, :, None]).double()
    for b, h, j in torch.cartesian_prod(*map(torch.arange, table.shape)).tolist():
        page = int(table[b, h, j])
        want = -math.inf
        if page >= 0 and (positions[page] >= 0).any():
            reach = torch.maximum(q[b, 3 * h : 3 * h + 3] * minimum[page], q[b, 3 * h : 3 * h + 3] * maximum[page]).sum(-1).amax(1)
            want = float(reach.max() if reduce == "max" else reach.sum())
        got = float(ops.page_bound(queries, minimum, maximum, table, reduce=reduce)[b, h, j])
        assert got == pytest.approx(want, abs=1e-5)


def test_the_bound_of_one_key_is_its_logit():
    queries, key = torch.randn(1, 2, 8), torch.randn(1, 1, 8)
    bound = ops.page_bound(queries, *ops.page_minmax(key, torch.tensor([[0]])), torch.zeros(1, 1, 1, dtype=torch.int32))
    torch.testing.assert_close(bound[0, 0, 0], (queries[0] @ key[0, 0]).max())
