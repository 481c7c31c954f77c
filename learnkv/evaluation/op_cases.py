"""The cases of `bench kernels`: each op at sizes that matter, with what else computes it and what it cannot do without."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from learnkv import ops
from learnkv.evaluation.roofline import Case, Prepared, Work

PAGE = 16
EAGER_LOGITS = 1 << 28  # a baseline that holds more of them at once is left out


@dataclass(frozen=True)
class Shape:
    """B sequences, H kv heads, G query heads to each, D head_dim, N tokens."""

    B: int
    H: int
    G: int
    D: int
    N: int

    def __str__(self) -> str:
        rows = f"{self.B} x " if self.B > 1 else ""
        return f"{rows}{self.N:,} tokens, {self.H} x {self.G} heads of {self.D}"

    @property
    def Q(self) -> int:
        return self.H * self.G

    @property
    def slots(self) -> int:
        return self.B * self.H * self.N

    def bytes(self, dtype: torch.dtype) -> int:
        """Of all keys, or all values."""
        return self.slots * self.D * dtype.itemsize

    @property
    def scale(self) -> float:
        return self.D**-0.5


LARGE = Shape(1, 8, 4, 128, 131072)  # a layer of an 8 B model at 128k
MIDDLE = Shape(1, 8, 4, 128, 32768)
BATCH = Shape(8, 8, 4, 128, 16384)
SMALL = Shape(1, 3, 3, 64, 8192)  # a layer of the bundled model
TINY = Shape(2, 2, 3, 64, 130)

Sizes = Literal["gpu", "laptop", "tiny"]
SHAPES: dict[Sizes, list[Shape]] = {"gpu": [LARGE, MIDDLE, BATCH, SMALL], "laptop": [SMALL], "tiny": [TINY]}
SQUARE: dict[Sizes, list[Shape]] = {"gpu": [replace(LARGE, N=8192), MIDDLE], "laptop": [replace(SMALL, N=1024)], "tiny": [TINY]}
ROWS: dict[Sizes, tuple[int, int]] = {"gpu": (64, 131072), "laptop": (24, 4096), "tiny": (3, 130)}  # of the training ops


def cases(sizes: Sizes) -> Iterator[Case]:
    """All ops, those that matter most first: "gpu" for an H200, "laptop" for a CPU in minutes, "tiny" to see whether they are right."""
    for shape in SHAPES[sizes]:
        for tokens in (shape.N, max(1, shape.N // 8)):
            yield decoding(shape, tokens, ragged=True)
        yield decoding(shape, shape.N, ragged=False)
        yield decoding_with_mass(shape)
        yield from (window_mass(shape, 32, given=given) for given in (True, False))
        yield from (selection(shape, kept, together=together) for kept in (0.25, 1 / 32) for together in (False, True))
        yield from (compaction(shape, kept) for kept in (0.5, 0.25, 1 / 32))
        yield appending(shape)
        yield page_extremes(shape)
        yield page_bounds(shape)
        yield network(shape, 64, 128)
        yield sink_gate(shape)
    yield from (square_mass(shape) for shape in SQUARE[sizes])
    yield picks(*ROWS[sizes])
    yield rewards(*ROWS[sizes])


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, the same in every run."""
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)


def plainly(op: Callable[..., Tensor], *args: object, **options: object) -> Tensor:
    """What plain torch says of the same tensors in float32."""
    with ops.use("reference"):
        return op(*(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args), **options)


def compiled(device: torch.device, op: Callable, *args: object) -> dict[str, Callable[[], object]]:
    """torch.compile of the plain torch of an op, on a GPU; elsewhere the op is plain torch, and a compiler is seldom there."""
    if device.type != "cuda":
        return {}
    fast = torch.compile(inspect.unwrap(op))
    return {"torch.compile": lambda: fast(*args)}


# ---- attention


