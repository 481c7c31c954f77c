"""Attention over pages: few queries split over the slots, many by tiles of their own; log-sum-exp; the mass that each slot receives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels.entry import Arch, Entry, Loop, Tile, arch_of, padded_head
from learnkv.kernels.reference import Owners, nothing_to_read

LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)
PER_LN2 = tl.constexpr(1.4426950408889634)

SPLIT_SLOTS = 256  # at least so many slots to a split: its partial result is then about 1.6 % of what it reads
SPLIT_PROGRAMS = 512  # about 4 to each multiprocessor of an H100
MAX_SPLITS = 64
LOGIT_BYTES = 1 << 26  # of logits that are kept for the mass, or a quarter of the pages' if that is more


@triton.jit
def slot_rows(table, first, pages, P, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the slots first .. first + BLOCK_N - 1 of a head lie among the rows of all pages: [BLOCK_N] int64, below 0 where it has none.

    PAGE is P, or 0 where all heads have but one page.
    """
    slot = first + tl.arange(0, BLOCK_N)
    if PAGE == 0:
        page = tl.load(table).to(tl.int64)
        return tl.where((page >= 0) & (slot < P), page * P + slot, -1)
    elif BLOCK_N % PAGE == 0:  # each page is looked up once
        column = first // PAGE + tl.arange(0, BLOCK_N // PAGE)
        page = tl.load(table + column, mask=column < pages, other=-1).to(tl.int64)  # [BLOCK_N // PAGE]
        return tl.reshape(page[:, None] * PAGE + tl.arange(0, PAGE)[None, :], [BLOCK_N])
    else:
        page = tl.load(table + slot // PAGE, mask=slot // PAGE < pages, other=-1).to(tl.int64)  # [BLOCK_N]
        return page * PAGE + slot % PAGE


@triton.jit
def last_page(table, start, stop, BLOCK_P: tl.constexpr):
    """One more than the last column of start .. stop - 1 where a head has a page; 0 where it has none there."""
    last = start * 0
    for first in range(start, stop, BLOCK_P):
        column = first + tl.arange(0, BLOCK_P)
        page = tl.load(table + column, mask=column < stop, other=-1)  # [BLOCK_P]
        last = tl.maximum(last, tl.max(tl.where(page >= 0, column + 1, 0), 0))
    return last


@triton.jit
def softmax_step(peak, total, out, logits, value):
    """A running softmax-weighted sum [BLOCK_M, BLOCK_D] after the next slots, whose logits [BLOCK_M, BLOCK_N] are in base 2."""
    highest = tl.maximum(peak, tl.max(logits, 1))  # [BLOCK_M]
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(logits - base[:, None])  # [BLOCK_M, BLOCK_N]
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weights, 1)
    out = tl.dot(weights.to(value.dtype), value, out * decay[:, None], input_precision="tf32")
    return highest, total, out


