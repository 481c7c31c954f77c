"""Eviction by whole pages: the pages that stay close up in a second table, the ids of the others come out in a list."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels.entry import Arch, Entry, Tile


def page_evict(table: Tensor, lengths: Tensor, keep_pages: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table, lengths, keep_pages = table.contiguous(), lengths.contiguous(), keep_pages.contiguous()
    (B, H, pages), columns = table.shape, keep_pages.shape[-1]
    closed, new_lengths = torch.empty_like(table), torch.empty_like(lengths)
    counts = torch.empty(B, H, dtype=torch.int64, device=table.device)
    given_up = torch.full((table.numel(),), -1, dtype=table.dtype, device=table.device)
    if B * H:
        launch = tile()
        settings = {**launch.blocks, **launch.options}
        page_count[B * H,](table, keep_pages, counts, pages, columns, **settings)
        ends = counts.flatten().cumsum(0)  # each head lists its pages behind those of the heads before it: no atomics
        page_close_up[B * H,](
            table, lengths, keep_pages, counts, ends, closed, new_lengths, given_up, pages, columns, P=page_size, **settings
        )
    return closed, new_lengths, given_up, counts


@triton.jit(do_not_specialize=["pages", "columns"])
def page_count(table, keep, counts, pages, columns, BLOCK_N: tl.constexpr):
    # grid (B * H,): how many pages a head gives up
    head = tl.program_id(0).to(tl.int64)
    gone = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, pages, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        owned = tl.load(table + head * pages + column, mask=column < pages, other=-1) >= 0
        kept = tl.load(keep + head * columns + column, mask=column < columns, other=0) != 0
        gone += (owned & (kept == 0)).to(tl.int32)
    tl.store(counts + head, tl.sum(gone, 0).to(tl.int64))


@triton.jit(do_not_specialize=["pages", "columns"])
def page_close_up(
    table,
    lengths,
    keep,
    counts,
    ends,
    closed,
    new_lengths,
    given_up,
    pages,
    columns,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # grid (B * H,): writes a second table, since in place one warp could read what another has overwritten
    head = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + head)
    listed = tl.load(ends + head) - tl.load(counts + head)
    stay = 0
    tokens = tl.zeros([BLOCK_N], tl.int64)
    for start in range(0, pages, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        page = tl.load(table + head * pages + column, mask=column < pages, other=-1)
        kept = (tl.load(keep + head * columns + column, mask=column < columns, other=0) != 0) & (page >= 0)
        gone = (page >= 0) & (kept == 0)
        rank = tl.cumsum(kept.to(tl.int32), 0)
        tl.store(closed + head * pages + stay + rank - 1, page, mask=kept)
        place = tl.cumsum(gone.to(tl.int32), 0)
        tl.store(given_up + listed + place - 1, page, mask=gone)
        tokens += tl.where(kept, tl.minimum(tl.maximum(length - column * P, 0), P), 0)
        stay += tl.sum(kept.to(tl.int32), 0)
        listed += tl.sum(gone.to(tl.int32), 0)
    for start in range(stay, pages, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        tl.store(closed + head * pages + column, tl.full([BLOCK_N], -1, tl.int32), mask=column < pages)
    tl.store(new_lengths + head, tl.sum(tokens, 0).to(new_lengths.dtype.element_ty))


def tile() -> Tile:
    return Tile({"BLOCK_N": 1024}, warps=4, stages=1)


def entries(arch: Arch) -> list[Entry]:
    types = {"table": "*i32", "keep": "*i1", "counts": "*i64", "pages": "i32", "columns": "i32"}
    closing = types | {"lengths": "*i64", "ends": "*i64", "closed": "*i32", "new_lengths": "*i64", "given_up": "*i32"}
    short = closing | {"lengths": "*i32", "new_lengths": "*i32"}
    return [
        Entry(page_count, "", types, {}, tile()),
        Entry(page_close_up, "i64 P=16", closing, {"P": 16}, tile()),
        Entry(page_close_up, "i32 P=16", short, {"P": 16}, tile()),
    ]
