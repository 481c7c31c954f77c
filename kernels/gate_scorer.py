"""Fast KVzip's gate after its projections: a token's own key against learned sink keys (arXiv:2601.17668)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels import reference
from learnkv.kernels.entry import Arch, Entry, Tile, arch_of, padded_head


@triton.jit
def rms_normed(X, GAIN, rows, row_stride, inside, eps, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of X over their root mean square, times the gain: [N, BLOCK_D] float32."""
    d = tl.arange(0, BLOCK_D)
    x = tl.load(X + rows[:, None] * row_stride + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    gain = tl.load(GAIN + d, mask=d < D, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * gain[None, :]


@triton.jit(do_not_specialize=["T"])
def gate_scorer_tile(
    QUERIES, KEYS, QUERY_GAIN, KEY_GAIN, SINKS, BIAS, OUT, T, q_batch, q_head, q_row, k_batch, k_head, k_row, H, scale, eps,
    G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of tokens.  Grid: tiles, B * H."""
    row = tl.program_id(1).to(tl.int64)  # of B * H
    b, h = row // H, row % H
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = at.to(tl.int64)
    inside = at < T
    k = rms_normed(KEYS + b * k_batch + h * k_head, KEY_GAIN, rows, k_row, inside, eps, D, BLOCK_D)  # [BLOCK_T, BLOCK_D]
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    sinks = tl.load(SINKS + (h * S + s)[None, :] * D + d[:, None], mask=(d < D)[:, None] & (s < S)[None, :], other=0.0)
    sinks = sinks.to(tl.float32)  # [BLOCK_D, BLOCK_S]
    total = tl.zeros([BLOCK_T], tl.float32)
    for g in range(G):
        q = rms_normed(QUERIES + b * q_batch + (h * G + g) * q_head, QUERY_GAIN, rows, q_row, inside, eps, D, BLOCK_D)
        own = tl.sum(q * k, 1) * scale + tl.load(BIAS + h * G + g).to(tl.float32)  # [BLOCK_T]
        others = tl.dot(q, sinks, input_precision="tf32") * scale  # [BLOCK_T, BLOCK_S]
        others = tl.where((s < S)[None, :], others, float("-inf"))
        highest = tl.maximum(own, tl.max(others, 1))
        share = tl.exp(own - highest)
        total += share / (share + tl.sum(tl.exp(others - highest[:, None]), 1))
    tl.store(OUT + row * T + at, total / G, mask=inside)


def tile(arch: Arch, D: int, S: int) -> Tile:
    """A token of 16 numbers is 32 bytes a head: many tokens make the loads long."""
    return Tile({"BLOCK_T": 128, "BLOCK_D": padded_head(D), "BLOCK_S": padded_head(S)}, 4, 2)


class GateScorer(torch.autograd.Function):
    """Forward in Triton; the gradient is worked out again by plain torch, since training scores a thousand tokens at a time."""

    @staticmethod
    def forward(
        ctx, queries: Tensor, keys: Tensor, query_gain: Tensor, key_gain: Tensor, sinks: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(queries, keys, query_gain, key_gain, sinks, bias)
        ctx.eps = eps
        (B, Q, T, D), H, S = queries.shape, keys.shape[1], sinks.shape[1]
        out = torch.empty(B, H, T, device=queries.device, dtype=torch.float32)
        if not out.numel():
            return out
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys))
        weights = [w.contiguous() for w in (query_gain, key_gain, sinks, bias)]
        t = tile(arch_of(queries), D, S)
        grid = triton.cdiv(T, t.blocks["BLOCK_T"]), B * H
        gate_scorer_tile[grid](
            q, k, *weights, out, T, *q.stride()[:3], *k.stride()[:3], H, D**-0.5, eps, G=Q // H, D=D, S=S, **t.blocks, **t.options
        )  # fmt: skip
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:6]
        with torch.enable_grad():
            again = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, wanted, strict=True)]
            out = reference.gate_scorer(*again, eps=ctx.eps)
            found = iter(torch.autograd.grad(out, [x for x in again if x.requires_grad], grad.to(out.dtype)))
        return *(next(found) if need else None for need in wanted), None


def gate_scorer(
    queries: Tensor,
    keys: Tensor,
    query_gain: Tensor,
    key_gain: Tensor,
    sinks: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """See `reference.gate_scorer`; differentiable once."""
    return GateScorer.apply(queries, keys, query_gain, key_gain, sinks, bias, eps)


def entries(arch: Arch) -> list[Entry]:
    """For the compile gate: the published dimensions."""
    t = tile(arch, 16, 16)
    strides = tuple(f"{x}_{name}" for x in "qk" for name in ("batch", "head", "row"))
    found = []
    for kind, weights, G in [("bf16", "bf16", 4), ("bf16", "fp32", 7), ("fp32", "fp32", 4), ("fp16", "fp16", 1)]:
        types = {"QUERIES": f"*{kind}", "KEYS": f"*{kind}", **dict.fromkeys(("QUERY_GAIN", "KEY_GAIN", "BIAS"), f"*{weights}")}
        types |= {"SINKS": "*fp32", "OUT": "*fp32", "T": "i32", **dict.fromkeys(strides, "i64"), "H": "i32", "scale": "fp32", "eps": "fp32"}
        found.append(Entry(gate_scorer_tile, f"{kind} x {weights} G={G}", types, {"G": G, "D": 16, "S": 16}, t, strides))
    return found