@triton.jit(do_not_specialize=["H", "T", "rows", "pages", "split_slots", "P"])
def decode_split(
    queries,
    key_pages,
    value_pages,
    position_pages,
    table,
    query_positions,
    partial,
    partial_lse,
    logits,
    scale,
    H,
    T,
    rows,
    pages,
    split_slots,
    P,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPILL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Grid (B * H, splits): what `split_slots` slots of a head give all its rows (g, t), with the log-sum-exp in base 2."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    page_size = PAGE if PAGE else P
    capacity = pages * page_size
    table += head * pages
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    real = r < rows
    limit = tl.load(query_positions + head // H * T + r % T, mask=real, other=-1).to(tl.int32)  # [BLOCK_M]
    query = tl.load(queries + (head * rows + r)[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    start = split * split_slots
    stop = tl.minimum(start + split_slots, capacity)
    stop = tl.minimum(stop, last_page(table, start // page_size, tl.cdiv(stop, page_size), BLOCK_P) * page_size)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(start, stop, BLOCK_N):
        row = slot_rows(table, first, pages, P, PAGE, BLOCK_N)  # [BLOCK_N]
        position = tl.load(position_pages + row, mask=row >= 0, other=-1)
        used = position >= 0
        key = tl.load(key_pages + row[:, None] * D + d[None, :], mask=(row >= 0)[:, None] & (d < D)[None, :], other=0.0)
        logit = tl.dot(query, tl.trans(key), input_precision="tf32") * scale  # [BLOCK_M, BLOCK_N]
        logit = tl.where(used[None, :] & (position[None, :] <= limit[:, None]), logit, float("-inf"))
        if SPILL:
            slot = first + tl.arange(0, BLOCK_N)
            kept = logits + (head * rows + r)[:, None] * capacity + slot[None, :]
            tl.store(kept, logit, mask=real[:, None] & (row >= 0)[None, :])
        value = tl.load(value_pages + row[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
        peak, total, out = softmax_step(peak, total, out, logit, value)
    safe = tl.where(total > 0, total, 1.0)
    place = (head * tl.num_programs(1) + split) * rows + r  # [BLOCK_M]
    tl.store(partial_lse + place, tl.where(total > 0, peak + tl.log2(safe), float("-inf")), mask=real)
    tl.store(partial + place[:, None] * D + d[None, :], out / safe[:, None], mask=(real & (total > 0))[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def decode_combine(partial, partial_lse, out, lse, rows, splits, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (rows, B * H): one row's splits weighed by their log-sum-exp; in natural units from here on."""
    r = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    place = (head * splits + s) * rows + r  # [BLOCK_S]
    part = tl.load(partial_lse + place, mask=s < splits, other=float("-inf"))
    peak = tl.max(part, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(part - base)  # [BLOCK_S]
    total = tl.sum(weights, 0)
    safe = tl.where(total > 0, total, 1.0)
    seen = part > float("-inf")
    values = tl.load(partial + place[:, None] * D + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
    row = head * rows + r
    tl.store(out + row * D + d, (tl.sum(values * weights[:, None], 0) / safe).to(out.dtype.element_ty), mask=d < D)
    tl.store(lse + row, tl.where(total > 0, (base + tl.log2(safe)) * LN2, float("-inf")))


@triton.jit
def prefill_step(
    peak,
    total,
    out,
    query,
    limit,
    key_pages,
    value_pages,
    position_pages,
    table,
    first,
    pages,
    P,
    scale,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`softmax_step` over BLOCK_N slots from `first` on; without MASKED every query sees all of them."""
    d = tl.arange(0, BLOCK_D)
    row = slot_rows(table, first, pages, P, PAGE, BLOCK_N)  # [BLOCK_N]
    key = tl.load(key_pages + row[:, None] * D + d[None, :], mask=(row >= 0)[:, None] & (d < D)[None, :], other=0.0)
    logit = tl.dot(query, tl.trans(key), input_precision="tf32") * scale  # [BLOCK_M, BLOCK_N]
    used = row >= 0
    if MASKED:
        position = tl.load(position_pages + row, mask=row >= 0, other=-1)
        used = position >= 0
        logit = tl.where(used[None, :] & (position[None, :] <= limit[:, None]), logit, float("-inf"))
    value = tl.load(value_pages + row[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
    return softmax_step(peak, total, out, logit, value)


@triton.jit(do_not_specialize=["H", "T", "rows", "pages", "P"])
def prefill(
    queries,
    key_pages,
    value_pages,
    position_pages,
    table,
    query_positions,
    out,
    lse,
    scale,
    H,
    T,
    rows,
    pages,
    P,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Grid (tiles of rows (g, t), B * H): each tile walks the slots of its head that one of its queries may see."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1).to(tl.int64)
    page_size = PAGE if PAGE else P
    capacity = pages * page_size
    table += head * pages
    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    real = r < rows
    limit = tl.load(query_positions + head // H * T + r % T, mask=real, other=-1).to(tl.int32)  # [BLOCK_M]
    query = tl.load(queries + (head * rows + r)[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    farthest = tl.max(limit, 0)
    nearest = tl.min(tl.where(real, limit, farthest), 0)
    stop = capacity * 0  # after the last slot that some query sees
    bound = capacity  # the first slot that some query does not see
    for first in range(0, capacity, BLOCK_L):
        slot = first + tl.arange(0, BLOCK_L)
        row = slot_rows(table, first, pages, P, PAGE, BLOCK_L)
        position = tl.load(position_pages + row, mask=row >= 0, other=-1)  # [BLOCK_L]
        used = position >= 0
        stop = tl.maximum(stop, tl.max(tl.where(used & (position <= farthest), slot + 1, 0), 0))
        bound = tl.minimum(bound, tl.min(tl.where(used & (position <= nearest), capacity, slot), 0))
    bound = tl.minimum(bound, stop) // BLOCK_N * BLOCK_N
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(0, bound, BLOCK_N):
        peak, total, acc = prefill_step(
            peak, total, acc, query, limit, key_pages, value_pages, position_pages, table, first, pages, P, scale,
            D, PAGE, False, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    for first in range(bound, stop, BLOCK_N):
        peak, total, acc = prefill_step(
            peak, total, acc, query, limit, key_pages, value_pages, position_pages, table, first, pages, P, scale,
            D, PAGE, True, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    safe = tl.where(total > 0, total, 1.0)
    place = head * rows + r  # [BLOCK_M]
    tl.store(lse + place, tl.where(total > 0, (peak + tl.log2(safe)) * LN2, float("-inf")), mask=real)
    result = (acc / safe[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * D + d[None, :], result, mask=real[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["rows", "pages", "P"])
def mass_from_logits(logits, lse, table, mass, rows, pages, P, PAGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr):
    """Grid (blocks of slots, B * H): kept logits, in base 2, and the log-sum-exp of their rows -> the mass of each slot."""
    head = tl.program_id(1).to(tl.int64)
    capacity = pages * (PAGE if PAGE else P)
    first = tl.program_id(0) * BLOCK_L
    slot = first + tl.arange(0, BLOCK_L)
    held = slot_rows(table + head * pages, first, pages, P, PAGE, BLOCK_L) >= 0  # [BLOCK_L]
    total = tl.zeros([BLOCK_L], tl.float32)
    for start in range(0, rows, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        norm = tl.load(lse + head * rows + r, mask=r < rows, other=float("inf")) * PER_LN2  # [BLOCK_R]
        norm = tl.where(norm == float("-inf"), float("inf"), norm)
        place = (head * rows + r)[:, None] * capacity + slot[None, :]
        logit = tl.load(logits + place, mask=(r < rows)[:, None] & held[None, :], other=float("-inf"))  # [BLOCK_R, BLOCK_L]
        total += tl.sum(tl.exp2(logit - norm[:, None]), 0)
    tl.store(mass + head * capacity + slot, total, mask=slot < capacity)


@triton.jit
def mass_step(
    acc,
    key,
    position,
    queries,
    lse,
    limits,
    start,
    rows,
    T,
    scale,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Weights [BLOCK_M, BLOCK_N] that the queries from `start` on give these keys, added to `acc`; without MASKED each sees all."""
    r = start + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = tl.load(queries + r[:, None].to(tl.int64) * D + d[None, :], mask=(r < rows)[:, None] & (d < D)[None, :], other=0.0)
    norm = tl.load(lse + r, mask=r < rows, other=float("inf")) * PER_LN2  # [BLOCK_M]
    logit = tl.dot(query, key, input_precision="tf32") * scale  # [BLOCK_M, BLOCK_N]
    if MASKED:
        limit = tl.load(limits + r % T, mask=r < rows, other=-1).to(tl.int32)
        return acc + tl.where(position[None, :] <= limit[:, None], tl.exp2(logit - norm[:, None]), 0.0)
    return acc + tl.exp2(logit - norm[:, None])


@triton.jit(do_not_specialize=["H", "T", "parts", "rows", "pages", "P"])
def slot_mass(
    queries,
    key_pages,
    position_pages,
    table,
    query_positions,
    lse,
    mass,
    scale,
    H,
    T,
    parts,
    rows,
    pages,
    P,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Grid (blocks of slots, B * H): each block's keys stay, and all queries that may see one of them pass by.

    A head's rows (g, t) are `parts` of `rows` each: the group's, or one where T is small.
    """
    head = tl.program_id(1).to(tl.int64)
    capacity = pages * (PAGE if PAGE else P)
    first = tl.program_id(0) * BLOCK_N
    slot = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    limits = query_positions + head // H * T
    place = slot_rows(table + head * pages, first, pages, P, PAGE, BLOCK_N)  # [BLOCK_N]
    position = tl.load(position_pages + place, mask=place >= 0, other=-1)
    used = position >= 0
    key = tl.load(key_pages + place[None, :] * D + d[:, None], mask=(place >= 0)[None, :] & (d < D)[:, None], other=0.0)
    last = tl.max(position, 0)
    early = tl.min(tl.where(used, position, 0x7FFFFFFF), 0)
    begin = rows  # the first row that sees one of these slots
    bound = rows * 0  # after the last one that sees not all of them
    for start in range(0, rows, BLOCK_T):
        r = start + tl.arange(0, BLOCK_T)
        limit = tl.load(limits + r % T, mask=r < rows, other=-1).to(tl.int32)  # [BLOCK_T]
        begin = tl.minimum(begin, tl.min(tl.where(limit >= early, r, rows), 0))
        bound = tl.maximum(bound, tl.max(tl.where((limit < last) & (r < rows), r + 1, 0), 0))
    begin = tl.where(begin < rows, begin // BLOCK_M * BLOCK_M, rows)
    bound = tl.maximum(begin, tl.cdiv(bound, BLOCK_M) * BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for part in range(0, parts):
        row = (head * parts + part) * rows
        for start in range(begin, tl.minimum(bound, rows), BLOCK_M):
            acc = mass_step(acc, key, position, queries + row * D, lse + row, limits, start, rows, T, scale, D, True, BLOCK_M, BLOCK_D)
        for start in range(bound, rows, BLOCK_M):
            acc = mass_step(acc, key, position, queries + row * D, lse + row, limits, start, rows, T, scale, D, False, BLOCK_M, BLOCK_D)
    tl.store(mass + head * capacity + slot, tl.where(used, tl.sum(acc, 0), 0.0), mask=slot < capacity)


def key_bytes(D: int, itemsize: int) -> int:
    """Bytes of one key in a tile, by which the tiles are chosen."""
    return padded_head(D) * itemsize


def split_tile(arch: Arch, D: int, rows: int, itemsize: int) -> Tile:
    """decode_split: a tile holds all rows of a head, 16 at least."""
    block_m, wide = max(16, triton.next_power_of_2(rows)), key_bytes(D, itemsize)
    block_n = 64 if wide <= 256 and block_m < 64 else 32 if wide <= 512 else 16
    return Tile({"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": padded_head(D), "BLOCK_P": 128}, 4, 3)


def combine_tile(D: int, splits: int) -> Tile:
    """decode_combine: all splits of one row at once."""
    return Tile({"BLOCK_S": max(2, triton.next_power_of_2(splits)), "BLOCK_D": padded_head(D)}, 4, 2)


def prefill_tile(arch: Arch, D: int, itemsize: int) -> Tile:
    """prefill: where matrix products read shared memory (sm_90, sm_100) a program has registers for twice the rows."""
    wide = key_bytes(D, itemsize)
    if wide > 512:
        block_m, block_n = 32, 16
    elif arch in (90, 100):
        block_m, block_n = 128, 128 if wide <= 128 else 64 if wide <= 256 else 32
    else:
        block_m, block_n = 64, 64 if wide <= 256 else 32 if itemsize < 4 else 16
    return Tile({"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": padded_head(D), "BLOCK_L": 1024}, 8, 2)


def logit_tile(rows: int) -> Tile:
    """mass_from_logits."""
    return Tile({"BLOCK_R": min(16, triton.next_power_of_2(rows)), "BLOCK_L": 256}, 4, 2)


def mass_tile(arch: Arch, D: int, itemsize: int) -> Tile:
    """slot_mass."""
    wide = key_bytes(D, itemsize)
    if wide > 256:
        block_m, block_n, warps = 32, 64 if wide <= 512 else 32, 4
    else:
        block_m, block_n, warps = 32 if arch in (80, 89) else 64, 128, 8
    return Tile({"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": padded_head(D), "BLOCK_T": 1024}, warps, 2)


def attend(
    queries: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    table: Tensor,
    query_positions: Tensor,
    scale: float,
    whose: Owners | None = None,
    causal: bool = True,
) -> Tensor:
    """Causal attention of queries over the pages of their heads; `whose` and `causal` save the reference work."""
    return attend_with_lse(queries, key_pages, value_pages, position_pages, table, query_positions, scale)[0]


def attend_with_lse(
    queries: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    table: Tensor,
    query_positions: Tensor,
    scale: float,
    whose: Owners | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """`attend` with the log-sum-exp [B, Q, T]: by splits where a tile holds a head's rows, else by tiles of them."""
    if nothing_to_read(queries, position_pages):
        return torch.zeros_like(queries), queries.new_full(queries.shape[:3], float("-inf"), dtype=torch.float32)
    form = split_attention if few_rows(queries, key_pages, table) else tiled_attention
    return form(queries, key_pages, value_pages, position_pages, table, query_positions, scale)[:2]


def attend_with_mass(
    queries: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    table: Tensor,
    query_positions: Tensor,
    scale: float,
    whose: Owners | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """`attend` with the mass [B, H, L]: from kept logits where they are few, else from the keys once more."""
    args = queries, key_pages, value_pages, position_pages, table, query_positions, scale
    P = position_pages.shape[1]
    if nothing_to_read(queries, position_pages):
        return torch.zeros_like(queries), queries.new_zeros(*table.shape[:2], table.shape[2] * P, dtype=torch.float32)
    logit_bytes = 4 * queries[..., 0].numel() * table.shape[2] * P
    if few_rows(queries, key_pages, table) and logit_bytes <= max(LOGIT_BYTES, key_pages.nbytes // 2):
        out, lse, logits = split_attention(*args, spill=True)
        return out, mass_of_logits(logits, lse, table, P)
    out, lse = attend_with_lse(*args)
    return out, mass_of_slots(queries, key_pages, position_pages, table, query_positions, lse, scale)


def few_rows(queries: Tensor, key_pages: Tensor, table: Tensor) -> bool:
    """Whether one tile holds all rows (g, t) of a head."""
    rows = queries.shape[1] // table.shape[1] * queries.shape[2]
    return rows <= most_rows(key_pages.shape[2], key_pages.element_size())


def most_rows(D: int, itemsize: int) -> int:
    """Rows of a head that `split_tile` has registers for."""
    return 64 if key_bytes(D, itemsize) <= 256 else 32


def page_constant(table: Tensor, P: int) -> int:
    """PAGE of a kernel: a size that is compiled in, but for dense tensors, whose page may have any length."""
    return 0 if table.shape[2] == 1 else P


def num_splits(heads: int, capacity: int) -> int:
    """By shapes alone, so that a captured graph holds for every length."""
    return max(1, min(triton.cdiv(capacity, SPLIT_SLOTS), SPLIT_PROGRAMS // max(1, heads), MAX_SPLITS))


def split_attention(
    queries: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    table: Tensor,
    query_positions: Tensor,
    scale: float,
    *,
    spill: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention [B, Q, T, D], log-sum-exp [B, Q, T] and, with `spill`, logits [B, Q, T, L] in base 2, undefined past a head's pages."""
    queries, key_pages, value_pages, position_pages, table, query_positions = checked(
        queries, key_pages, value_pages, position_pages, table, query_positions
    )
    (B, Q, T, D), (_, H, pages), P = queries.shape, table.shape, position_pages.shape[1]
    rows, capacity = Q // H * T, pages * P
    tile = split_tile(arch_of(queries), D, rows, key_pages.element_size())
    block = tile.blocks["BLOCK_N"]
    splits = num_splits(B * H, capacity)
    split_slots = triton.cdiv(triton.cdiv(capacity, splits), block) * block
    partial = queries.new_empty(B * H, splits, rows, D, dtype=torch.float32)
    partial_lse = queries.new_empty(B * H, splits, rows, dtype=torch.float32)
    logits = queries.new_empty((B, Q, T, capacity) if spill else (1,), dtype=torch.float32)
    out, lse = torch.empty_like(queries), queries.new_empty(B, Q, T, dtype=torch.float32)
    read = queries.to(key_pages.dtype), key_pages, value_pages, position_pages, table, query_positions
    decode_split[(B * H, splits)](
        *read, partial, partial_lse, logits, scale * LOG2E, H, T, rows, pages, split_slots, P,
        D=D, PAGE=page_constant(table, P), SPILL=spill, **tile.blocks, **tile.options,
    )  # fmt: skip
    tile = combine_tile(D, splits)
    decode_combine[(rows, B * H)](partial, partial_lse, out, lse, rows, splits, D=D, **tile.blocks, **tile.options)
    return out, lse, logits


def tiled_attention(
    queries: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    table: Tensor,
    query_positions: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention [B, Q, T, D] and log-sum-exp [B, Q, T]."""
    queries, key_pages, value_pages, position_pages, table, query_positions = checked(
        queries, key_pages, value_pages, position_pages, table, query_positions
    )
    (B, Q, T, D), (_, H, pages), P = queries.shape, table.shape, position_pages.shape[1]
    rows = Q // H * T
    tile = prefill_tile(arch_of(queries), D, key_pages.element_size())
    out, lse = torch.empty_like(queries), queries.new_empty(B, Q, T, dtype=torch.float32)
    read = queries.to(key_pages.dtype), key_pages, value_pages, position_pages, table, query_positions
    prefill[(triton.cdiv(rows, tile.blocks["BLOCK_M"]), B * H)](
        *read, out, lse, scale * LOG2E, H, T, rows, pages, P,
        D=D, PAGE=page_constant(table, P), **tile.blocks, **tile.options,
    )  # fmt: skip
    return out, lse


def mass_of_logits(logits: Tensor, lse: Tensor, table: Tensor, P: int) -> Tensor:
    """Mass [B, H, L] of what `split_attention` kept."""
    (B, H, pages), rows = table.shape, lse.shape[1] // table.shape[1] * lse.shape[2]
    mass = lse.new_empty(B, H, pages * P)
    tile = logit_tile(rows)
    block = tile.blocks["BLOCK_L"]
    grid = triton.cdiv(pages * P, block), B * H
    mass_from_logits[grid](
        logits, lse, table.contiguous(), mass, rows, pages, P, PAGE=page_constant(table, P), **tile.blocks, **tile.options
    )
    return mass


def mass_of_slots(
    queries: Tensor, key_pages: Tensor, position_pages: Tensor, table: Tensor, query_positions: Tensor, lse: Tensor, scale: float
) -> Tensor:
    """Mass [B, H, L] of queries [B, Q, T, D] whose log-sum-exp [B, Q, T] is known."""
    queries, key_pages, _, position_pages, table, query_positions = checked(
        queries, key_pages, key_pages, position_pages, table, query_positions
    )
    (B, Q, T, D), (_, H, pages), P = queries.shape, table.shape, position_pages.shape[1]
    mass = lse.new_empty(B, H, pages * P)
    tile = mass_tile(arch_of(queries), D, key_pages.element_size())
    block = tile.blocks["BLOCK_N"]
    whole = T // tile.blocks["BLOCK_M"]  # tiles that the queries of one query head fill
    parts = Q // H if whole > 1 else 1
    slot_mass[(triton.cdiv(pages * P, block), B * H)](
        queries.to(key_pages.dtype), key_pages, position_pages, table, query_positions, lse.contiguous(), mass, scale * LOG2E,
        H, T, parts, Q // H * T // parts, pages, P, D=D, PAGE=page_constant(table, P), **tile.blocks, **tile.options,
    )  # fmt: skip
    return mass


def checked(
    queries: Tensor, key_pages: Tensor, value_pages: Tensor, position_pages: Tensor, table: Tensor, query_positions: Tensor
) -> tuple[Tensor, ...]:
    """The same, each in one run of memory; raises ValueError where shapes or types do not fit."""
    (B, Q, _, D), (N, P) = queries.shape, position_pages.shape
    if key_pages.shape != (N, P, D) or value_pages.shape != (N, P, D) or table.shape[0] != B or Q % table.shape[1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (queries, key_pages, value_pages, position_pages, table))
        raise ValueError(f"attend: queries, keys, values, positions and table of shapes {shapes} do not fit")
    if key_pages.dtype != value_pages.dtype:
        raise ValueError(f"attend: keys are {key_pages.dtype} and values {value_pages.dtype}; store both alike")
    return tuple(x.contiguous() for x in (queries, key_pages, value_pages, position_pages, table, query_positions))


SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
COUNTS = {name: "i32" for name in ("H", "T", "parts", "rows", "pages", "split_slots", "splits", "P")}
INDEXES = {"position_pages": "*i32", "table": "*i32", "query_positions": "*i64"}
RESULTS = {name: "*fp32" for name in ("partial", "partial_lse", "logits", "lse", "mass")}


def entries(arch: Arch) -> list[Entry]:
    """Pages of 16 slots, heads of every size, and dense tensors, which are one page per head."""
    bf16, fp32 = torch.bfloat16, torch.float32
    sizes = [(bf16, D) for D in (64, 80, 128, 256)] + [(fp32, 128), (fp32, 256)]
    many = [(bf16, 128), (fp32, 256)]
    return [
        *(split_entry(arch, dtype, D, 4) for dtype, D in sizes),
        split_entry(arch, bf16, 128, 4, spill=True),
        *(split_entry(arch, dtype, D, most_rows(D, dtype.itemsize), spill=True) for dtype, D in many),
        split_entry(arch, bf16, 128, 4, page=0),
        *(combine_entry(D, splits) for D, splits in ((64, 1), (128, 16), (256, 64))),
        *(prefill_entry(arch, dtype, D) for dtype, D in sizes),
        prefill_entry(arch, bf16, 128, page=0),
        *(logit_entry(rows, page) for rows, page in ((1, 16), (64, 16), (4, 0))),
        *(mass_entry(arch, dtype, D) for dtype, D in sizes),
        mass_entry(arch, bf16, 128, page=0),
    ]


def label(dtype: torch.dtype, D: int, rest: str = "", page: int = 16) -> str:
    return f"{SHORT[dtype]} D={D}{rest}{'' if page else ' dense'}"


def types_of(kernel: triton.JITFunction, dtype: torch.dtype, constants: Mapping[str, object], tile: Tile) -> dict[str, str]:
    """Of a kernel's run-time arguments, by their names."""
    given = dict.fromkeys(("queries", "key_pages", "value_pages", "out"), f"*{SHORT[dtype]}")
    known = {**COUNTS, **INDEXES, **RESULTS, **given, "scale": "fp32"}
    return {name: known[name] for name in kernel.arg_names if name not in constants and name not in tile.blocks}


def split_entry(arch: Arch, dtype: torch.dtype, D: int, G: int, *, spill: bool = False, page: int = 16) -> Entry:
    tile = split_tile(arch, D, G, dtype.itemsize)
    constants = {"D": D, "PAGE": page, "SPILL": spill}
    slots, rows = tile.blocks["BLOCK_N"], tile.blocks["BLOCK_M"]
    slot_bytes = 2 * D * dtype.itemsize + 4 + (4 * G if spill else 0)  # key, value, position; a logit for each row
    loop = Loop(bytes=slots * slot_bytes, flops=4 * rows * slots * tile.blocks["BLOCK_D"], exps=rows * slots)
    name = label(dtype, D, f" G={G}{' with logits' if spill else ''}", page)
    return Entry(decode_split, name, types_of(decode_split, dtype, constants, tile), constants, tile, loop=loop)


def combine_entry(D: int, splits: int) -> Entry:
    tile, constants = combine_tile(D, splits), {"D": D}
    types = types_of(decode_combine, torch.bfloat16, constants, tile)
    return Entry(decode_combine, f"bf16 D={D} of {splits} splits", types, constants, tile)


def prefill_entry(arch: Arch, dtype: torch.dtype, D: int, *, page: int = 16) -> Entry:
    tile, constants = prefill_tile(arch, D, dtype.itemsize), {"D": D, "PAGE": page}
    pairs = tile.blocks["BLOCK_M"] * tile.blocks["BLOCK_N"]
    loop = Loop(flops=4 * pairs * tile.blocks["BLOCK_D"], exps=pairs)
    return Entry(prefill, label(dtype, D, page=page), types_of(prefill, dtype, constants, tile), constants, tile, loop=loop)


def logit_entry(rows: int, page: int) -> Entry:
    tile, constants = logit_tile(rows), {"PAGE": page}
    types = types_of(mass_from_logits, torch.float32, constants, tile)
    return Entry(mass_from_logits, f"{rows} rows{'' if page else ' dense'}", types, constants, tile)


def mass_entry(arch: Arch, dtype: torch.dtype, D: int, *, page: int = 16) -> Entry:
    tile, constants = mass_tile(arch, D, dtype.itemsize), {"D": D, "PAGE": page}
    pairs = tile.blocks["BLOCK_M"] * tile.blocks["BLOCK_N"]
    loop = Loop(flops=2 * pairs * tile.blocks["BLOCK_D"], exps=pairs)
    return Entry(slot_mass, label(dtype, D, page=page), types_of(slot_mass, dtype, constants, tile), constants, tile, loop=loop)
