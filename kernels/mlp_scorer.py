"""A small network per head from keys, values and position features to one score: the hidden layers stay in registers.

Where the trunk is too wide for that, or deeper than two layers, each further layer is a kernel of its own over a workspace.
"""


from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def moments(x, real, mean, square, count, WIDTH: tl.constexpr):
    """Mean and summed squared distance to it of the `count` columns before and the real ones of x [N, W]: no cancellation."""
    fresh = tl.minimum(WIDTH - count, x.shape[1])
    total = count + fresh
    own = tl.sum(tl.where(real[None, :], x, 0.0), 1) / fresh
    gap = tl.where(real[None, :], x - own[:, None], 0.0)
    apart = own - mean
    return mean + apart * fresh / total, square + tl.sum(gap * gap, 1) + apart * apart * count * fresh / total


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
def joined(y, TRUNK, at, column, out, W: tl.constexpr, M: tl.constexpr):
    """out [N, BLOCK_M] plus the branch outputs y [N, BLOCK_W], columns `at`, times their rows of the first trunk layer."""
    weight = tl.load(TRUNK + at[:, None] * M + column[None, :], mask=(at < W)[:, None] & (column < M)[None, :], other=0.0)
    return tl.dot(y.to(TRUNK.dtype.element_ty), weight, out, input_precision="tf32")


