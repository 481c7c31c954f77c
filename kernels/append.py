"""New tokens after what each head holds, in the pages it has."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels.compact import check, row_tile, rows_of
from learnkv.kernels.entry import Arch, Entry, Tile, arch_of


@triton.jit(do_not_specialize=["tiles", "T", "pages"])
def append_rows(
    key_pages,
    value_pages,
    position_pages,
    table,
    lengths,
    keys,
    values,
    positions,
    ranks,
    slots,
    tiles,
    T,
    pages,
    key_b,
    key_h,
    key_t,
    value_b,
    value_h,
    value_t,
    H: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    RANKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A tile of tokens of one head.  grid (B * H * tiles,)

    ranks  [B, T] int64 real tokens of the row up to this one; read where RANKED, else there is one token a row
    """
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b = head // H
    token = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = token < T
    position = tl.load(positions + b * T + token, mask=inside, other=-1)
    real = position >= 0  # [BLOCK_M]
    slot = tl.load(lengths + head).to(tl.int64) + tl.zeros([BLOCK_M], tl.int64)
    if RANKED:
        slot += tl.load(ranks + b * T + token, mask=inside, other=1) - 1
    row = rows_of(table, head, slot, pages, real, P)
    d = tl.arange(0, BLOCK_D)
    wide = real[:, None] & (d < D)[None, :]  # [BLOCK_M, BLOCK_D]
    key = tl.load(keys + b * key_b + (head % H) * key_h + token[:, None].to(tl.int64) * key_t + d[None, :], mask=wide, other=0.0)
    value = tl.load(values + b * value_b + (head % H) * value_h + token[:, None].to(tl.int64) * value_t + d[None, :], mask=wide, other=0.0)
    tl.store(key_pages + row[:, None] * D + d[None, :], key, mask=wide)
    tl.store(value_pages + row[:, None] * D + d[None, :], value, mask=wide)
    tl.store(position_pages + row, position.to(tl.int32), mask=real)
    tl.store(slots + head * T + token, tl.where(real, slot, -1), mask=inside)


def tile(arch: Arch, D: int, T: int) -> Tile:
    """One row's token while decoding, else as many as fill a tile."""
    blocks = dict(row_tile(arch, D, 0).blocks)
    del blocks["BLOCK_C"]
    return Tile({**blocks, "BLOCK_M": 1}, warps=1, stages=1) if T == 1 else Tile(blocks, warps=4, stages=1)


def append_kv(
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    first: Tensor | None = None,
    padded: bool = True,
) -> Tensor:
    """As reference.append_kv: one launch for one token a row, else another for their ranks; asks the device nothing."""
    check(key_pages, value_pages, position_pages)
    assert keys.dtype == key_pages.dtype and values.dtype == value_pages.dtype, f"{keys.dtype} keys to {key_pages.dtype} pages"
    (B, H, T, D), P = keys.shape, key_pages.shape[1]
    slots = torch.empty(B, H, T, dtype=torch.int64, device=keys.device)
    if not slots.numel():
        return slots
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
    table, lengths, positions = table.contiguous(), lengths.contiguous(), positions.contiguous()
    ranks = (positions >= 0).cumsum(-1) if T > 1 else slots
    shape = tile(arch_of(keys), D, T)
    tiles = triton.cdiv(T, shape.blocks["BLOCK_M"])
    pools = (key_pages, value_pages, position_pages, table, lengths)
    sizes = (tiles, T, table.shape[-1], *keys.stride()[:3], *values.stride()[:3])
    constants = {"H": H, "P": P, "D": D, "RANKED": T > 1}
    append_rows[(B * H * tiles,)](*pools, keys, values, positions, ranks, slots, *sizes, **constants, **shape.blocks, **shape.options)
    return slots


def entries(arch: Arch) -> list[Entry]:
    """What the launcher above can launch."""
    types = {"position_pages": "*i32", "table": "*i32", "lengths": "*i64", "positions": "*i64", "ranks": "*i64", "slots": "*i64"}
    strides = ("key_b", "key_h", "key_t", "value_b", "value_h", "value_t")
    types |= {name: "i32" for name in ("tiles", "T", "pages", *strides)}
    found = []
    for name, D, T in (("bf16", 128, 1), ("bf16", 128, 512), ("bf16", 80, 512), ("bf16", 256, 1), ("bf16", 256, 512), ("fp32", 128, 512)):
        pools = {pool: f"*{name}" for pool in ("key_pages", "value_pages", "keys", "values")}
        constants = {"H": 8, "P": 16, "D": D, "RANKED": T > 1}
        found.append(Entry(append_rows, f"{name} D={D} T={T}", types | pools, constants, tile(arch, D, T), aligned=strides))
    return found
