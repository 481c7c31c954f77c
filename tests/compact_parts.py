"""Pools of pages with heads of unequal length, and the same moves as the ops make, one slot at a time."""

from __future__ import annotations

import math

import torch

LENGTHS = [[63, 1, 16], [17, 0, 32]]
PAGE = 16


def make_table(counts, pages):
    """counts [B, H] and that many page numbers -> table [B, H, pages] int32."""
    table = torch.full((*counts.shape, max(1, int(counts.max()))), -1, dtype=torch.int32)
    table[torch.arange(table.shape[2]) < counts[..., None]] = pages.int()
    return table


def empty_pools(N, D, C, dtype=torch.float32):
    """Keys, values, positions, memory of N pages that hold nothing; a key or value of theirs is NaN."""
    keys, values = (torch.full((N, PAGE, D), math.nan, dtype=dtype) for _ in range(2))
    return [keys, values, torch.full((N, PAGE), -1, dtype=torch.int32), torch.zeros(N, PAGE, C)]


def pool_case(lengths=LENGTHS, D=4, C=1, dtype=torch.float32, share=0.5, seed=0, spare=2):
    """Pools, table, lengths and a keep mask of about `share` of the slots.  Pages are shuffled, some are free, some of a head's unused.

    Only slots held are numbers, all else is NaN; the mask is True past a head's length, which must be ignored.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    counts = -(-(lengths + spare) // PAGE)
    N = int(counts.sum()) + 3
    table = make_table(counts, torch.randperm(N, generator=generator)[: int(counts.sum())])
    pools = empty_pools(N, D, C, dtype)
    pools[3].fill_(math.nan)
    L = int(lengths.max())
    for b, h in torch.cartesian_prod(*(torch.arange(n) for n in lengths.shape)).tolist():
        for s in range(int(lengths[b, h])):
            page, row = int(table[b, h, s // PAGE]), s % PAGE
            for pool in (pools[0], pools[1], pools[3]):
                pool[page, row] = torch.randn(pool.shape[2], generator=generator).to(pool.dtype)
            pools[2][page, row] = 10 * s + h
    keep = torch.rand(*lengths.shape, L, generator=generator) < share
    keep[torch.arange(L) >= lengths[..., None]] = True
    return pools, table, lengths, keep


def target_case(pools, table, lengths, keep, columns):
    """Empty pools and a table with room for what is kept; memory as `columns` of a wider one."""
    kept = (keep & (torch.arange(keep.shape[2]) < lengths[..., None])).sum(-1)
    counts = -(-kept // PAGE)
    order = torch.randperm(int(counts.sum()) + 2, generator=torch.Generator().manual_seed(1))
    targets = empty_pools(len(order), pools[0].shape[2], pools[3].shape[2], pools[0].dtype)
    return [*targets[:3], targets[3][..., columns]], make_table(counts, order[: int(counts.sum())])


def append_case(T, padding, D=4, dtype=torch.float32, seed=0):
    """Pools with room for T more tokens a head, and the tokens; padding is NaN, on the left in row 0, amid the others in row 1."""
    generator = torch.Generator().manual_seed(seed)
    pools, table, lengths, _ = pool_case(D=D, dtype=dtype, spare=T)
    (B, H), real = lengths.shape, torch.ones(len(lengths), T, dtype=torch.bool)
    if padding:
        real[0, : T // 2], real[1, 1::3] = False, False
    keys, values = (torch.randn(B, H, T, D, generator=generator).to(dtype) for _ in range(2))
    keys[(~real)[:, None].expand(B, H, T)] = math.nan
    positions = torch.where(real, 1000 + real.cumsum(-1), -1)
    return pools, table, lengths, keys, values, positions


def equal_pools(some, others):
    """Whether all numbers are the same, NaN beside NaN."""
    return all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(some, others, strict=True))


def heads(lengths):
    return torch.cartesian_prod(*(torch.arange(n) for n in lengths.shape)).tolist()


def compacted(pools, table, lengths, keep):
    """Pools and lengths after compaction: holes ascending take movers ascending, the rest is emptied."""
    pools, after = [x.clone() for x in pools], torch.zeros_like(lengths)
    for b, h in heads(lengths):
        places = [(int(table[b, h, s // PAGE]), s % PAGE) for s in range(int(lengths[b, h]))]
        kept = [s for s in range(len(places)) if keep[b, h, s]]
        n = after[b, h] = len(kept)
        holes = [s for s in range(n) if not keep[b, h, s]]
        for hole, mover in zip(holes, [s for s in kept if s >= n], strict=True):
            for pool in pools:
                pool[places[hole]] = pool[places[mover]]
        for place in places[n:]:
            pools[1][place], pools[2][place], pools[3][place] = 0, -1, 0
    return pools, after


def copied(pools, table, lengths, keep, targets, target_table):
    """Targets and lengths after an order-keeping copy."""
    targets, after = [x.clone() for x in targets], torch.zeros_like(lengths)
    for b, h in heads(lengths):
        kept = [s for s in range(int(lengths[b, h])) if keep[b, h, s]]
        after[b, h] = len(kept)
        for j, s in enumerate(kept):
            for pool, target in zip(pools, targets, strict=True):
                target[target_table[b, h, j // PAGE], j % PAGE] = pool[table[b, h, s // PAGE], s % PAGE]
    return targets, after


def appended(pools, table, lengths, keys, values, positions):
    """Pools after the real tokens were written behind what each head holds, and the slots they took."""
    pools, slots = [x.clone() for x in pools], torch.full(keys.shape[:3], -1)
    for b, h in heads(lengths):
        s = int(lengths[b, h])
        for t in range(keys.shape[2]):
            if positions[b, t] >= 0:
                place = int(table[b, h, s // PAGE]), s % PAGE
                pools[0][place], pools[1][place], pools[2][place] = keys[b, h, t], values[b, h, t], positions[b, t].int()
                slots[b, h, t], s = s, s + 1
    return pools, slots
