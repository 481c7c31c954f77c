"""Dropping slots: in place, where slots from behind fill the holes, or as a copy to other pages, where their order stays."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels.entry import Arch, Entry, Tile, arch_of


@triton.jit
def rows_of(table, head, slot, pages, mask, P: tl.constexpr):
    """[BLOCK] int64 rows of the flattened pages in which these slots of a head lie."""
    page = tl.load(table + head * pages + slot // P, mask=mask, other=0).to(tl.int64)
    return page * P + slot % P


@triton.jit
def total(counts, start, stop, BLOCK_T: tl.constexpr):
    """int32 sum of counts[start] .. counts[stop - 1]."""
    found = tl.full([], 0, tl.int32)
    for first in range(start, stop, BLOCK_T):
        tile = first + tl.arange(0, BLOCK_T)
        found += tl.sum(tl.load(counts + tile, mask=tile < stop, other=0), 0)
    return found


@triton.jit(do_not_specialize=["L", "tiles"])
def count_kept(keep, lengths, counts, L, tiles, BLOCK_L: tl.constexpr):
    """How many slots of each tile stay: counts [heads, tiles] int32.  grid (heads * tiles,)"""
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    slot = tile * BLOCK_L + tl.arange(0, BLOCK_L)
    kept = tl.load(keep + head * L + slot, mask=slot < tl.minimum(tl.load(lengths + head), L), other=0) != 0
    tl.store(counts + head * tiles + tile, tl.sum(kept.to(tl.int32), 0))


@triton.jit(do_not_specialize=["L", "tiles", "width"])
def list_moves(keep, lengths, counts, holes, movers, new_lengths, moves, L, tiles, width, BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr):
    """The holes below each head's new length and the slots that fill them, both ascending.  grid (heads * tiles,)

    holes, movers  [heads, width] int32, as many of them as `moves` [heads] int32 says
    """
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    counts += head * tiles
    before = total(counts, 0, tile, BLOCK_T)
    new = before + total(counts, tile, tiles, BLOCK_T)
    length = tl.minimum(tl.load(lengths + head), L)
    slot = tile * BLOCK_L + tl.arange(0, BLOCK_L)
    kept = tl.load(keep + head * L + slot, mask=slot < length, other=0) != 0  # [BLOCK_L]
    edge = new // BLOCK_L  # the tile in which the new length lies
    first = edge * BLOCK_L + tl.arange(0, BLOCK_L)
    below = tl.load(keep + head * L + first, mask=(first < new) & (first < length), other=0) != 0
    staying = total(counts, 0, edge, BLOCK_T) + tl.sum(below.to(tl.int32), 0)  # slots kept where they are
    rank = before + tl.cumsum(kept.to(tl.int32), 0)  # kept slots up to this one
    hole = (slot < new) & (kept == 0)
    mover = (slot >= new) & kept
    tl.store(holes + head * width + slot - rank, slot, mask=hole)
    tl.store(movers + head * width + rank - 1 - staying, slot, mask=mover)
    if tile == 0:
        tl.store(new_lengths + head, new.to(new_lengths.dtype.element_ty))
        tl.store(moves + head, new - staying)


@triton.jit(do_not_specialize=["L", "tiles"])
def list_kept(keep, lengths, counts, sources, new_lengths, L, tiles, BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr):
    """The slots that stay, ascending: sources [heads, L] int32, as many as new_lengths [heads] says.  grid (heads * tiles,)"""
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    counts += head * tiles
    before = total(counts, 0, tile, BLOCK_T)
    slot = tile * BLOCK_L + tl.arange(0, BLOCK_L)
    kept = tl.load(keep + head * L + slot, mask=slot < tl.minimum(tl.load(lengths + head), L), other=0) != 0
    tl.store(sources + head * L + before + tl.cumsum(kept.to(tl.int32), 0) - 1, slot, mask=kept)
    if tile == 0:
        tl.store(new_lengths + head, (before + total(counts, 0, tiles, BLOCK_T)).to(new_lengths.dtype.element_ty))


@triton.jit(do_not_specialize=["tiles", "pages", "width"])
def move_rows(
    keys,
    values,
    positions,
    memory,
    table,
    holes,
    movers,
    moves,
    tiles,
    pages,
    width,
    memory_stride,
    P: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Movers into holes.  Sources are at the new length or above, targets below it: no program reads what another writes.

    grid (heads * tiles,)
    """
    head = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles) * BLOCK_M
    stop = tl.load(moves + head)
    if start < stop:
        move = start + tl.arange(0, BLOCK_M)
        real = move < stop
        mover = tl.load(movers + head * width + move, mask=real, other=0)
        hole = tl.load(holes + head * width + move, mask=real, other=0)
        source = rows_of(table, head, mover, pages, real, P)  # [BLOCK_M]
        target = rows_of(table, head, hole, pages, real, P)
        d = tl.arange(0, BLOCK_D)
        wide = real[:, None] & (d < D)[None, :]  # [BLOCK_M, BLOCK_D]
        key = tl.load(keys + source[:, None] * D + d[None, :], mask=wide, other=0.0)
        value = tl.load(values + source[:, None] * D + d[None, :], mask=wide, other=0.0)
        position = tl.load(positions + source, mask=real, other=-1)
        tl.store(keys + target[:, None] * D + d[None, :], key, mask=wide)
        tl.store(values + target[:, None] * D + d[None, :], value, mask=wide)
        tl.store(positions + target, position, mask=real)
        if C > 0:
            c = tl.arange(0, BLOCK_C)
            narrow = real[:, None] & (c < C)[None, :]  # [BLOCK_M, BLOCK_C]
            floats = tl.load(memory + source[:, None] * memory_stride + c[None, :], mask=narrow, other=0.0)
            tl.store(memory + target[:, None] * memory_stride + c[None, :], floats, mask=narrow)


