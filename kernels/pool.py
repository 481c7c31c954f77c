"""Pooling of scores over neighbouring slots, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels.entry import Arch, Entry, Tile
from learnkv.kernels.reference import check_pooling


@triton.jit(do_not_specialize=["L", "stride_pb", "stride_ph"])
def pool_tiles(
    mass, positions, out, L, stride_pb, stride_ph, H: tl.constexpr, WIDTH: tl.constexpr, MAX: tl.constexpr, BLOCK_L: tl.constexpr
):
    """Grid (slot tiles, B * H): out[n] of the filled slots n - WIDTH // 2 .. n + WIDTH // 2; neighbours in other tiles are read again."""
    bh = tl.program_id(1).to(tl.int64)
    held = positions + bh // H * stride_pb + bh % H * stride_ph
    n = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)  # [BLOCK_L]
    pooled = tl.full([BLOCK_L], float("-inf") if MAX else 0.0, tl.float32)
    count = tl.zeros([BLOCK_L], tl.float32)
    for step in range(WIDTH):
        other = n + step - WIDTH // 2
        filled = tl.load(held + other, mask=(other >= 0) & (other < L), other=-1) >= 0
        value = tl.load(mass + bh * L + other, mask=filled, other=float("-inf") if MAX else 0.0)
        pooled = tl.maximum(pooled, value) if MAX else pooled + value
        count += filled.to(tl.float32)
    filled = tl.load(held + n, mask=n < L, other=-1) >= 0
    pooled = pooled if MAX else pooled / tl.maximum(count, 1.0)
    tl.store(out + bh * L + n, tl.where(filled, pooled, 0.0), mask=n < L)


def pool(mass: Tensor, positions: Tensor, *, kernel_size: int, pooling: str) -> Tensor:
    """`reference.pool`."""
    check_pooling(kernel_size, pooling)
    B, H, L = mass.shape
    assert positions.shape == mass.shape, f"mass {tuple(mass.shape)} and positions {tuple(positions.shape)} do not fit"
    mass = mass.float().contiguous()
    positions = positions if positions.stride(-1) == 1 else positions.contiguous()
    out = torch.empty_like(mass)
    if out.numel():
        tile = pool_tile()
        constants = {"H": H, "WIDTH": kernel_size, "MAX": pooling == "max"}
        grid = (triton.cdiv(L, tile.blocks["BLOCK_L"]), B * H)
        pool_tiles[grid](mass, positions, out, L, *positions.stride()[:2], **constants, **tile.blocks, **tile.options)
    return out


def pool_tile() -> Tile:
    """Of `pool_tiles`."""
    return Tile({"BLOCK_L": 512}, 4, 2)


def entries(arch: Arch) -> list[Entry]:
    """What the launcher above compiles."""
    types = {"mass": "*fp32", "positions": "*i32", "out": "*fp32", "L": "i32", "stride_pb": "i32", "stride_ph": "i32"}
    kinds = [(7, True), (5, False), (63, True)]
    constants = [{"H": 8, "WIDTH": width, "MAX": largest} for width, largest in kinds]
    labels = [f"{'max' if largest else 'mean'} of {width}" for width, largest in kinds]
    return [Entry(pool_tiles, label, types, chosen, pool_tile()) for label, chosen in zip(labels, constants, strict=True)]
