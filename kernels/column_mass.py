"""Attention that each slot receives, and the log-sum-exp of each query's logits.  A key tile stays, queries stream past it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels.entry import Arch, Entry, Loop, Tile, arch_of, padded_head
from learnkv.kernels.reference import check_reductions

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
NEVER = tl.constexpr(2**31 - 1)  # position of an empty slot: no query gets there
BLOCK_SPANS = tl.constexpr(128)  # tiles whose first and last position are read at once


@triton.jit
def attention(q, k, lse, scale_log2):
    """Softmax weights [M, N] of rows whose log-sum-exp [M] is known, in base 2; at most 1, however large the logits."""
    logits = tl.dot(q, k, input_precision="tf32") * scale_log2  # [M, N]
    return tl.exp2(tl.minimum(logits - lse[:, None], 0.0))


@triton.jit
def base_2(lse):
    """A natural log-sum-exp in base 2; +inf where a query sees nothing, so that its weights are 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def reduced(mass, group, weights, last, GROUP_MAX: tl.constexpr, QUERIES_MAX: tl.constexpr):
    """(mass, group) after one head's weights; `group` holds the heads of a query so far where they are reduced in another way."""
    if GROUP_MAX == QUERIES_MAX:
        mass = tl.maximum(mass, weights) if QUERIES_MAX else mass + weights
    else:
        group = tl.maximum(group, weights) if GROUP_MAX else group + weights
        if last:
            mass = tl.maximum(mass, group) if QUERIES_MAX else mass + group
            group = tl.zeros_like(group)
    return mass, group


