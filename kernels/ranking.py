"""Plackett-Luce log-probabilities and the reward over all budgets, with their gradients: what ranking losses are made of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels.entry import Arch, Entry, Tile, arch_of


@triton.jit
def add_exponents(m1, s1, m2, s2):
    """Sums s1 * e^m1 + s2 * e^m2 as (greatest exponent, sum in its units): no range is too wide."""
    m = tl.maximum(m1, m2)
    unit = tl.where(m == float("-inf"), 0.0, m)
    return m, s1 * tl.exp(m1 - unit) + s2 * tl.exp(m2 - unit)


@triton.jit
def follow(decay1, sum1, decay2, sum2):
    """The recurrence x -> decay * x + sum, first by 1, then by 2."""
    return decay1 * decay2, sum1 * decay2 + sum2


@triton.jit(do_not_specialize=["n"])
def tile_lse(SCORES, PEAKS, SUMS, n, BLOCK_N: tl.constexpr):
    """(greatest score, sum in its units) of one tile of one row.  Grid: rows, tiles."""
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    scores = tl.load(SCORES + row * n + at, mask=at < n, other=float("-inf"))  # [BLOCK_N]
    peak = tl.max(scores, 0)
    total = tl.sum(tl.exp(scores - tl.where(peak == float("-inf"), 0.0, peak)), 0)
    tl.store(PEAKS + row * tiles + tile, peak)
    tl.store(SUMS + row * tiles + tile, total)


@triton.jit(do_not_specialize=["n"])
def pl_logprob_tile(SCORES, PEAKS, SUMS, OUT, n, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """Scores less the log-sum-exp from each to the row's end.  Grid: rows, tiles."""
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    peak = float("-inf")  # of the tiles after this one
    total = 0.0
    for start in range(tile + 1, tiles, BLOCK_T):
        later = start + tl.arange(0, BLOCK_T)
        peaks = tl.load(PEAKS + row * tiles + later, mask=later < tiles, other=float("-inf"))  # [BLOCK_T]
        sums = tl.load(SUMS + row * tiles + later, mask=later < tiles, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        unit = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - unit) + tl.sum(sums * tl.exp(peaks - unit), 0)
        peak = higher
    at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    scores = tl.load(SCORES + row * n + at, mask=at < n, other=float("-inf"))  # [BLOCK_N]
    filled = scores > float("-inf")
    peaks, sums = tl.associative_scan((scores, filled.to(tl.float32)), 0, add_exponents, reverse=True)
    peaks, sums = add_exponents(peaks, sums, peak, total)
    logprob = scores - tl.where(filled, peaks, 0.0) - tl.log(tl.where(filled, sums, 1.0))
    logprob = tl.where(filled, logprob, 0.0)
    tl.store(OUT + row * n + at, logprob, mask=at < n)


@triton.jit(do_not_specialize=["n"])
def tile_recurrence(LOGPROB, GRAD, DECAYS, SUMS, n, grad_row, grad_pick, BLOCK_N: tl.constexpr):
    """What one tile does to the recurrence of `pl_logprob_grad`.  Grid: rows, tiles."""
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    before = tl.load(LOGPROB + row * n + at - 1, mask=(at > 0) & (at < n), other=0.0)  # [BLOCK_N]
    grad = tl.load(GRAD + row * grad_row + at.to(tl.int64) * grad_pick, mask=at < n, other=0.0)
    decays, sums = tl.associative_scan((1 - tl.exp(before), grad), 0, follow)
    last = tl.arange(0, BLOCK_N) == BLOCK_N - 1
    tl.store(DECAYS + row * tiles + tile, tl.sum(tl.where(last, decays, 0.0), 0))
    tl.store(SUMS + row * tiles + tile, tl.sum(tl.where(last, sums, 0.0), 0))


