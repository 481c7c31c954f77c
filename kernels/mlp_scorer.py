"""A small network per head from keys, values and position features to one score: the hidden layers stay in registers.

Where it is too wide for that, or deeper than two trunk layers, each branch and each layer is a kernel of its own over a workspace: at the
published widths one kernel for all would work a branch out twice and standardise its input once per block of columns, at five times
the instructions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels import reference
from learnkv.kernels.entry import Arch, Entry, Loop, Tile, arch_of, padded_head
from learnkv.kernels.reference import BranchWeights, TrunkWeights

EPS = tl.constexpr(1e-5)
FEW_FEATURES = tl.constexpr(4)  # so many are added one by one in float32, more of them by tl.dot


@triton.jit
def normalised(x, real, WIDTH: tl.constexpr):
    """LayerNorm of rows [N, W] without weight and bias; 0 where a column is padding."""
    mean = tl.sum(tl.where(real[None, :], x, 0.0), 1) / WIDTH
    gap = tl.where(real[None, :], x - mean[:, None], 0.0)  # [N, W]
    return gap * tl.rsqrt(tl.sum(gap * gap, 1) / WIDTH + EPS)[:, None]


@triton.jit
def linear(x, WEIGHT, BIAS, at, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The columns `at` of x [N, BLOCK] times weight plus bias: [N, W], 0 past the last column."""
    row = tl.arange(0, BLOCK)
    inside = (row < ROWS)[:, None] & (at < COLUMNS)[None, :]
    weight = tl.load(WEIGHT + row[:, None] * COLUMNS + at[None, :], mask=inside, other=0.0)  # [BLOCK, W]
    bias = tl.load(BIAS + at, mask=at < COLUMNS, other=0.0).to(tl.float32)
    return tl.dot(x, weight, input_precision="tf32") + bias[None, :]