@triton.jit(do_not_specialize=["T", "L", "num_tiles", "stride_tb", "stride_pb", "stride_ph"])
def column_mass_tiles(
    queries,
    keys,
    query_positions,
    key_positions,
    lse,
    lowest,
    highest,
    out,
    scale_log2,
    share,
    T,
    L,
    num_tiles,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_tb,
    stride_pb,
    stride_ph,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    GROUP_MAX: tl.constexpr,
    QUERIES_MAX: tl.constexpr,
    QUERIES_MEAN: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (key tiles, B * H).  One program owns BLOCK_N slots and all queries that see them: tiles of BLOCK_T queries of BLOCK_G
    heads, the ones that some slot hides from first, then the ones that see all, without a mask.  MANY: queries fill several tiles."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    row = tl.arange(0, BLOCK_G * BLOCK_T)  # [M]
    g_row, t_row = row // BLOCK_T, row % BLOCK_T
    held = tl.load(key_positions + b * stride_pb + h * stride_ph + n, mask=n < L, other=-1).to(tl.int32)
    position = tl.where(held >= 0, held, NEVER)
    k_at = keys + b * stride_kb + h * stride_kh + n[None, :].to(tl.int64) * stride_kl + d[:, None]
    k = tl.load(k_at, mask=(held >= 0)[None, :] & (d < D)[:, None], other=0.0)  # [BLOCK_D, BLOCK_N]

    GROUPS: tl.constexpr = (G + BLOCK_G - 1) // BLOCK_G
    first, full, ragged = 0, 1, 0
    if MANY:
        first, full = num_tiles, 0
        nearest, farthest = tl.min(position), tl.max(held)
        for start in range(0, num_tiles, BLOCK_SPANS):
            i = start + tl.arange(0, BLOCK_SPANS)
            high = tl.load(highest + b * num_tiles + i, mask=i < num_tiles, other=-1)
            low = tl.load(lowest + b * num_tiles + i, mask=i < num_tiles, other=NEVER)
            first = tl.minimum(first, tl.min(tl.where(high >= nearest, i, num_tiles)))
            full = tl.maximum(full, tl.max(tl.where(low < farthest, i + 1, 0)))
        full = tl.maximum(first, full)
        ragged = num_tiles - tl.maximum(full, T // BLOCK_T)  # 1 where a last tile all queries of which see all is not a whole one

    mass = tl.zeros([BLOCK_G * BLOCK_T, BLOCK_N], tl.float32)
    group = tl.zeros([BLOCK_G * BLOCK_T, BLOCK_N], tl.float32)
    q_base = queries + b * stride_qb + h * G * stride_qh
    q_row = g_row[:, None].to(tl.int64) * stride_qh + t_row[:, None].to(tl.int64) * stride_qt + d[None, :]  # [M, BLOCK_D]
    lse_base = lse + bh * G * T
    lse_row = g_row.to(tl.int64) * T + t_row
    for j in range(first * GROUPS, (full + ragged) * GROUPS):
        i = tl.where(j // GROUPS < full, j // GROUPS, num_tiles - 1)
        t_start, g_start = tl.cast(i, tl.int64) * BLOCK_T, tl.cast(j % GROUPS, tl.int64) * BLOCK_G
        inside = (t_start + t_row < T) & (g_start + g_row < G)
        at = tl.load(query_positions + b * stride_tb + t_start + t_row, mask=inside, other=-1).to(tl.int32)
        q = tl.load(q_base + g_start * stride_qh + t_start * stride_qt + q_row, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        row_lse = base_2(tl.load(lse_base + g_start * T + t_start + lse_row, mask=inside, other=float("-inf")))
        weights = tl.where(position[None, :] <= at[:, None], attention(q, k, row_lse, scale_log2), 0.0)
        mass, group = reduced(mass, group, weights, j % GROUPS == GROUPS - 1, GROUP_MAX, QUERIES_MAX)
    if MANY:
        for j in range(full * GROUPS, T // BLOCK_T * GROUPS):
            t_start, g_start = tl.cast(j // GROUPS, tl.int64) * BLOCK_T, tl.cast(j % GROUPS, tl.int64) * BLOCK_G
            q = tl.load(q_base + g_start * stride_qh + t_start * stride_qt + q_row, mask=(d < D)[None, :], other=0.0)
            row_lse = base_2(tl.load(lse_base + g_start * T + t_start + lse_row))
            mass, group = reduced(mass, group, attention(q, k, row_lse, scale_log2), j % GROUPS == GROUPS - 1, GROUP_MAX, QUERIES_MAX)

    total = (tl.max(mass, 0) if QUERIES_MAX else tl.sum(mass, 0)) * share  # [BLOCK_N]
    if QUERIES_MEAN:
        count = 0
        for start in range(0, T, BLOCK_SPANS):
            t = start + tl.arange(0, BLOCK_SPANS)
            count += tl.sum((tl.load(query_positions + b * stride_tb + t, mask=t < T, other=-1) >= 0).to(tl.int32))
        total = total / tl.maximum(count, 1)
    tl.store(out + bh * L + n, tl.where(held >= 0, total, 0.0), mask=n < L)


@triton.jit
def summed(peak, total, products, scale_log2):
    """(peak [M], total [M]) after one more tile of products [M, N], -inf where unseen; the scale is positive."""
    higher = tl.maximum(peak, tl.max(products, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher * scale_log2)
    return higher, total * tl.exp2(peak * scale_log2 - safe) + tl.sum(tl.exp2(products * scale_log2 - safe[:, None]), 1)


@triton.jit(do_not_specialize=["T", "L", "num_tiles", "tiles_each", "stride_tb", "stride_pb", "stride_ph"])
def row_lse_split(
    queries,
    keys,
    query_positions,
    key_positions,
    lowest,
    highest,
    out,
    scale_log2,
    T,
    L,
    num_tiles,
    tiles_each,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_tb,
    stride_pb,
    stride_ph,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (row tiles, B * H, splits).  Rows are (g, t) of one KV head side by side; a split owns `tiles_each` tiles of BLOCK_N slots.
    MANY: tiles that all rows see come first and take no mask, tiles that none sees are left out."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    g, t = r // T, r % T
    d = tl.arange(0, BLOCK_D)
    inside = r < G * T
    at = tl.load(query_positions + b * stride_tb + t, mask=inside, other=-1).to(tl.int32)
    q_at = queries + b * stride_qb + (h * G + g)[:, None] * stride_qh + t[:, None].to(tl.int64) * stride_qt + d[None, :]
    q = tl.load(q_at, mask=(at >= 0)[:, None] & (d < D)[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]

    begin = tl.program_id(2) * tiles_each
    end = tl.minimum(begin + tiles_each, num_tiles)
    full = begin
    if MANY:
        latest, earliest = tl.max(at), tl.min(tl.where(inside, at, NEVER))
        seen, full = begin, end
        for start in range(begin, end, BLOCK_SPANS):
            i = start + tl.arange(0, BLOCK_SPANS)
            low = tl.load(lowest + bh * num_tiles + i, mask=i < end, other=NEVER)
            high = tl.load(highest + bh * num_tiles + i, mask=i < end, other=NEVER)
            seen = tl.maximum(seen, tl.max(tl.where(low <= latest, i + 1, 0)))
            full = tl.minimum(full, tl.min(tl.where(high > earliest, i, end)))
        end = seen
        full = tl.minimum(full, end)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_base = keys + b * stride_kb + h * stride_kh
    n_row = tl.arange(0, BLOCK_N)
    k_row = n_row[None, :].to(tl.int64) * stride_kl + d[:, None]  # [BLOCK_D, BLOCK_N]
    if MANY:
        for i in range(begin, full):
            k = tl.load(k_base + tl.cast(i, tl.int64) * BLOCK_N * stride_kl + k_row, mask=(d < D)[:, None], other=0.0)
            peak, total = summed(peak, total, tl.dot(q, k, input_precision="tf32"), scale_log2)
    for i in range(full, end):
        n = i * BLOCK_N + n_row
        held = tl.load(key_positions + b * stride_pb + h * stride_ph + n, mask=n < L, other=-1).to(tl.int32)
        k_mask = (n < L)[None, :] & (d < D)[:, None]  # what an empty slot holds comes to nothing below
        k = tl.load(k_base + tl.cast(i, tl.int64) * BLOCK_N * stride_kl + k_row, mask=k_mask, other=0.0)
        position = tl.where(held >= 0, held, NEVER)
        products = tl.dot(q, k, input_precision="tf32")  # [BLOCK_M, BLOCK_N]
        peak, total = summed(peak, total, tl.where(position[None, :] <= at[:, None], products, float("-inf")), scale_log2)
    seen = total > 0
    lse = tl.where(seen, peak * scale_log2 + tl.log2(tl.where(seen, total, 1.0)), float("-inf")) * LN2
    split = bh * tl.num_programs(2) + tl.program_id(2)
    tl.store(out + split * G * T + r, lse, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def row_lse_combine(parts, out, num_rows, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Grid (row tiles, B * H): parts [B * H, SPLITS, rows], each split's log-sum-exp, to the whole one [B * H, rows]."""
    bh = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.arange(0, SPLITS)
    part_at = parts + (bh * SPLITS + split[:, None]) * num_rows + r[None, :]
    part = tl.load(part_at, mask=(r < num_rows)[None, :], other=float("-inf"))  # [SPLITS, BLOCK_R]
    peak = tl.max(part, 0)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2((part - safe[None, :]) * LOG2E), 0)
    lse = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)) * LN2, float("-inf"))
    tl.store(out + bh * num_rows + r, lse, mask=r < num_rows)


PROGRAMS = 264  # at least so many are wanted in flight: two for each of an H200's 132 processors


def row_lse(queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor, scale: float) -> Tensor:
    """`reference.row_lse`, the keys split among programs where there are few rows."""
    if not queries.numel():
        return queries.new_full(queries.shape[:3], float("-inf"), dtype=torch.float32)
    queries, keys, query_positions, key_positions = checked(queries, keys, query_positions, key_positions)
    (B, Q, T, D), (H, L) = queries.shape, keys.shape[1:3]
    tile = lse_tile(arch_of(queries), D, queries.dtype)
    block_m, block_n = tile.blocks["BLOCK_M"], tile.blocks["BLOCK_N"]
    num_tiles, row_tiles = triton.cdiv(L, block_n), triton.cdiv(Q // H * T, block_m)
    splits = num_splits(row_tiles * B * H, num_tiles)
    parts = queries.new_empty(B * H, splits, Q // H * T, dtype=torch.float32)
    if not parts.numel():
        return parts.view(B, Q, T)
    many = block_m < T
    lowest, highest = key_spans(key_positions, block_n) if many else (key_positions, key_positions)
    strides = (*queries.stride()[:3], *keys.stride()[:3], query_positions.stride(0), *key_positions.stride()[:2])
    tensors = (queries, keys, query_positions, key_positions, lowest, highest, parts)
    numbers = (scale * math.log2(math.e), T, L, num_tiles, triton.cdiv(num_tiles, splits), *strides)
    constants = {"H": H, "G": Q // H, "D": D, "MANY": many}
    row_lse_split[(row_tiles, B * H, splits)](*tensors, *numbers, **constants, **tile.blocks, **tile.options)
    if splits == 1:
        return parts.view(B, Q, T)
    out = queries.new_empty(B * H, Q // H * T, dtype=torch.float32)
    tile = combine_tile()
    row_lse_combine[(triton.cdiv(out.shape[1], tile.blocks["BLOCK_R"]), B * H)](
        parts, out, out.shape[1], SPLITS=splits, **tile.blocks, **tile.options
    )
    return out.view(B, Q, T)


def column_mass(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    *,
    over_group: str = "sum",
    over_queries: str = "sum",
    lse: Tensor | None = None,
) -> Tensor:
    """`reference.column_mass`; a program's sum over group and queries is one order of additions, whatever order programs run in."""
    check_reductions(over_group, over_queries)
    if not queries.numel() or not keys.numel():
        return keys.new_zeros(keys.shape[:3], dtype=torch.float32)
    queries, keys, query_positions, key_positions = checked(queries, keys, query_positions, key_positions)
    lse = row_lse(queries, keys, query_positions, key_positions, scale) if lse is None else lse.float().contiguous()
    (B, Q, T, D), (H, L) = queries.shape, keys.shape[1:3]
    G = Q // H
    out = keys.new_empty(B, H, L, dtype=torch.float32)
    tile = mass_tile(arch_of(queries), D, queries.dtype, T, G, each=(over_group == "max") != (over_queries == "max"))
    block_t, many = tile.blocks["BLOCK_T"], tile.blocks["BLOCK_T"] < T
    lowest, highest = query_spans(query_positions, block_t) if many else (query_positions, query_positions)
    strides = (*queries.stride()[:3], *keys.stride()[:3], query_positions.stride(0), *key_positions.stride()[:2])
    tensors = (queries, keys, query_positions, key_positions, lse, lowest, highest, out)
    numbers = (scale * math.log2(math.e), 1 / G if over_group == "mean" else 1.0, T, L, triton.cdiv(T, block_t), *strides)
    constants = {"H": H, "G": G, "D": D, "MANY": many, **reductions(over_group, over_queries)}
    column_mass_tiles[(triton.cdiv(L, tile.blocks["BLOCK_N"]), B * H)](*tensors, *numbers, **constants, **tile.blocks, **tile.options)
    return out


def checked(queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four of one type each and with a last dimension of stride 1, as the kernels read them."""
    (B, Q, T, D), (H, L) = queries.shape, keys.shape[1:3]
    assert keys.shape == (B, H, L, D) and Q % H == 0, f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} do not fit"
    assert query_positions.shape == (B, T) and key_positions.shape == (B, H, L)
    dtype = torch.promote_types(queries.dtype, keys.dtype)
    queries, keys = queries.to(dtype), keys.to(dtype)
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys, query_positions, key_positions)]
    return rows[0], rows[1], rows[2], rows[3]


def reductions(over_group: str, over_queries: str) -> dict[str, bool]:
    """Constants of the kernel; a mean over the group is a sum with a share."""
    return {"GROUP_MAX": over_group == "max", "QUERIES_MAX": over_queries == "max", "QUERIES_MEAN": over_queries == "mean"}


def num_splits(programs: int, num_tiles: int) -> int:
    """Into how many parts the keys are cut: a power of two, so that few kernels are compiled; 1 where there are programs enough."""
    wanted = min(triton.cdiv(PROGRAMS, max(programs, 1)), num_tiles, 64)
    return 1 << max(0, wanted.bit_length() - 1)


def query_spans(positions: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """[B, T] -> lowest and highest position of each tile of queries [B, tiles] int32; a tile that holds padding starts at -1."""
    beyond = -positions.shape[1] % block
    low = F.pad(positions, (0, beyond), value=NEVER.value).unflatten(1, (-1, block)).amin(-1)
    high = F.pad(positions, (0, beyond), value=-1).unflatten(1, (-1, block)).amax(-1)
    return low.int(), high.int()


def key_spans(positions: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """[B, H, L] -> lowest and highest position of each tile of slots [B, H, tiles] int32; an empty slot lies where no query sees it."""
    beyond = -positions.shape[2] % block
    tiles = F.pad(positions, (0, beyond), value=-1).unflatten(2, (-1, block))
    tiles = tiles.masked_fill(tiles < 0, NEVER.value)
    return tiles.amin(-1).int(), tiles.amax(-1).int()


def mass_tile(arch: Arch, D: int, dtype: torch.dtype, T: int, G: int, each: bool) -> Tile:
    """Of `column_mass_tiles`.  Few queries share a tile with those of the group's other heads, unless heads are reduced first (`each`)."""
    row_bytes = padded_head(D) * dtype.itemsize
    rows, slots, warps = 64, 128, 8
    if row_bytes > 512:
        rows, slots, warps = 32, 32, 4
    elif row_bytes == 512 and arch == "gfx942":
        slots, warps = 64, 4  # 8 warps have half the registers each, and spill
    elif arch == 100 and rows >= T:
        slots = 64  # more spills, by the compiler of Triton 3.6
    elif each and arch in (80, 89):
        rows = 32  # more needs every register
    block_t = min(rows, max(16, triton.next_power_of_2(T)))
    block_g = 1 if each else min(triton.next_power_of_2(G), rows // block_t)
    return Tile({"BLOCK_G": block_g, "BLOCK_T": block_t, "BLOCK_N": slots, "BLOCK_D": padded_head(D)}, warps, 2)


def lse_tile(arch: Arch, D: int, dtype: torch.dtype) -> Tile:
    """Of `row_lse_split`."""
    row_bytes = padded_head(D) * dtype.itemsize
    rows, slots, warps = (32, 32, 4) if row_bytes > 512 else (128, 64, 8)
    if row_bytes == 512 and arch == 100:
        slots = 32  # more spills
    return Tile({"BLOCK_M": rows, "BLOCK_N": slots, "BLOCK_D": padded_head(D)}, warps, 2)


def combine_tile() -> Tile:
    """Of `row_lse_combine`."""
    return Tile({"BLOCK_R": 128}, 4, 1)


STRIDES = ("stride_qb", "stride_qh", "stride_qt", "stride_kb", "stride_kh", "stride_kl")
TYPES = {
    "query_positions": "*i64",
    "key_positions": "*i32",
    "lse": "*fp32",
    "lowest": "*i32",
    "highest": "*i32",
    "out": "*fp32",
    "scale_log2": "fp32",
    "share": "fp32",
    **dict.fromkeys(("T", "L", "num_tiles", "tiles_each", *STRIDES, "stride_tb", "stride_pb", "stride_ph"), "i32"),
}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ALL = 1 << 17  # queries of a long prompt


def entries(arch: Arch) -> list[Entry]:
    """What the launchers above compile."""
    bf16, fp32 = torch.bfloat16, torch.float32
    plain = [(ALL, bf16, 128, 4), (ALL, bf16, 64, 3), (ALL, bf16, 256, 4), (ALL, fp32, 128, 4), (ALL, fp32, 256, 4)]
    found = [mass_entry(arch, *case, "sum", "sum") for case in plain]
    for dtype, D, G, over_queries in ((bf16, 128, 4, "sum"), (bf16, 256, 4, "sum"), (fp32, 128, 3, "sum"), (bf16, 128, 4, "max")):
        found.append(mass_entry(arch, ALL, dtype, D, G, "max", over_queries))
    found += [mass_entry(arch, T, bf16, 128, 4, "mean", "mean") for T in (1, 32, 64)]
    found += [mass_entry(arch, 32, bf16, 80, 7, "mean", "mean"), mass_entry(arch, 32, fp32, 64, 3, "mean", "mean")]
    shapes = [(ALL, bf16, 128, 4), (32, bf16, 128, 4), (32, bf16, 80, 7), (32, bf16, 256, 4), (ALL, fp32, 128, 4), (32, fp32, 256, 4)]
    return found + [lse_entry(arch, *shape) for shape in shapes] + [combine_entry()]


def mass_entry(arch: Arch, T: int, dtype: torch.dtype, D: int, G: int, over_group: str, over_queries: str) -> Entry:
    """One of `column_mass_tiles`; the queries of its loop come out of the level-2 cache."""
    tile = mass_tile(arch, D, dtype, T, G, each=(over_group == "max") != (over_queries == "max"))
    types = {"queries": f"*{NAMES[dtype]}", "keys": f"*{NAMES[dtype]}", **TYPES}
    del types["tiles_each"]
    many = tile.blocks["BLOCK_T"] < T
    constants = {"H": 8, "G": G, "D": D, "MANY": many, **reductions(over_group, over_queries)}
    elements = tile.blocks["BLOCK_G"] * tile.blocks["BLOCK_T"] * tile.blocks["BLOCK_N"]
    loop = Loop(flops=2 * elements * D, exps=elements) if many and dtype == torch.bfloat16 and D == 128 else None
    label = f"{'all' if many else T} queries {NAMES[dtype]} D={D} G={G}"
    if "max" in (over_group, over_queries):
        label += f", {over_group} over group, {over_queries} over queries"
    return Entry(column_mass_tiles, label, types, constants, tile, STRIDES, loop)


def lse_entry(arch: Arch, T: int, dtype: torch.dtype, D: int, G: int) -> Entry:
    """One of `row_lse_split`."""
    tile = lse_tile(arch, D, dtype)
    types = {"queries": f"*{NAMES[dtype]}", "keys": f"*{NAMES[dtype]}", **TYPES}
    del types["lse"], types["share"]
    many = tile.blocks["BLOCK_M"] < T
    label = f"{'all' if many else T} queries {NAMES[dtype]} D={D} G={G}"
    block_m, block_n = tile.blocks["BLOCK_M"], tile.blocks["BLOCK_N"]
    loop = Loop(bytes=0 if many else block_n * D * 2, flops=2 * block_m * block_n * D, exps=block_m * block_n)
    constants = {"H": 8, "G": G, "D": D, "MANY": many}
    return Entry(row_lse_split, label, types, constants, tile, STRIDES, loop if dtype == torch.bfloat16 and D == 128 else None)


def combine_entry() -> Entry:
    """The one of `row_lse_combine`."""
    types = {"parts": "*fp32", "out": "*fp32", "num_rows": "i32"}
    return Entry(row_lse_combine, "16 splits", types, {"SPLITS": 16}, combine_tile())