@triton.jit(do_not_specialize=["n"])
def pl_logprob_grad(LOGPROB, GRAD, DECAYS, SUMS, OUT, n, grad_row, grad_pick, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """Gradient by the scores.  Grid: rows, tiles.

    With p_j = e^logprob_j, the share of pick j among those not picked before it, the gradient is g_j - p_j P_j, where
    P_j = g_j + (1 - p_j-1) P_j-1 is the sum over i <= j of g_i e^(lse_j - lse_i): no exponential of a score is ever taken.
    Padding has logprob 0, so p = 1, P = g and the gradient is 0 by itself.
    """
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    carry = 0.0  # P of the last pick before this tile
    for start in range(0, tile, BLOCK_T):
        earlier = start + tl.arange(0, BLOCK_T)
        decays = tl.load(DECAYS + row * tiles + earlier, mask=earlier < tile, other=1.0)  # [BLOCK_T]
        sums = tl.load(SUMS + row * tiles + earlier, mask=earlier < tile, other=0.0)
        decays, sums = tl.associative_scan((decays, sums), 0, follow)
        last = tl.arange(0, BLOCK_T) == BLOCK_T - 1
        carry = tl.sum(tl.where(last, decays * carry + sums, 0.0), 0)
    at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    logprob = tl.load(LOGPROB + row * n + at, mask=at < n, other=0.0)  # [BLOCK_N]
    before = tl.load(LOGPROB + row * n + at - 1, mask=(at > 0) & (at < n), other=0.0)
    grad = tl.load(GRAD + row * grad_row + at.to(tl.int64) * grad_pick, mask=at < n, other=0.0)
    decays, sums = tl.associative_scan((1 - tl.exp(before), grad), 0, follow)
    tl.store(OUT + row * n + at, grad - tl.exp(logprob) * (decays * carry + sums), mask=at < n)


@triton.jit(do_not_specialize=["n"])
def budget_reward_tile(UTILITY, PARTS, n, BLOCK_N: tl.constexpr):
    """One tile's share of a row's reward.  Grid: rows, tiles."""
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    utility = tl.load(UTILITY + row * n + at, mask=at < n, other=0.0).to(tl.float32)  # [BLOCK_N]
    tl.store(PARTS + row * tiles + tile, -tl.sum(utility * (at + 1).to(tl.float32), 0))


def tile(arch: Arch) -> Tile:
    """The scans' tile, whatever the architecture: eight numbers a thread."""
    return Tile({"BLOCK_N": 1024, "BLOCK_T": 128})


class PLLogprob(torch.autograd.Function):
    """pl_logprob [rows, n], contiguous float32, n at least 1; its gradient needs its result only."""

    @staticmethod
    def forward(ctx, scores: Tensor) -> Tensor:
        rows, n = scores.shape
        t = tile(arch_of(scores))
        block = {"BLOCK_N": t.blocks["BLOCK_N"]}
        grid = rows, triton.cdiv(n, t.blocks["BLOCK_N"])
        peaks, sums = scores.new_empty(grid), scores.new_empty(grid)
        out = torch.empty_like(scores)
        if grid[1] > 1:
            tile_lse[grid](scores, peaks, sums, n, **block, **t.options)
        pl_logprob_tile[grid](scores, peaks, sums, out, n, **t.blocks, **t.options)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (logprob,) = ctx.saved_tensors
        rows, n = logprob.shape
        t = tile(arch_of(logprob))
        block = {"BLOCK_N": t.blocks["BLOCK_N"]}
        grid = rows, triton.cdiv(n, t.blocks["BLOCK_N"])
        decays, sums = logprob.new_empty(grid), logprob.new_empty(grid)
        out = torch.empty_like(logprob)
        if grid[1] > 1:
            tile_recurrence[grid](logprob, grad, decays, sums, n, *grad.stride(), **block, **t.options)
        pl_logprob_grad[grid](logprob, grad, decays, sums, out, n, *grad.stride(), **t.blocks, **t.options)
        return out


def pl_logprob(scores: Tensor) -> Tensor:
    """See `reference.pl_logprob`."""
    if not scores.numel():
        return scores.float()
    return PLLogprob.apply(scores.float().reshape(-1, scores.shape[-1]).contiguous()).view(scores.shape)


class BudgetReward(torch.autograd.Function):
    """budget_reward [rows, n], contiguous, n at least 1."""

    @staticmethod
    def forward(ctx, utility: Tensor) -> Tensor:
        rows, n = utility.shape
        t = tile(arch_of(utility))
        block = {"BLOCK_N": t.blocks["BLOCK_N"]}
        grid = rows, triton.cdiv(n, t.blocks["BLOCK_N"])
        parts = utility.new_empty(grid, dtype=torch.float32)
        budget_reward_tile[grid](utility, parts, n, **block, **t.options)
        ctx.of = utility.shape, utility.dtype
        return parts.sum(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (_, n), dtype = ctx.of
        weight = torch.arange(-1, -n - 1, -1, device=grad.device, dtype=torch.float32)
        return (grad[:, None] * weight).to(dtype)


def budget_reward(utility: Tensor) -> Tensor:
    """See `reference.budget_reward`."""
    if not utility.numel():
        return utility.float().sum(-1)
    return BudgetReward.apply(utility.reshape(-1, utility.shape[-1]).contiguous()).view(utility.shape[:-1])


def entries(arch: Arch) -> list[Entry]:
    """For the compile gate."""
    t = tile(arch)
    one = Tile({"BLOCK_N": t.blocks["BLOCK_N"]}, t.warps, t.stages)
    rows = {"n": "i32", "grad_row": "i64", "grad_pick": "i32"}
    floats = {name: "*fp32" for name in ("SCORES", "PEAKS", "SUMS", "OUT", "LOGPROB", "GRAD", "DECAYS", "PARTS")}
    types = {**floats, **rows}

    def entry(kernel, tile: Tile, label: str = "fp32", **other: str) -> Entry:
        own = {name: kind for name, kind in {**types, **other}.items() if name in kernel.arg_names}
        return Entry(kernel, label, own, {}, tile)

    return [
        entry(tile_lse, one),
        entry(pl_logprob_tile, t),
        entry(tile_recurrence, one),
        entry(pl_logprob_grad, t),
        *(entry(budget_reward_tile, one, dtype, UTILITY=f"*{dtype}") for dtype in ("fp32", "bf16")),
    ]