@triton.jit(do_not_specialize=["L", "tiles", "pages"])
def clear_stale(
    values,
    positions,
    memory,
    table,
    lengths,
    new_lengths,
    L,
    tiles,
    pages,
    memory_stride,
    P: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Slots from each head's new length to its old one hold nothing.  A launch of its own, after the last read of them.

    grid (heads * tiles,)
    """
    head = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles) * BLOCK_M
    new = tl.load(new_lengths + head)
    length = tl.minimum(tl.load(lengths + head), L)
    if (start < length) & (start + BLOCK_M > new):
        slot = start + tl.arange(0, BLOCK_M)
        stale = (slot >= new) & (slot < length)
        row = rows_of(table, head, slot, pages, stale, P)  # [BLOCK_M]
        d = tl.arange(0, BLOCK_D)
        nothing = tl.zeros([BLOCK_M, BLOCK_D], values.dtype.element_ty)
        tl.store(values + row[:, None] * D + d[None, :], nothing, mask=stale[:, None] & (d < D)[None, :])
        tl.store(positions + row, tl.full([BLOCK_M], -1, tl.int32), mask=stale)
        if C > 0:
            c = tl.arange(0, BLOCK_C)
            zeros = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
            tl.store(memory + row[:, None] * memory_stride + c[None, :], zeros, mask=stale[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["L", "tiles", "pages", "target_pages"])
def copy_rows(
    keys,
    values,
    positions,
    memory,
    table,
    target_keys,
    target_values,
    target_positions,
    target_memory,
    target_table,
    sources,
    new_lengths,
    L,
    tiles,
    pages,
    target_pages,
    memory_stride,
    target_memory_stride,
    P: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The slots of a head that stay, to its first slots in other pages.  grid (heads * tiles,)"""
    head = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles) * BLOCK_M
    stop = tl.load(new_lengths + head)
    if start < stop:
        slot = start + tl.arange(0, BLOCK_M)
        real = slot < stop
        source = rows_of(table, head, tl.load(sources + head * L + slot, mask=real, other=0), pages, real, P)  # [BLOCK_M]
        target = rows_of(target_table, head, slot, target_pages, real, P)
        d = tl.arange(0, BLOCK_D)
        wide = real[:, None] & (d < D)[None, :]  # [BLOCK_M, BLOCK_D]
        key = tl.load(keys + source[:, None] * D + d[None, :], mask=wide, other=0.0)
        value = tl.load(values + source[:, None] * D + d[None, :], mask=wide, other=0.0)
        position = tl.load(positions + source, mask=real, other=-1)
        tl.store(target_keys + target[:, None] * D + d[None, :], key, mask=wide)
        tl.store(target_values + target[:, None] * D + d[None, :], value, mask=wide)
        tl.store(target_positions + target, position, mask=real)
        if C > 0:
            c = tl.arange(0, BLOCK_C)
            narrow = real[:, None] & (c < C)[None, :]  # [BLOCK_M, BLOCK_C]
            floats = tl.load(memory + source[:, None] * memory_stride + c[None, :], mask=narrow, other=0.0)
            tl.store(target_memory + target[:, None] * target_memory_stride + c[None, :], floats, mask=narrow)


