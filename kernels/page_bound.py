"""Quest's upper bound of the logits of a page (arXiv:2406.10774): its least and greatest keys, and what a query can reach with them."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels.entry import Arch, Entry, Loop, Tile, padded_head
from learnkv.kernels.reference import check_choice


def page_minmax(key_pages: Tensor, position_pages: Tensor) -> tuple[Tensor, Tensor]:
    key_pages, position_pages = key_pages.contiguous(), position_pages.contiguous()
    N, P, D = key_pages.shape
    minimum, maximum = key_pages.new_empty(N, D), key_pages.new_empty(N, D)
    if N:
        launch = minmax_tile(D, P)
        page_extremes[N,](key_pages, position_pages, minimum, maximum, P, D=D, **launch.blocks, **launch.options)
    return minimum, maximum


def page_bound(queries: Tensor, minimum: Tensor, maximum: Tensor, table: Tensor, *, reduce: str = "max") -> Tensor:
    check_choice("page_bound", "reduce", reduce, ("max", "sum"))
    queries = (queries if queries.dim() == 4 else queries[:, :, None]).contiguous()
    (B, H, pages), (Q, T, D) = table.shape, queries.shape[1:]
    out = torch.empty(B, H, pages, dtype=torch.float32, device=table.device)
    launch = bound_tile(D, Q // H, maximum.element_size())
    grid = (triton.cdiv(pages, launch.blocks["BLOCK_N"]), B * H)
    if out.numel():
        page_reach[grid](
            queries,
            minimum.contiguous(),
            maximum.contiguous(),
            table.contiguous(),
            out,
            T,
            pages,
            G=Q // H,
            D=D,
            REDUCE=reduce,
            **launch.blocks,
            **launch.options,
        )
    return out


@triton.jit
def page_extremes(keys, positions, minimum, maximum, P, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    # grid (N,)
    page = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    low = tl.full([BLOCK_D], float("inf"), tl.float32)
    high = tl.full([BLOCK_D], float("-inf"), tl.float32)
    for start in range(0, P, BLOCK_P):
        row = start + tl.arange(0, BLOCK_P)
        filled = tl.load(positions + page * P + row, mask=row < P, other=-1) >= 0  # [BLOCK_P]
        inside = filled[:, None] & (channel < D)[None, :]
        key = tl.load(keys + (page * P + row)[:, None] * D + channel[None, :], mask=inside, other=0.0).to(tl.float32)  # [BLOCK_P, BLOCK_D]
        low = tl.minimum(low, tl.min(tl.where(inside, key, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(inside, key, float("-inf")), 0))
    tl.store(minimum + page * D + channel, low.to(minimum.dtype.element_ty), mask=channel < D)
    tl.store(maximum + page * D + channel, high.to(maximum.dtype.element_ty), mask=channel < D)


@triton.jit(do_not_specialize=["pages"])
def page_reach(
    queries,
    minimum,
    maximum,
    table,
    out,
    T,
    pages,
    G: tl.constexpr,
    D: tl.constexpr,
    REDUCE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid (ceil(pages / BLOCK_N), B * H): sum_d max(q_d * min_d, q_d * max_d) as the two products relu(q) . max - relu(-q) . min
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    page = tl.load(table + head * pages + column, mask=column < pages, other=-1).to(tl.int64)  # [BLOCK_N]
    channel = tl.arange(0, BLOCK_D)
    inside = (page >= 0)[:, None] & (channel < D)[None, :]
    place = page[:, None] * D + channel[None, :]
    low = tl.load(minimum + place, mask=inside, other=0.0)  # [BLOCK_N, BLOCK_D]
    high = tl.load(maximum + place, mask=inside, other=0.0)
    # a page without tokens reaches -inf, or NaN where a query has a 0: Triton versions differ in what a maximum makes of that
    present = tl.load(maximum + page * D, mask=page >= 0, other=float("-inf")).to(tl.float32) > float("-inf")
    member = tl.arange(0, BLOCK_G)
    bound = tl.full([BLOCK_N, BLOCK_G], float("-inf"), tl.float32)
    for t in range(0, T):
        rows = ((head * G + member) * T + t)[:, None] * D + channel[None, :]
        q = tl.load(queries + rows, mask=(member < G)[:, None] & (channel < D)[None, :], other=0.0).to(tl.float32)  # [BLOCK_G, BLOCK_D]
        reach = tl.dot(high, tl.trans(tl.maximum(q, 0.0).to(high.dtype)), input_precision="tf32")
        reach = tl.dot(low, tl.trans(tl.minimum(q, 0.0).to(low.dtype)), reach, input_precision="tf32")
        bound = tl.maximum(bound, reach)
    if REDUCE == "max":
        best = tl.max(tl.where((member < G)[None, :], bound, float("-inf")), 1)  # [BLOCK_N]
    else:
        best = tl.sum(tl.where((member < G)[None, :], bound, 0.0), 1)
    tl.store(out + head * pages + column, tl.where(present, best, float("-inf")), mask=column < pages)


def minmax_tile(D: int, P: int) -> Tile:
    """A page of 16 keys is one warp's work; several slots of a longer page go at once."""
    block_d = padded_head(D)
    block_p = min(triton.next_power_of_2(P), max(16, 4096 // block_d))
    return Tile({"BLOCK_P": block_p, "BLOCK_D": block_d}, warps=1 if block_p * block_d <= 2048 else 4, stages=2)


def bound_tile(D: int, G: int, itemsize: int) -> Tile:
    """Least and greatest keys of a program fill 32 KiB."""
    block_d = padded_head(D)
    block_n = min(64, max(16, (16384 // (block_d * itemsize))))
    return Tile({"BLOCK_N": block_n, "BLOCK_G": max(16, triton.next_power_of_2(G)), "BLOCK_D": block_d}, warps=4, stages=1)


def entries(arch: Arch) -> list[Entry]:
    return [*minmax_entries(), *bound_entries()]


def minmax_entries() -> list[Entry]:
    found = []
    for dtype, D, P in (("bf16", 64, 16), ("bf16", 128, 16), ("bf16", 256, 16), ("fp32", 80, 16), ("fp16", 128, 4096)):
        types = {"keys": f"*{dtype}", "positions": "*i32", "minimum": f"*{dtype}", "maximum": f"*{dtype}", "P": "i32"}
        launch = minmax_tile(D, P)
        loop = Loop(bytes=launch.blocks["BLOCK_P"] * (D * (4 if dtype == "fp32" else 2) + 4)) if (dtype, D) == ("bf16", 128) else None
        found.append(Entry(page_extremes, f"{dtype} D={D} P={P}", types, {"D": D}, launch, aligned=("P",), loop=loop))
    return found


def bound_entries() -> list[Entry]:
    found = []
    cases = [("bf16", D, 4, "max") for D in (64, 80, 128, 256)]
    for dtype, D, G, reduce in (*cases, ("bf16", 128, 7, "sum"), ("fp16", 128, 4, "max"), ("fp32", 128, 3, "max"), ("fp32", 256, 4, "max")):
        types = {name: f"*{dtype}" for name in ("queries", "minimum", "maximum")} | {"table": "*i32", "out": "*fp32", "pages": "i32"}
        constants = {"G": G, "D": D, "REDUCE": reduce, "T": 1}  # a launch makes a constant of an integer that is 1
        found.append(Entry(page_reach, f"{dtype} D={D} G={G} {reduce}", types, constants, bound_tile(D, G, 4 if dtype == "fp32" else 2)))
    last = found[2]
    several = {name: value for name, value in last.constants.items() if name != "T"}
    return [*found, replace(last, label=f"{last.label} several", types={**last.types, "T": "i32"}, constants=several)]