@triton.jit
def activated(x, GAIN, OFFSET, at, WIDTH: tl.constexpr):
    """SiLU of normalised x [N, W] times gain plus offset; 0 past the width."""
    gain = tl.load(GAIN + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    offset = tl.load(OFFSET + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    y = x * gain[None, :] + offset[None, :]
    return y / (1 + tl.exp(-y))


@triton.jit
def hidden(
    X, MEAN, DEVIATION, WEIGHT, BIAS, rows, inside, x_row, at, D: tl.constexpr, W: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The columns `at` of standardised rows of one input times weight plus bias: [N, BLOCK_W], 0 past the last column."""
    bias = tl.load(BIAS + at, mask=at < W, other=0.0).to(tl.float32)
    out = tl.zeros([rows.shape[0], at.shape[0]], tl.float32) + bias[None, :]
    for start in range(0, D, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(X + rows[:, None] * x_row + k[None, :], mask=inside[:, None] & (k < D)[None, :], other=0.0).to(tl.float32)
        mean = tl.load(MEAN + k, mask=k < D, other=0.0)
        share = 1 / tl.load(DEVIATION + k, mask=k < D, other=1.0)
        x = ((x - mean[None, :]) * share[None, :]).to(WEIGHT.dtype.element_ty)  # [N, BLOCK_K]
        weight = tl.load(WEIGHT + k[:, None] * W + at[None, :], mask=(k < D)[:, None] & (at < W)[None, :], other=0.0)
        out = tl.dot(x, weight, out, input_precision="tf32")
    return out


@triton.jit
def branch(
    X, MEAN, DEVIATION, WEIGHT, BIAS, TRUNK, rows, inside, x_row, column, out, D: tl.constexpr, W: tl.constexpr, M: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """out [N, BLOCK_M] plus what one input's branch adds to the first trunk layer."""
    at = tl.arange(0, BLOCK_W)
    y = normalised(hidden(X, MEAN, DEVIATION, WEIGHT, BIAS, rows, inside, x_row, at, D, W, BLOCK_K), at < W, W)  # [N, BLOCK_W]
    weight = tl.load(TRUNK + at[:, None] * M + column[None, :], mask=(at < W)[:, None] & (column < M)[None, :], other=0.0)
    return tl.dot(y.to(TRUNK.dtype.element_ty), weight, out, input_precision="tf32")


@triton.jit
def with_features(x, FEATURES, TRUNK, rows, inside, column, F: tl.constexpr, M: tl.constexpr, BLOCK_F: tl.constexpr):
    """x [N, BLOCK_M] plus the features of `rows` times their rows of the first trunk layer."""
    if F <= FEW_FEATURES:
        for f in tl.static_range(F):
            feature = tl.load(FEATURES + rows * F + f, mask=inside, other=0.0)  # [N]
            x += feature[:, None] * tl.load(TRUNK + f * M + column, mask=column < M, other=0.0).to(tl.float32)[None, :]
    else:
        f = tl.arange(0, BLOCK_F)
        features = tl.load(FEATURES + rows[:, None] * F + f[None, :], mask=inside[:, None] & (f < F)[None, :], other=0.0)
        weight = tl.load(TRUNK + f[:, None] * M + column[None, :], mask=(f < F)[:, None] & (column < M)[None, :], other=0.0)
        x = tl.dot(features.to(TRUNK.dtype.element_ty), weight, x, input_precision="tf32")
    return x


@triton.jit
def finish(x, HEAD, SCALE, SHIFT, OUT, row, h, at, inside, column, L, M: tl.constexpr, SCORES: tl.constexpr):
    """Writes activations x [N, BLOCK_M] as [B, H, L, M], or their scores as [B, H, L]."""
    if SCORES:
        score = tl.sum(x * tl.load(HEAD + h * M + column, mask=column < M, other=0.0).to(tl.float32)[None, :], 1)
        tl.store(OUT + row * L + at, score * tl.load(SCALE + h) + tl.load(SHIFT + h), mask=inside)
    else:
        to = OUT + (row * L + at)[:, None] * M + column[None, :]
        tl.store(to, x.to(OUT.dtype.element_ty), mask=inside[:, None] & (column < M)[None, :])


@triton.jit(do_not_specialize=["L"])
def mlp_narrow(
    X0, X1, FEATURES, MEAN0, DEVIATION0, WEIGHT0, BIAS0, MEAN1, DEVIATION1, WEIGHT1, BIAS1, TRUNK, TRUNK_BIAS, GAIN, OFFSET,
    TRUNK2, TRUNK_BIAS2, GAIN2, OFFSET2, HEAD, SCALE, SHIFT, OUT, L, x0_batch, x0_head, x0_row, x1_batch, x1_head, x1_row, H,
    INPUTS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, M: tl.constexpr, F: tl.constexpr, LAYERS: tl.constexpr,
    SCORES: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Branches, features and the first LAYERS trunk layers, 1 or 2, of a tile of tokens.  Grid: tiles, B * H.

    SCORES  whether these were all layers: then [B, H, L] scores are written, else [B, H, L, M] activations.
    """
    row = tl.program_id(1).to(tl.int64)  # of B * H
    b, h = row // H, row % H
    at = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    rows, inside = at.to(tl.int64), at < L
    column = tl.arange(0, BLOCK_M)
    real = column < M
    TRUNK += h * (INPUTS * W + F) * M
    x = tl.zeros([BLOCK_L, BLOCK_M], tl.float32) + tl.load(TRUNK_BIAS + h * M + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if INPUTS > 0:
        X0 += b * x0_batch + h * x0_head
        x = branch(
            X0, MEAN0 + h * D, DEVIATION0 + h * D, WEIGHT0 + h * D * W, BIAS0 + h * W, TRUNK, rows, inside, x0_row, column, x, D, W, M,
            BLOCK_K, BLOCK_W,
        )  # fmt: skip
    if INPUTS > 1:
        X1 += b * x1_batch + h * x1_head
        x = branch(
            X1, MEAN1 + h * D, DEVIATION1 + h * D, WEIGHT1 + h * D * W, BIAS1 + h * W, TRUNK + W * M, rows, inside, x1_row, column, x,
            D, W, M, BLOCK_K, BLOCK_W,
        )  # fmt: skip
    x = with_features(x, FEATURES + row * L * F, TRUNK + INPUTS * W * M, rows, inside, column, F, M, BLOCK_F)
    x = activated(normalised(x, real, M), GAIN + h * M, OFFSET + h * M, column, M)  # [BLOCK_L, BLOCK_M]
    if LAYERS > 1:
        x = linear(x.to(TRUNK2.dtype.element_ty), TRUNK2 + h * M * M, TRUNK_BIAS2 + h * M, column, M, M, BLOCK_M)
        x = activated(normalised(x, real, M), GAIN2 + h * M, OFFSET2 + h * M, column, M)
    finish(x, HEAD, SCALE, SHIFT, OUT, row, h, at, inside, column, L, M, SCORES)


@triton.jit(do_not_specialize=["L"])
def mlp_branch(
    X, MEAN, DEVIATION, WEIGHT, BIAS, OUT, L, x_batch, x_head, x_row, H, out_row, D: tl.constexpr, W: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One input's branch for a tile of tokens, to W of the `out_row` columns of a workspace.  Grid: tiles, B * H."""
    row = tl.program_id(1).to(tl.int64)  # of B * H
    b, h = row // H, row % H
    at = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    inside = at < L
    column = tl.arange(0, BLOCK_W)
    X += b * x_batch + h * x_head
    x = hidden(
        X, MEAN + h * D, DEVIATION + h * D, WEIGHT + h * D * W, BIAS + h * W, at.to(tl.int64), inside, x_row, column, D, W, BLOCK_K
    )  # fmt: skip
    x = normalised(x, column < W, W).to(OUT.dtype.element_ty)  # [BLOCK_L, BLOCK_W]
    tl.store(OUT + (row * L + at)[:, None] * out_row + column[None, :], x, mask=inside[:, None] & (column < W)[None, :])


@triton.jit(do_not_specialize=["L"])
def mlp_layer(
    X, FEATURES, TRUNK, TRUNK_BIAS, GAIN, OFFSET, HEAD, SCALE, SHIFT, OUT, L, H, K: tl.constexpr, F: tl.constexpr, M: tl.constexpr,
    SCORES: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One trunk layer for a tile of tokens, from X [B, H, L, K] and the features; the rest as `mlp_narrow`."""
    row = tl.program_id(1).to(tl.int64)  # of B * H
    h = row % H
    at = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    rows, inside = at.to(tl.int64), at < L
    column = tl.arange(0, BLOCK_M)
    real = column < M
    TRUNK += h * (K + F) * M
    x = tl.zeros([BLOCK_L, BLOCK_M], tl.float32) + tl.load(TRUNK_BIAS + h * M + column, mask=real, other=0.0).to(tl.float32)[None, :]
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        y = tl.load(X + (row * L + at)[:, None] * K + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
        weight = tl.load(TRUNK + k[:, None] * M + column[None, :], mask=(k < K)[:, None] & real[None, :], other=0.0)
        x = tl.dot(y, weight, x, input_precision="tf32")  # [BLOCK_L, BLOCK_M]
    x = with_features(x, FEATURES + row * L * F, TRUNK + K * M, rows, inside, column, F, M, BLOCK_F)
    x = activated(normalised(x, real, M), GAIN + h * M, OFFSET + h * M, column, M)
    finish(x, HEAD, SCALE, SHIFT, OUT, row, h, at, inside, column, L, M, SCORES)


NARROW = 64  # branches and trunks up to this width: all of them and two trunk layers in one kernel


def narrow_tile(arch: Arch, D: int, W: int, M: int, F: int, dtype: torch.dtype) -> Tile:
    """Of `mlp_narrow`: as much of the inputs at once as leaves no register spilled."""
    k = 32 if arch == 89 and dtype == torch.float32 else 64
    blocks = {"BLOCK_W": padded_head(W), "BLOCK_M": padded_head(M), "BLOCK_F": padded_head(max(1, F))}
    return Tile({"BLOCK_L": 64, "BLOCK_K": min(k, padded_head(D)), **blocks}, 4, 2)


def branch_tile(arch: Arch, D: int, W: int, dtype: torch.dtype) -> Tile:
    """Of `mlp_branch`; float32 weights are copied ahead in 4 bytes at a time on sm_90, so they are loaded when needed."""
    blocks = {"BLOCK_L": 64, "BLOCK_K": min(32, padded_head(D)), "BLOCK_W": padded_head(W)}
    return Tile(blocks, 8, 1 if arch == 90 and dtype == torch.float32 else 2)


def layer_tile(arch: Arch, M: int, F: int) -> Tile:
    """Of `mlp_layer`."""
    return Tile({"BLOCK_L": 64, "BLOCK_K": 32, "BLOCK_M": padded_head(M), "BLOCK_F": padded_head(max(1, F))}, 8, 2)


def mlp_scorer(
    inputs: Sequence[Tensor],
    features: Tensor,
    branches: Sequence[BranchWeights],
    trunk: Sequence[TrunkWeights],
    head: Tensor,
    scale: Tensor,
    shift: Tensor,
) -> Tensor:
    """See `reference.mlp_scorer`; float32 weights go to the matrix units as tensor-float32."""
    if len(inputs) > 2:
        raise ValueError(f"mlp_scorer got {len(inputs)} inputs; the kernel reads 2 at most, join them or use the reference")
    every = [*inputs, features, *(w for layer in [*branches, *trunk] for w in layer), head, scale, shift]
    return Recomputed.apply((len(inputs), len(trunk)), *every)


class Recomputed(torch.autograd.Function):
    """Scores from the kernels; the gradient from plain torch, which works the network out once more and keeps nothing until then."""

    @staticmethod
    def forward(ctx, counts: tuple[int, int], *tensors: Tensor) -> Tensor:
        ctx.counts = counts
        ctx.save_for_backward(*tensors)
        return launch(*arguments(counts, tensors))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple:
        leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)]
        with torch.enable_grad():
            out = reference.mlp_scorer(*arguments(ctx.counts, leaves))
        found = iter(torch.autograd.grad(out, [t for t in leaves if t.requires_grad], grad))
        return None, *(next(found) if t.requires_grad else None for t in leaves)


def arguments(counts: tuple[int, int], tensors: Sequence[Tensor]) -> tuple:
    """What `launch` takes, out of its tensors one after the other; counts of inputs and trunk layers."""
    each, (inputs, trunk) = iter(tensors), counts
    xs, features = list(islice(each, inputs)), next(each)
    branches = [BranchWeights(*islice(each, 4)) for _ in range(inputs)]
    return xs, features, branches, [TrunkWeights(*islice(each, 4)) for _ in range(trunk)], *each


def launch(
    inputs: Sequence[Tensor],
    features: Tensor,
    branches: Sequence[BranchWeights],
    trunk: Sequence[TrunkWeights],
    head: Tensor,
    scale: Tensor,
    shift: Tensor,
) -> Tensor:
    """The scores."""
    B, H, L, F = features.shape
    M, dtype, arch = head.shape[-1], head.dtype, arch_of(features)
    out = torch.empty(B, H, L, device=features.device, dtype=torch.float32)
    if not out.numel():
        return out
    xs = [x if x.stride(-1) == 1 else x.contiguous() for x in inputs]
    features = features.contiguous()
    branches = [BranchWeights(*(w.contiguous() for w in each)) for each in branches]
    layers = [[w.contiguous() for w in layer] for layer in trunk]
    end = head.contiguous(), scale.contiguous(), shift.contiguous()
    D, W = branches[0].weight.shape[1:] if branches else (1, 1)
    done = min(2, len(layers)) if max(W, M) <= NARROW else 0  # trunk layers that one kernel works out with the branches
    if done:
        whole = done == len(layers)
        x = out if whole else torch.empty(B, H, L, M, device=features.device, dtype=dtype)
        spare = [out] * 4  # stands for what is not there and not read
        flat = [w for each in branches for w in each] + spare[:4] * (2 - len(xs))
        strides = [s for each in xs for s in each.stride()[:3]] + [0] * (6 - 3 * len(xs))
        t = narrow_tile(arch, D, W, M, F, dtype)
        mlp_narrow[triton.cdiv(L, t.blocks["BLOCK_L"]), B * H](
            *xs, *spare[len(xs) : 2], features, *flat, *layers[0], *layers[done - 1], *end, x, L, *strides, H,
            INPUTS=len(xs), D=D, W=W, M=M, F=F, LAYERS=done, SCORES=whole, **t.blocks, **t.options,
        )  # fmt: skip
    else:
        x = torch.empty(B, H, L, len(xs) * W, device=features.device, dtype=dtype)
        t = branch_tile(arch, D, W, dtype)
        for i, (each, weights) in enumerate(zip(xs, branches, strict=True)):
            mlp_branch[triton.cdiv(L, t.blocks["BLOCK_L"]), B * H](
                each, *weights, x[..., i * W :], L, *each.stride()[:3], H, x.shape[-1], D=D, W=W, **t.blocks, **t.options
            )  # fmt: skip
    for i, layer in enumerate(layers[done:], done + 1):
        last = i == len(layers)
        y = out if last else torch.empty(B, H, L, M, device=features.device, dtype=dtype)
        f = 0 if i > 1 else F
        t = layer_tile(arch, M, f)
        mlp_layer[triton.cdiv(L, t.blocks["BLOCK_L"]), B * H](
            x, features, *layer, *end, y, L, H, K=x.shape[-1], F=f, M=M, SCORES=last, **t.blocks, **t.options
        )  # fmt: skip
        x = y
    return out


TRUNKS = ("TRUNK", "TRUNK_BIAS", "GAIN", "OFFSET")
WEIGHTS = ("WEIGHT0", "BIAS0", "WEIGHT1", "BIAS1", "WEIGHT", "BIAS", *TRUNKS, *(f"{name}2" for name in TRUNKS), "HEAD")
FLOATS = ("FEATURES", "MEAN0", "DEVIATION0", "MEAN1", "DEVIATION1", "MEAN", "DEVIATION", "SCALE", "SHIFT")
STRIDES = tuple(f"{x}_{name}" for x in ("x0", "x1", "x") for name in ("batch", "head", "row"))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def entries(arch: Arch) -> list[Entry]:
    """For the compile gate: our widths with every type of cache and weights, and the published ones."""
    found = []

    def add(kernel, label: str, read: str, kind: str, out: str, constants: Mapping[str, object], tile: Tile, loop: Loop | None) -> None:
        types = {**dict.fromkeys(WEIGHTS, f"*{kind}"), **dict.fromkeys(FLOATS, "*fp32"), **dict.fromkeys(STRIDES, "i64")}
        types |= {"X0": f"*{read}", "X1": f"*{read}", "X": f"*{read}", "OUT": f"*{out}", "L": "i32", "H": "i32", "out_row": "i32"}
        own = {name: types[name] for name in kernel.arg_names if name in types}
        aligned = tuple(name for name in (*STRIDES, "out_row") if name in own)
        found.append(Entry(kernel, label, own, constants, tile, aligned, loop))

    for read, kind, D in [("bf16", "fp32", 64), ("fp32", "fp32", 64), ("bf16", "fp32", 128), ("bf16", "bf16", 128)]:
        t = narrow_tile(arch, D, 32, 64, 3, DTYPES[kind])
        rows, k = t.blocks["BLOCK_L"], t.blocks["BLOCK_K"]
        loop = Loop(bytes=rows * k * (4 if read == "fp32" else 2), flops=2 * rows * k * 32) if k < D else None
        constants = {"INPUTS": 2, "D": D, "W": 32, "M": 64, "F": 3, "LAYERS": 2, "SCORES": True}
        add(mlp_narrow, f"{read} x {kind} D={D} 32/64", read, kind, "fp32", constants, t, loop)
    for kind in ("bf16", "fp32"):
        size = DTYPES[kind].itemsize
        t = branch_tile(arch, 128, 256, DTYPES[kind])
        rows, k = t.blocks["BLOCK_L"], t.blocks["BLOCK_K"]
        loop = Loop(bytes=rows * k * 2, flops=2 * rows * k * 256)
        add(mlp_branch, f"bf16 x {kind} D=128 256", "bf16", kind, kind, {"D": 128, "W": 256}, t, loop)
        for K, F, scores in [(512, 32, False), (256, 0, True)]:
            t = layer_tile(arch, 256, F)
            rows, k = t.blocks["BLOCK_L"], t.blocks["BLOCK_K"]
            # the others' loops are short enough to be unrolled as a whole
            loop = Loop(bytes=rows * k * size, flops=2 * rows * k * 256) if K * size >= 2048 else None
            constants = {"K": K, "F": F, "M": 256, "SCORES": scores}
            add(mlp_layer, f"{kind} {K}+{F} to 256", kind, kind, "fp32" if scores else kind, constants, t, loop)
    return found