@dataclass(frozen=True)
class Paged:
    """Keys and values in shuffled pages, heads of `lengths` tokens."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    table: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, shape: Shape, lengths: Tensor, device: torch.device, dtype: torch.dtype) -> Paged:
        counts = -(-lengths // PAGE)
        N, column = int(counts.sum()), torch.arange(int(counts.max()), device=device)
        order = torch.randperm(N, generator=torch.Generator(device).manual_seed(1), device=device, dtype=torch.int32)
        table = torch.full((*lengths.shape, len(column)), -1, dtype=torch.int32, device=device)
        table[column < counts[..., None]] = order
        positions = torch.full((N, PAGE), -1, dtype=torch.int32, device=device)
        slots = column[:, None] * PAGE + torch.arange(PAGE, device=device)
        held = torch.where(slots < lengths[..., None, None], slots, -1).int()  # [B, H, pages, P]
        positions[table[table >= 0].long()] = held[table >= 0]
        keys, values = (normal(N, PAGE, shape.D, device=device, dtype=dtype) for _ in range(2))
        values = values.roll(1, 0).masked_fill((positions < 0)[..., None], 0)
        return cls(keys, values, positions, table, lengths)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.keys, self.values, self.positions, self.table

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, L, D], padded."""
        with ops.use("reference"):
            keys, values = (ops.gather_pages(pages, self.table, self.lengths) for pages in (self.keys, self.values))
        return keys, values


def lengths_of(shape: Shape, tokens: int, ragged: bool, device: torch.device) -> Tensor:
    """[B, H] int64 tokens of each head, `tokens` in the mean; ragged ones fall from head to head as 1 / rank."""
    rank = torch.arange(1, shape.H + 1, device=device)
    share = (1 / rank) / (1 / rank).sum() * shape.H if ragged else torch.ones(shape.H, device=device)
    return (share * tokens).long().clamp(min=1).expand(shape.B, -1).contiguous()


def decoding(shape: Shape, tokens: int, *, ragged: bool) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        held = Paged.of(shape, lengths_of(shape, tokens, ragged, device), device, dtype)
        queries = normal(shape.B, shape.Q, 1, shape.D, device=device, dtype=dtype)
        now = torch.full((shape.B, 1), int(held.lengths.max()), device=device)
        whose = ops.owners(held.table, held.positions)
        keys, values = held.dense()
        seen = torch.arange(keys.shape[2], device=device) < held.lengths[..., None]  # [B, H, L]
        mask = seen.repeat_interleave(shape.G, 1)[:, :, None] if ragged else None
        dense = lambda: F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)  # noqa: E731
        return Prepared(
            run=lambda: ops.attend(queries, *held.arguments, now, shape.scale, whose, causal=False),
            want=lambda: plainly(ops.attend, queries, *held.arguments, now, shape.scale),
            baselines={"masked sdpa of padded heads" if ragged else "sdpa": dense, **({} if ragged else flex(queries, keys, values))},
        )

    def work(dtype: torch.dtype) -> Work:
        total = int(lengths_of(shape, tokens, ragged, torch.device("cpu")).sum())
        return Work(2 * total * shape.D * dtype.itemsize, 4 * total * shape.G * shape.D, total * shape.G)

    return Case("attend", f"one query, {tokens:,} {'ragged' if ragged else 'each'}, {shape}", prepare, work, 1.2)


def flex(queries: Tensor, keys: Tensor, values: Tensor) -> dict[str, Callable[[], object]]:
    """Flex attention compiled, on a GPU."""
    if not queries.is_cuda:
        return {}
    fast = torch.compile(flex_attention)
    return {"flex attention": lambda: fast(queries, keys, values, enable_gqa=True)}


def decoding_with_mass(shape: Shape) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        held = Paged.of(shape, lengths_of(shape, shape.N, False, device), device, dtype)
        queries = normal(shape.B, shape.Q, 1, shape.D, device=device, dtype=dtype)
        now = torch.full((shape.B, 1), shape.N, device=device)
        keys, values = held.dense()
        run = lambda: ops.attend_with_mass(queries, *held.arguments, now, shape.scale)[1]  # noqa: E731
        with ops.use("reference"):
            want = ops.attend_with_mass(queries.float(), held.keys.float(), held.values.float(), *held.arguments[2:], now, shape.scale)[1]
        return Prepared(
            run=run,
            want=lambda: want,
            baselines={"softmax of all logits": lambda: weighed(queries, keys, values, shape)},
        )

    def work(dtype: torch.dtype) -> Work:
        return Work(2 * shape.bytes(dtype) + 4 * shape.slots, 4 * shape.slots * shape.G * shape.D, shape.slots * shape.G)

    return Case("attend_with_mass", f"one query, {shape}", prepare, work, 1.3)


