"""Worth of every page from the scores of its slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels.entry import Arch, Entry, Tile
from learnkv.kernels.reference import check_choice

BLOCK = 2048  # slots of one program


def page_score(
    scores: Tensor,
    positions: Tensor,
    num_seen: Tensor,
    page_size: int,
    *,
    num_sinks: int = 0,
    num_recent: int = 0,
    reduce: str = "mean",
) -> Tensor:
    check_choice("page_score", "reduce", reduce, ("sum", "mean", "max"))
    (B, H, L), pages = scores.shape, triton.cdiv(scores.shape[-1], page_size)
    out = torch.empty(B, H, pages, dtype=torch.float32, device=scores.device)
    launch = tile(page_size)
    grid = (B * H, triton.cdiv(pages, launch.blocks["BLOCK_N"]))
    if out.numel():
        page_reduce[grid](
            scores.contiguous(),
            positions.contiguous(),
            num_seen.contiguous(),
            out,
            L,
            pages,
            num_sinks,
            num_recent,
            H=H,
            P=page_size,
            REDUCE=reduce,
            **launch.blocks,
            **launch.options,
        )
    return out


@triton.jit(do_not_specialize=["L", "pages", "num_sinks", "num_recent"])
def page_reduce(
    scores,
    positions,
    num_seen,
    out,
    L,
    pages,
    num_sinks,
    num_recent,
    H: tl.constexpr,
    P: tl.constexpr,
    REDUCE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # grid (B * H, ceil(pages / BLOCK_N))
    head = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    row = tl.arange(0, BLOCK_P)
    slot = page[:, None] * P + row[None, :]  # [BLOCK_N, BLOCK_P]
    inside = (row < P)[None, :] & (slot < L)
    position = tl.load(positions + head * L + slot, mask=inside, other=-1)
    filled = position >= 0
    score = tl.load(scores + head * L + slot, mask=filled, other=float("-inf")).to(tl.float32)
    recent = tl.load(num_seen + head // H) - num_recent
    safe = filled & ((score == float("inf")) | (position < num_sinks) | (position >= recent))
    protected = tl.max(safe.to(tl.int32), 1) > 0  # [BLOCK_N]
    count = tl.sum(filled.to(tl.int32), 1)
    worth = tl.max(score, 1) if REDUCE == "max" else tl.sum(tl.where(filled, score, 0.0), 1)
    if REDUCE == "mean":
        worth = worth / tl.maximum(count, 1).to(tl.float32)
    worth = tl.where(count > 0, worth, float("-inf"))
    tl.store(out + head * pages + page, tl.where(protected, float("inf"), worth), mask=page < pages)


def tile(page_size: int) -> Tile:
    """Pages that fill a program, one at least."""
    block = triton.next_power_of_2(page_size)
    return Tile({"BLOCK_N": max(1, BLOCK // block), "BLOCK_P": block}, warps=4 if block <= BLOCK else 8, stages=1)


def entries(arch: Arch) -> list[Entry]:
    types = {"scores": "*fp32", "positions": "*i32", "num_seen": "*i64", "out": "*fp32"}
    types |= dict.fromkeys(("L", "pages", "num_sinks", "num_recent"), "i32")
    cases = [("mean", 16), ("sum", 16), ("max", 16), ("mean", 4096)]
    return [Entry(page_reduce, f"{r} P={P}", types, {"H": 8, "P": P, "REDUCE": r}, tile(P)) for r, P in cases]
