"""The slots of every head side by side: the padded view that scorers look at."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels.entry import Arch, Entry, Tile, arch_of


@triton.jit(do_not_specialize=["L", "tiles", "num_pages", "P"])
def gather_rows(
    pages,
    table,
    lengths,
    out,
    L,
    tiles,
    num_pages,
    P,
    page_stride,
    row_stride,
    X: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """A tile of one head's slots, 0 from its length on.  grid (heads * tiles,)"""
    head = (tl.program_id(0) // tiles).to(tl.int64)
    slot = (tl.program_id(0) % tiles) * BLOCK_L + tl.arange(0, BLOCK_L)
    filled = slot < tl.load(lengths + head)
    page = tl.load(table + head * num_pages + slot // P, mask=filled, other=0).to(tl.int64)
    row = page * page_stride + (slot % P).to(tl.int64) * row_stride  # [BLOCK_L]
    x = tl.arange(0, BLOCK_X)
    found = tl.load(pages + row[:, None] + x[None, :], mask=filled[:, None] & (x < X)[None, :], other=0)  # [BLOCK_L, BLOCK_X]
    place = (head * L + slot)[:, None] * X + x[None, :]
    tl.store(out + place, found, mask=(slot < L)[:, None] & (x < X)[None, :])


def tile(arch: Arch, X: int) -> Tile:
    """4,096 numbers at a time, 1,024 where a slot has one."""
    block = triton.next_power_of_2(X)
    return Tile({"BLOCK_L": max(8, min(1024, 4096 // block)), "BLOCK_X": block}, warps=4, stages=1)


def gather_pages(pages: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """As reference.gather_pages; asks the device for the longest head, by which its result is shaped."""
    (_, P, X), (B, H, num_pages) = pages.shape, table.shape
    L = int(lengths.max()) if lengths.numel() else 0
    out = torch.empty(B, H, L, X, dtype=pages.dtype, device=pages.device)
    if not out.numel():
        return out
    pages = pages if pages.stride(2) == 1 or X == 1 else pages.contiguous()
    shape = tile(arch_of(pages), X)
    tiles = triton.cdiv(L, shape.blocks["BLOCK_L"])
    sizes = (L, tiles, num_pages, P, pages.stride(0), pages.stride(1))
    gather_rows[(B * H * tiles,)](pages, table.contiguous(), lengths.contiguous(), out, *sizes, X=X, **shape.blocks, **shape.options)
    return out


def entries(arch: Arch) -> list[Entry]:
    """What the launcher above can launch."""
    types = {"table": "*i32", "lengths": "*i64"} | {name: "i32" for name in ("L", "tiles", "num_pages", "P", "page_stride", "row_stride")}
    found = []
    for name, X in (("bf16", 128), ("bf16", 64), ("bf16", 80), ("bf16", 256), ("fp32", 128), ("fp32", 3), ("i32", 1)):
        aligned = ("page_stride", "row_stride") if X % 16 == 0 else ()
        pool = {"pages": f"*{name}", "out": f"*{name}"}
        found.append(Entry(gather_rows, f"{name} X={X}", types | pool, {"X": X}, tile(arch, X), aligned=aligned))
    return found