def weighed(queries: Tensor, keys: Tensor, values: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Attention and mass from all logits at once, the group packed."""
    grouped = queries.view(shape.B, shape.H, -1, shape.D) * shape.scale
    weights = (grouped @ keys.mT).float().softmax(-1)
    return weights.to(values.dtype) @ values, weights.sum(2)


# ---- scoring


def window_mass(shape: Shape, window: int, *, given: bool) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        queries = normal(shape.B, shape.Q, window, shape.D, device=device, dtype=dtype)
        keys = normal(shape.B, shape.H, shape.N, shape.D, device=device, dtype=dtype)
        at = places(shape, window, device)
        lse = ops.row_lse(queries, keys, *at, shape.scale) if given else None
        return Prepared(
            run=lambda: ops.column_mass(queries, keys, *at, shape.scale, over_group="mean", over_queries="mean", lse=lse),
            want=lambda: plainly(ops.column_mass, queries, keys, *at, shape.scale, over_group="mean", over_queries="mean"),
            baselines={"eager SnapKV": lambda: eager_snapkv(queries, keys, shape)}
            if window * shape.G * shape.slots <= EAGER_LOGITS
            else {},
        )

    def work(dtype: torch.dtype) -> Work:
        passes, pairs = 1 if given else 2, shape.G * shape.slots * window
        queries = shape.B * shape.Q * window * shape.D * dtype.itemsize
        return Work(passes * shape.bytes(dtype) + queries + 4 * shape.slots, passes * 2 * pairs * shape.D, passes * pairs)

    return Case("column_mass", f"last {window} queries, log-sum-exp {'given' if given else 'computed'}, {shape}", prepare, work, 1.5)


def places(shape: Shape, window: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of the last `window` queries [B, T] and of all keys [B, H, N]."""
    all_of_them = torch.arange(shape.N, device=device, dtype=torch.int32)
    return all_of_them[-window:].long().expand(shape.B, -1), all_of_them.expand(shape.B, shape.H, -1)


def eager_snapkv(queries: Tensor, keys: Tensor, shape: Shape) -> Tensor:
    """Mean attention of the window in plain torch, keys repeated, causal at the end."""
    W = queries.shape[2]
    logits = queries @ keys.repeat_interleave(shape.G, 1).mT * shape.scale
    later = torch.ones(W, W, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., -W:].masked_fill_(later, float("-inf"))
    return logits.float().softmax(-1).mean(2).view(shape.B, shape.H, shape.G, -1).mean(2)


def square_mass(shape: Shape) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        queries = normal(shape.B, shape.Q, shape.N, shape.D, device=device, dtype=dtype)
        keys, at = normal(shape.B, shape.H, shape.N, shape.D, device=device, dtype=dtype), places(shape, shape.N, device)
        lse = ops.row_lse(queries, keys, *at, shape.scale)
        forward = lambda: F.scaled_dot_product_attention(queries, keys, keys, is_causal=True, enable_gqa=True)  # noqa: E731
        return Prepared(
            run=lambda: ops.column_mass(queries, keys, *at, shape.scale, lse=lse),
            want=lambda: plainly(ops.column_mass, queries, keys, *at, shape.scale),
            baselines={"the forward's own attention (sdpa)": forward},
        )

    def work(dtype: torch.dtype) -> Work:
        pairs = shape.B * shape.Q * shape.N * (shape.N + 1) // 2
        return Work((1 + shape.G) * (shape.bytes(dtype) + 4 * shape.slots), 2 * pairs * shape.D, pairs)

    return Case("column_mass", f"all queries, {shape}", prepare, work, 1.3)


def network(shape: Shape, branch: int, width: int) -> Case:
    """KVP's network: a branch of keys, one of values, a trunk of two layers."""

    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        H, D, F = shape.H, shape.D, 1
        inputs = [normal(shape.B, H, shape.N, D, device=device, dtype=dtype) for _ in range(2)]
        features = normal(shape.B, H, shape.N, F, device=device)
        still = torch.zeros(H, D, device=device), torch.ones(H, D, device=device)
        branches = [ops.BranchWeights(*still, *weights(device, (H, D, branch), (H, branch))) for _ in range(2)]
        widths = [2 * branch + F, width, width]
        trunk = [ops.TrunkWeights(*weights(device, (H, i, o), (H, o), (H, o), (H, o))) for i, o in pairwise(widths)]
        ends = weights(device, (H, width), (H,), (H,))
        return Prepared(
            run=lambda: ops.mlp_scorer(inputs, features, branches, trunk, *ends),
            want=lambda: plainly(ops.mlp_scorer, [x.float() for x in inputs], features, branches, trunk, *ends),
            baselines=compiled(device, ops.mlp_scorer, inputs, features, branches, trunk, *ends),
        )

    def work(dtype: torch.dtype) -> Work:
        per_token = 2 * shape.D * branch + (2 * branch + 1) * width + width * width + width
        return Work(2 * shape.bytes(dtype) + 8 * shape.slots, 2 * shape.slots * per_token)

    return Case("mlp_scorer", f"branches of {branch}, trunk of {width}, {shape}", prepare, work, 2.0)


def weights(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    """One tensor per shape, small enough to keep activations near 1."""
    return [normal(*shape, device=device) * shape[-1] ** -0.5 for shape in shapes]


def sink_gate(shape: Shape) -> Case:
    """Fast KVzip's gate after its projections, 16 numbers a head and 16 sinks."""

    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        queries = normal(shape.B, shape.Q, shape.N, 16, device=device, dtype=dtype)
        keys = normal(shape.B, shape.H, shape.N, 16, device=device, dtype=dtype).roll(1, 2)
        rest = weights(device, (16,), (16,), (shape.H, 16, 16), (shape.H, shape.G))
        return Prepared(
            run=lambda: ops.gate_scorer(queries, keys, *rest),
            want=lambda: plainly(ops.gate_scorer, queries, keys, *rest),
            baselines=compiled(device, ops.gate_scorer, queries, keys, *rest),
        )

    def work(dtype: torch.dtype) -> Work:
        read = shape.slots * (1 + shape.G) * 16 * dtype.itemsize
        return Work(read + 4 * shape.slots, 2 * shape.slots * shape.G * 17 * 16, shape.slots * shape.G * 17)

    return Case("gate_scorer", f"16 sinks, {shape}", prepare, work, 1.5)


# ---- eviction


def selection(shape: Shape, kept: float, *, together: bool) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        rows = shape.B if together else shape.B * shape.H
        scores = normal(rows, shape.slots // rows, device=device)
        positions = torch.arange(scores.shape[1], dtype=torch.int32, device=device).expand_as(scores)
        k = max(1, int(kept * scores.shape[1]))
        count = torch.full((rows,), k, device=device)
        return Prepared(
            run=lambda: ops.select(scores, positions, count),
            want=lambda: plainly(ops.select, scores, positions, count),
            baselines={"topk": lambda: scores.topk(k, -1, sorted=False), "sort": lambda: scores.sort(-1)},
        )

    def work(dtype: torch.dtype) -> Work:
        return Work(5 * shape.slots)

    return Case("select", f"{kept:.0%} of {'all heads' if together else 'each head'}, {shape}", prepare, work, 4.0)


def compaction(shape: Shape, kept: float) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        held = Paged.of(shape, lengths_of(shape, shape.N, False, device), device, dtype)
        memory = normal(len(held.keys), PAGE, 1, device=device)
        keep = torch.rand(shape.B, shape.H, shape.N, generator=torch.Generator(device).manual_seed(2), device=device) < kept
        twin = [x.clone() for x in (held.keys, held.values, held.positions, memory)]
        keys, values = held.dense()
        index = keep.int().topk(int(keep.sum(-1).max()), -1).indices[..., None].expand(-1, -1, -1, shape.D)

        def run() -> Tensor:
            ops.compact(held.keys, held.values, held.positions, memory, held.table, held.lengths, keep)
            return held.keys

        def want() -> Tensor:
            with ops.use("reference"):
                ops.compact(twin[0], twin[1], twin[2], twin[3], held.table, held.lengths, keep)
            return twin[0]

        return Prepared(
            run=run,
            want=want,
            baselines={"gather to new tensors": lambda: (keys.gather(2, index), values.gather(2, index))},
        )

    def work(dtype: torch.dtype) -> Work:
        moved = kept * (1 - kept)  # of all slots, where any is as likely to stay
        return Work(int(4 * moved * shape.bytes(dtype)) + shape.slots)

    return Case("compact", f"to {kept:.0%}, {shape}", prepare, work, 1.5)


def appending(shape: Shape) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        held = Paged.of(shape, lengths_of(shape, shape.N, False, device), device, dtype)
        lengths, now = held.lengths - 1, torch.full((shape.B, 1), shape.N - 1, device=device)
        new = normal(shape.B, shape.H, 1, shape.D, device=device, dtype=dtype)
        keys, values = held.dense()
        run = lambda: ops.append_kv(*held.arguments, lengths, new, new, now)  # noqa: E731
        return Prepared(
            run=run,
            want=lambda: lengths[..., None],
            baselines={"torch.cat": lambda: (torch.cat([keys, new], 2), torch.cat([values, new], 2))},
        )

    def work(dtype: torch.dtype) -> Work:
        return Work(4 * shape.bytes(dtype) // shape.N)

    return Case("append_kv", f"one token, {shape}", prepare, work, 10.0)


# ---- pages


def page_extremes(shape: Shape) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        held = Paged.of(shape, lengths_of(shape, shape.N, False, device), device, dtype)
        return Prepared(
            run=lambda: ops.page_minmax(held.keys, held.positions)[0],
            want=lambda: held.keys.float().masked_fill((held.positions < 0)[..., None], float("inf")).amin(1),
            baselines={"amin and amax": lambda: (held.keys.amin(1), held.keys.amax(1))},
        )

    def work(dtype: torch.dtype) -> Work:
        return Work(shape.bytes(dtype) * (PAGE + 2) // PAGE)

    return Case("page_minmax", f"{shape}", prepare, work, 1.3)


def page_bounds(shape: Shape) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        held = Paged.of(shape, lengths_of(shape, shape.N, False, device), device, dtype)
        low, high = ops.page_minmax(held.keys, held.positions)
        queries = normal(shape.B, shape.Q, shape.D, device=device, dtype=dtype)
        return Prepared(
            run=lambda: ops.page_bound(queries, low, high, held.table),
            want=lambda: plainly(ops.page_bound, queries, low, high, held.table),
            baselines=compiled(device, ops.page_bound, queries, low, high, held.table),
        )

    def work(dtype: torch.dtype) -> Work:
        return Work(2 * shape.bytes(dtype) // PAGE, 4 * shape.slots // PAGE * shape.G * shape.D)

    return Case("page_bound", f"{shape}", prepare, work, 1.5)


# ---- training


def picks(rows: int, n: int) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        scores, weight = normal(rows, n, device=device), normal(rows, n, device=device).flip(-1)
        rest = lambda x: x - x.flip(-1).logcumsumexp(-1).flip(-1)  # noqa: E731
        return Prepared(
            run=lambda: gradient(ops.pl_logprob, scores, weight),
            want=lambda: gradient(rest, scores.double(), weight.double()),
            baselines={"logcumsumexp": lambda: gradient(rest, scores, weight)},
        )

    def work(dtype: torch.dtype) -> Work:
        return Work(5 * 4 * rows * n, 0, 2 * rows * n)

    return Case("pl_logprob", f"forward and backward, {rows} rows of {n:,}", prepare, work, 2.0)


def rewards(rows: int, n: int) -> Case:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        utility, weight = normal(rows, n, device=device).abs(), normal(rows, device=device)
        ranks = torch.arange(1, n + 1, device=device, dtype=torch.float32)
        return Prepared(
            run=lambda: gradient(ops.budget_reward, utility, weight),
            want=lambda: gradient(lambda x: -(x * ranks.to(x)).sum(-1), utility.double(), weight.double()),
            baselines={"weighted sum": lambda: gradient(lambda x: -(x * ranks).sum(-1), utility, weight)},
        )

    def work(dtype: torch.dtype) -> Work:
        return Work(2 * 4 * rows * n)

    return Case("budget_reward", f"forward and backward, {rows} rows of {n:,}", prepare, work, 2.0)


def gradient(op: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """d (op(x) * weight).sum() / d x."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad((op(x) * weight).sum(), x)[0]