@triton.jit
def branch(
    X, MEAN, DEVIATION, WEIGHT, BIAS, TRUNK, rows, inside, x_row, column, out, D: tl.constexpr, W: tl.constexpr, M: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """out [N, BLOCK_M] plus what one input's branch adds to the first trunk layer.

    A branch wider than its block is worked out twice, for the LayerNorm's moments and then a block at a time.
    """
    if W <= BLOCK_W:
        at = tl.arange(0, BLOCK_W)
        y = hidden(X, MEAN, DEVIATION, WEIGHT, BIAS, rows, inside, x_row, at, D, W, BLOCK_K)  # [N, BLOCK_W]
        out = joined(normalised(y, at < W, W), TRUNK, at, column, out, W, M)
    else:
        mean = tl.zeros([rows.shape[0]], tl.float32)
        square = tl.zeros([rows.shape[0]], tl.float32)
        for start in range(0, W, BLOCK_W):
            at = start + tl.arange(0, BLOCK_W)
            y = hidden(X, MEAN, DEVIATION, WEIGHT, BIAS, rows, inside, x_row, at, D, W, BLOCK_K)
            mean, square = moments(y, at < W, mean, square, start, W)
        scale = tl.rsqrt(square / W + EPS)
        for start in range(0, W, BLOCK_W):
            at = start + tl.arange(0, BLOCK_W)
            y = hidden(X, MEAN, DEVIATION, WEIGHT, BIAS, rows, inside, x_row, at, D, W, BLOCK_K)
            y = tl.where((at < W)[None, :], (y - mean[:, None]) * scale[:, None], 0.0)
            out = joined(y, TRUNK, at, column, out, W, M)
    return out


@triton.jit(do_not_specialize=["L"])
def mlp_first(
    X0, X1, FEATURES, MEAN0, DEVIATION0, WEIGHT0, BIAS0, MEAN1, DEVIATION1, WEIGHT1, BIAS1, TRUNK, TRUNK_BIAS, GAIN, OFFSET,
    TRUNK2, TRUNK_BIAS2, GAIN2, OFFSET2, HEAD, SCALE, SHIFT, OUT, L, x0_batch, x0_head, x0_row, x1_batch, x1_head, x1_row, H,
    INPUTS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, M: tl.constexpr, F: tl.constexpr, LAYERS: tl.constexpr,
    SCORES: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Branches, features and the first LAYERS trunk layers, 1 or 2, of a tile of tokens.  Grid: tiles, B * H.

    SCORES  whether these were all layers: then [B, H, L] scores are written, else [B, H, L, M] activations in the weights' type.
    """
    row = tl.program_id(1).to(tl.int64)  # of B * H
    b, h = row // H, row % H
    at = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    inside = at < L
    column = tl.arange(0, BLOCK_M)
    real = column < M
    operand = TRUNK.dtype.element_ty
    TRUNK += h * (INPUTS * W + F) * M
    x = tl.zeros([BLOCK_L, BLOCK_M], tl.float32) + tl.load(TRUNK_BIAS + h * M + column, mask=real, other=0.0).to(tl.float32)[None, :]
    rows = at.to(tl.int64)
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
    FEATURES += row * L * F
    TRUNK += INPUTS * W * M
    if F <= FEW_FEATURES:
        for f in tl.static_range(F):
            feature = tl.load(FEATURES + rows * F + f, mask=inside, other=0.0)  # [BLOCK_L]
            x += feature[:, None] * tl.load(TRUNK + f * M + column, mask=real, other=0.0).to(tl.float32)[None, :]
    else:
        f = tl.arange(0, BLOCK_F)
        features = tl.load(FEATURES + rows[:, None] * F + f[None, :], mask=inside[:, None] & (f < F)[None, :], other=0.0)
        weight = tl.load(TRUNK + f[:, None] * M + column[None, :], mask=(f < F)[:, None] & real[None, :], other=0.0)
        x = tl.dot(features.to(operand), weight, x, input_precision="tf32")  # [BLOCK_L, BLOCK_M]
    x = activated(normalised(x, real, M), GAIN + h * M, OFFSET + h * M, column, M)
    if LAYERS > 1:
        x = linear(x.to(operand), TRUNK2 + h * M * M, TRUNK_BIAS2 + h * M, column, M, M, BLOCK_M)
        x = activated(normalised(x, real, M), GAIN2 + h * M, OFFSET2 + h * M, column, M)
    if SCORES:
        score = tl.sum(x * tl.load(HEAD + h * M + column, mask=real, other=0.0).to(tl.float32)[None, :], 1)
        tl.store(OUT + row * L + at, score * tl.load(SCALE + h) + tl.load(SHIFT + h), mask=inside)
    else:
        to = OUT + (row * L + at)[:, None] * M + column[None, :]
        tl.store(to, x.to(operand), mask=inside[:, None] & real[None, :])


@triton.jit(do_not_specialize=["L"])
def mlp_layer(
    X, TRUNK, TRUNK_BIAS, GAIN, OFFSET, HEAD, SCALE, SHIFT, OUT, L, H, M: tl.constexpr, SCORES: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One further trunk layer of a tile of tokens, X [B, H, L, M]; the rest as `mlp_first`."""
    row = tl.program_id(1).to(tl.int64)  # of B * H
    h = row % H
    at = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    inside = at < L
    column = tl.arange(0, BLOCK_M)
    real = column < M
    x = tl.zeros([BLOCK_L, BLOCK_M], tl.float32) + tl.load(TRUNK_BIAS + h * M + column, mask=real, other=0.0).to(tl.float32)[None, :]
    for start in range(0, M, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        y = tl.load(X + (row * L + at)[:, None] * M + k[None, :], mask=inside[:, None] & (k < M)[None, :], other=0.0)
        weight = tl.load(TRUNK + h * M * M + k[:, None] * M + column[None, :], mask=(k < M)[:, None] & real[None, :], other=0.0)
        x = tl.dot(y, weight, x, input_precision="tf32")  # [BLOCK_L, BLOCK_M]
    x = activated(normalised(x, real, M), GAIN + h * M, OFFSET + h * M, column, M)
    if SCORES:
        score = tl.sum(x * tl.load(HEAD + h * M + column, mask=real, other=0.0).to(tl.float32)[None, :], 1)
        tl.store(OUT + row * L + at, score * tl.load(SCALE + h) + tl.load(SHIFT + h), mask=inside)
    else:
        to = OUT + (row * L + at)[:, None] * M + column[None, :]
        tl.store(to, x.to(X.dtype.element_ty), mask=inside[:, None] & real[None, :])


NARROW = 64  # branches and trunks up to this width: two trunk layers in registers


def tile(arch: Arch, D: int, W: int, M: int, F: int, dtype: torch.dtype) -> Tile:
    """Of `mlp_first`: as many tokens and inputs at once as leave no register spilled."""
    blocks = {"BLOCK_K": min(64, padded_head(D)), "BLOCK_M": padded_head(M), "BLOCK_F": padded_head(max(1, F))}
    wide = M > NARROW or W > NARROW
    if dtype == torch.float32 and (wide or arch == 89):
        blocks["BLOCK_K"] = min(32, blocks["BLOCK_K"])
    if wide:
        return Tile({**blocks, "BLOCK_L": 32 if arch == "gfx942" else 64, "BLOCK_W": 32}, 8, 2)
    return Tile({**blocks, "BLOCK_L": 64, "BLOCK_W": padded_head(W)}, 4, 2)


def layer_tile(arch: Arch, M: int, dtype: torch.dtype) -> Tile:
    """Of `mlp_layer`."""
    return Tile({"BLOCK_L": 64, "BLOCK_M": padded_head(M), "BLOCK_K": 32}, 8, 2)


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
    B, H, L, F = features.shape
    M, dtype = head.shape[-1], head.dtype
    if len(inputs) > 2:
        raise ValueError(f"mlp_scorer got {len(inputs)} inputs; the kernel reads 2 at most, join them or use the reference")
    if torch.is_grad_enabled() and any(w.requires_grad for layer in [*branches, *trunk] for w in layer):
        raise ValueError("mlp_scorer has no gradient in Triton; score under torch.no_grad(), train through the gate's own modules")
    out = torch.empty(B, H, L, device=features.device, dtype=torch.float32)
    if not out.numel():
        return out
    xs = [x if x.stride(-1) == 1 else x.contiguous() for x in inputs]
    D, W = (branches[0].weight.shape[1:]) if branches else (1, 1)
    arch = arch_of(features)
    t = tile(arch, D, W, M, F, dtype)
    inside = 2 if len(trunk) == 2 and M <= NARROW else 1  # layers of the first kernel
    whole = inside == len(trunk)
    first = out if whole else torch.empty(B, H, L, M, device=features.device, dtype=dtype)
    spare = out  # in the place of what is not there and not read
    branch_weights = [w.contiguous() for each in branches for w in each] + [spare] * (8 - 4 * len(branches))
    layers = [[w.contiguous() for w in layer] for layer in trunk]
    end = head.contiguous(), scale.contiguous(), shift.contiguous()
    strides = [s for x in xs for s in x.stride()[:3]] + [0] * (6 - 3 * len(xs))
    grid = triton.cdiv(L, t.blocks["BLOCK_L"]), B * H
    mlp_first[grid](
        *xs, *[spare] * (2 - len(xs)), features.contiguous(), *branch_weights, *layers[0], *layers[inside - 1], *end, first,
        L, *strides, H, INPUTS=len(xs), D=D, W=W, M=M, F=F, LAYERS=inside, SCORES=whole, **t.blocks, **t.options,
    )  # fmt: skip
    if whole:
        return out
    t = layer_tile(arch, M, dtype)
    grid = triton.cdiv(L, t.blocks["BLOCK_L"]), B * H
    x = first
    for i, layer in enumerate(layers[1:], 2):
        last = i == len(layers)
        y = out if last else torch.empty_like(x)
        mlp_layer[grid](x, *layer, *end, y, L, H, M=M, SCORES=last, **t.blocks, **t.options)
        x = y
    return out


TRUNKS = ("TRUNK", "TRUNK_BIAS", "GAIN", "OFFSET")
WEIGHTS = ("WEIGHT0", "BIAS0", "WEIGHT1", "BIAS1", *TRUNKS, *(f"{name}2" for name in TRUNKS), "HEAD")
FLOATS = ("FEATURES", "MEAN0", "DEVIATION0", "MEAN1", "DEVIATION1", "SCALE", "SHIFT")
STRIDES = tuple(f"x{i}_{name}" for i in (0, 1) for name in ("batch", "head", "row"))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def entries(arch: Arch) -> list[Entry]:
    """For the compile gate: our widths with every type of cache and weights, and the published ones."""
    found = []
    for read, kind, D, W, M, F in [
        ("bf16", "fp32", 64, 32, 64, 3),
        ("fp32", "fp32", 64, 32, 64, 3),
        ("bf16", "fp32", 128, 32, 64, 3),
        ("bf16", "bf16", 128, 32, 64, 3),
        ("bf16", "fp32", 128, 256, 256, 32),
        ("bf16", "bf16", 128, 256, 256, 32),
    ]:
        narrow = M <= NARROW
        types = {**dict.fromkeys(WEIGHTS, f"*{kind}"), **dict.fromkeys(FLOATS, "*fp32"), "X0": f"*{read}", "X1": f"*{read}", "L": "i32"}
        types |= {"OUT": "*fp32" if narrow else f"*{kind}", **dict.fromkeys(STRIDES, "i64"), "H": "i32"}
        t = tile(arch, D, W, M, F, DTYPES[kind])
        rows, k = t.blocks["BLOCK_L"], t.blocks["BLOCK_K"]
        loop = Loop(bytes=rows * k * 2 if narrow else 0, flops=2 * rows * k * t.blocks["BLOCK_W"]) if k < D else None
        constants = {"INPUTS": 2, "D": D, "W": W, "M": M, "F": F, "LAYERS": 2 if narrow else 1, "SCORES": narrow}
        found.append(Entry(mlp_first, f"{read} x {kind} D={D} {W}/{M}", types, constants, t, STRIDES, loop))
    for kind in ("bf16", "fp32"):
        types = {"X": f"*{kind}", **dict.fromkeys((*TRUNKS, "HEAD"), f"*{kind}"), **dict.fromkeys(("SCALE", "SHIFT", "OUT"), "*fp32")}
        t = layer_tile(arch, 256, DTYPES[kind])
        rows, k = t.blocks["BLOCK_L"], t.blocks["BLOCK_K"]
        loop = Loop(bytes=rows * k * DTYPES[kind].itemsize, flops=2 * rows * k * 256)
        found.append(Entry(mlp_layer, f"{kind} 256", types | {"L": "i32", "H": "i32"}, {"M": 256, "SCORES": True}, t, (), loop))
    return found