def list_tile(arch: Arch) -> Tile:
    """`list_moves` and `list_kept`; `count_kept` without its BLOCK_T."""
    return Tile({"BLOCK_L": 1024, "BLOCK_T": 256}, warps=4, stages=1)


def count_tile(arch: Arch) -> Tile:
    return Tile({"BLOCK_L": list_tile(arch).blocks["BLOCK_L"]}, warps=4, stages=1)


def row_tile(arch: Arch, D: int, C: int) -> Tile:
    """`move_rows`, `clear_stale` and `copy_rows`: 4,096 numbers of a key at a time."""
    block = triton.next_power_of_2(D)
    rows = max(8, min(64, 4096 // block))
    return Tile({"BLOCK_M": rows, "BLOCK_D": block, "BLOCK_C": triton.next_power_of_2(max(1, C))}, warps=4, stages=1)


def row_stride(memory: Tensor) -> int:
    """Numbers from one slot's memory to the next; columns of a wider memory will do."""
    N, P, C = memory.shape
    assert C == 0 or (memory.stride(2) == 1 and (N == 1 or memory.stride(0) == P * memory.stride(1))), "memory must be columns"
    return memory.stride(1)


def check(key_pages: Tensor, value_pages: Tensor, position_pages: Tensor) -> None:
    assert key_pages.shape == value_pages.shape, f"keys {tuple(key_pages.shape)}, values {tuple(value_pages.shape)}"
    assert all(x.is_contiguous() for x in (key_pages, value_pages, position_pages)), "pages are written in place: they must be contiguous"
    assert position_pages.dtype == torch.int32, f"{position_pages.dtype} positions"


def compact(
    key_pages: Tensor, value_pages: Tensor, position_pages: Tensor, memory_pages: Tensor, table: Tensor, lengths: Tensor, keep: Tensor
) -> Tensor:
    """As reference.compact: four launches, asks the device nothing."""
    check(key_pages, value_pages, position_pages)
    (_, P, D), C, (B, H, L) = key_pages.shape, memory_pages.shape[-1], keep.shape
    new_lengths = torch.zeros_like(lengths, memory_format=torch.contiguous_format)
    if not keep.numel():
        return new_lengths
    table, lengths, flags, arch = table.contiguous(), lengths.contiguous(), keep.contiguous().view(torch.int8), arch_of(key_pages)
    counting, listing, moving = count_tile(arch), list_tile(arch), row_tile(arch, D, C)
    tiles, heads, width = triton.cdiv(L, counting.blocks["BLOCK_L"]), B * H, max(1, L // 2)  # no more holes than slots to fill them
    counts, holes, movers, moves = (torch.empty(heads, n, dtype=torch.int32, device=keep.device) for n in (tiles, width, width, 1))
    count_kept[(heads * tiles,)](flags, lengths, counts, L, tiles, **counting.blocks, **counting.options)
    lists = (flags, lengths, counts, holes, movers, new_lengths, moves, L, tiles, width)
    list_moves[(heads * tiles,)](*lists, **listing.blocks, **listing.options)
    shape, stride = {"P": P, "D": D, "C": C, **moving.blocks, **moving.options}, row_stride(memory_pages)
    tiles, pools = triton.cdiv(width, moving.blocks["BLOCK_M"]), (value_pages, position_pages, memory_pages, table)
    move_rows[(heads * tiles,)](key_pages, *pools, holes, movers, moves, tiles, table.shape[-1], width, stride, **shape)
    tiles = triton.cdiv(L, moving.blocks["BLOCK_M"])
    clear_stale[(heads * tiles,)](*pools, lengths, new_lengths, L, tiles, table.shape[-1], stride, **shape)
    return new_lengths


def copy_kept(
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    memory_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    keep: Tensor,
    target_key_pages: Tensor,
    target_value_pages: Tensor,
    target_position_pages: Tensor,
    target_memory_pages: Tensor,
    target_table: Tensor,
) -> Tensor:
    """As reference.copy_kept: three launches, asks the device nothing."""
    sources, targets = (key_pages, value_pages, position_pages), (target_key_pages, target_value_pages, target_position_pages)
    check(*sources)
    check(*targets)
    for source, target in zip((*sources, memory_pages), (*targets, target_memory_pages), strict=True):
        assert source.shape[1:] == target.shape[1:] and source.dtype == target.dtype, f"{source.dtype} {source.shape} to {target.shape}"
    (_, P, D), C, (B, H, L) = key_pages.shape, memory_pages.shape[-1], keep.shape
    new_lengths = torch.zeros_like(lengths, memory_format=torch.contiguous_format)
    if not keep.numel():
        return new_lengths
    table, target_table, lengths = table.contiguous(), target_table.contiguous(), lengths.contiguous()
    flags, arch, heads = keep.contiguous().view(torch.int8), arch_of(key_pages), B * H
    counting, listing, copying = count_tile(arch), list_tile(arch), row_tile(arch, D, C)
    tiles = triton.cdiv(L, counting.blocks["BLOCK_L"])
    counts, kept = (torch.empty(heads, n, dtype=torch.int32, device=keep.device) for n in (tiles, L))
    count_kept[(heads * tiles,)](flags, lengths, counts, L, tiles, **counting.blocks, **counting.options)
    list_kept[(heads * tiles,)](flags, lengths, counts, kept, new_lengths, L, tiles, **listing.blocks, **listing.options)
    tiles, strides = triton.cdiv(L, copying.blocks["BLOCK_M"]), (row_stride(memory_pages), row_stride(target_memory_pages))
    pools = (*sources, memory_pages, table, *targets, target_memory_pages, target_table)
    sizes = (L, tiles, table.shape[-1], target_table.shape[-1], *strides)
    copy_rows[(heads * tiles,)](*pools, kept, new_lengths, *sizes, P=P, D=D, C=C, **copying.blocks, **copying.options)
    return new_lengths


def entries(arch: Arch) -> list[Entry]:
    """What the launchers above can launch."""
    types = {"keep": "*i8", "lengths": "*i64", "new_lengths": "*i64", "positions": "*i32", "target_positions": "*i32"}
    types |= {name: "*i32" for name in ("counts", "holes", "movers", "moves", "sources", "table", "target_table")}
    types |= {"memory": "*fp32", "target_memory": "*fp32"}
    types |= {name: "i32" for name in ("L", "tiles", "width", "pages", "target_pages", "memory_stride", "target_memory_stride")}
    found = [Entry(count_kept, "any L", types, {}, count_tile(arch))]
    found += [Entry(kernel, "any L", types, {}, list_tile(arch)) for kernel in (list_moves, list_kept)]
    for name, D, C in (("bf16", 128, 1), ("bf16", 64, 0), ("bf16", 80, 3), ("bf16", 256, 1), ("fp32", 128, 1)):
        pools = {pool: f"*{name}" for pool in ("keys", "values", "target_keys", "target_values")}
        constants, shape = {"P": 16, "D": D, "C": C}, row_tile(arch, D, C)
        found += [Entry(kernel, f"{name} D={D} C={C}", types | pools, constants, shape) for kernel in (move_rows, clear_stale, copy_rows)]
    return found
