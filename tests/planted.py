"""Kernels that are wrong on purpose, one fault each: what every check has to find, in the interpreter or in the compiled code."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unmasked_load(KEYS, OUT, length, BLOCK_L: tl.constexpr):
    """The last program reads past the tensor; its store is masked."""
    at = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    tl.store(OUT + at, tl.load(KEYS + at), mask=at < length)


@triton.jit
def narrow_row(KEYS, OUT, row, D: tl.constexpr):
    """row * D wraps around in int32."""
    at = tl.arange(0, D)
    tl.store(OUT + at, tl.load(KEYS + row * D + at))


@triton.jit
def racy_compaction(KEYS, CHOSEN, count, D: tl.constexpr, BLOCK_L: tl.constexpr):
    """Kept rows move to the front of their own tensor, each block by one program, while another one may still have to read there."""
    at = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    columns = tl.arange(0, D)
    source = tl.load(CHOSEN + at, mask=at < count, other=0).to(tl.int64)
    inside = (at < count)[:, None] & (columns < D)[None, :]
    rows = tl.load(KEYS + source[:, None] * D + columns[None, :], mask=inside, other=0.0)
    tl.store(KEYS + at.to(tl.int64)[:, None] * D + columns[None, :], rows, mask=inside)


@triton.jit
def spilling_tile(KEYS, OUT, D: tl.constexpr, BLOCK_L: tl.constexpr):
    """The whole tile and its products stay in the registers of one warp."""
    rows, columns = tl.arange(0, BLOCK_L).to(tl.int64), tl.arange(0, D)
    at = rows[:, None] * D + columns[None, :]
    keys = tl.load(KEYS + at).to(tl.float32)  # [BLOCK_L, D]
    squares = keys * tl.sum(keys, 1)[:, None]
    tl.store(OUT + at, keys + squares / tl.sum(squares, 0)[None, :])


@triton.jit
def bf16_sum(KEYS, OUT, BLOCK_L: tl.constexpr):
    """Adds before it casts."""
    at = tl.arange(0, BLOCK_L)
    keys = tl.load(KEYS + at)
    tl.store(OUT + at, keys + keys)


@triton.jit
def double_write(OUT, BLOCK_L: tl.constexpr):
    """Two elements of one store share an address."""
    at = tl.arange(0, BLOCK_L)
    tl.store(OUT + at // 2, at.to(tl.float32))


@triton.jit
def shared_row(OUT, D: tl.constexpr):
    """Every program stores to the same row."""
    at = tl.arange(0, D)
    tl.store(OUT + at, at.to(tl.float32))


@triton.jit
def read_back(KEYS, OUT, TOTAL, BLOCK_L: tl.constexpr, BARRIER: tl.constexpr):
    """Reads what other warps of the program have stored, with or without a barrier between."""
    at = tl.arange(0, BLOCK_L)
    tl.store(OUT + at, tl.load(KEYS + at))
    if BARRIER:
        tl.debug_barrier()
    tl.store(TOTAL, tl.sum(tl.load(OUT + BLOCK_L - 1 - at), 0))


@triton.jit
def float_atomic(KEYS, TOTAL, BLOCK_L: tl.constexpr):
    """A sum whose last bits are those of the order of programs."""
    at = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    tl.atomic_add(TOTAL, tl.sum(tl.load(KEYS + at), 0))


# ---- int32 offsets on KEYS that wrap around, by where they come from


@triton.jit
def narrow_tile(KEYS, OUT, table, stride, length, D: tl.constexpr, BLOCK_L: tl.constexpr):
    """Row times D, the row from a program id."""
    at = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    tl.store(OUT + at, tl.load(KEYS + at * D, mask=at < length, other=0.0), mask=at < length)


@triton.jit
def narrow_stride(KEYS, OUT, table, stride, length, D: tl.constexpr, BLOCK_L: tl.constexpr):
    """Row times a run-time stride."""
    at = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    tl.store(OUT + at, tl.load(KEYS + at * stride, mask=at < length, other=0.0), mask=at < length)


@triton.jit
def narrow_page(KEYS, OUT, table, stride, length, D: tl.constexpr, BLOCK_L: tl.constexpr):
    """Page from memory times slots of a page."""
    at = tl.arange(0, BLOCK_L)
    page = tl.load(table + tl.program_id(0))
    tl.store(OUT + at, tl.load(KEYS + page * length + at))


@triton.jit
def late_cast(KEYS, OUT, table, stride, length, D: tl.constexpr, BLOCK_L: tl.constexpr):
    """Cast to int64 only after the product has wrapped."""
    at = tl.arange(0, BLOCK_L)
    page = tl.load(table + tl.program_id(0))
    tl.store(OUT + at, tl.load(KEYS + (page * D).to(tl.int64) + at))


@triton.jit
def narrow_counter(KEYS, OUT, table, stride, length, D: tl.constexpr, BLOCK_L: tl.constexpr):
    """A loop counts up to an int32 product."""
    at = tl.arange(0, BLOCK_L)
    for i in range(0, length * stride, BLOCK_L):
        tl.store(OUT + at, tl.load(KEYS + i + at))


@triton.jit
def narrow_branch(KEYS, OUT, table, stride, length, D: tl.constexpr, BLOCK_L: tl.constexpr):
    """One of two branches takes an int32 product."""
    at = tl.arange(0, BLOCK_L)
    first = length
    if length > 7:
        first = length * stride
    tl.store(OUT + at, tl.load(KEYS + first + at))


@triton.jit
def narrow_step(KEYS, OUT, table, stride, length, D: tl.constexpr, BLOCK_L: tl.constexpr):
    """A pointer that a loop carries moves by an int32 product."""
    at = tl.arange(0, BLOCK_L)
    total = tl.zeros([BLOCK_L], tl.float32)
    for i in range(length):
        total += tl.load(KEYS + at)
        KEYS += i * stride
    tl.store(OUT + at, total)


# ---- and right ones beside them


@triton.jit
def wide_tile(KEYS, OUT, stride, length, D: tl.constexpr, BLOCK_L: tl.constexpr):
    """Row times D and times an int64 stride, in int64; the tile itself in int32."""
    at = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    keys = tl.load(KEYS + at.to(tl.int64) * D + at * stride, mask=at < length, other=0.0)
    tl.store(OUT + at, keys, mask=at < length)


@triton.jit
def held_split(KEYS, OUT, stride, length, D: tl.constexpr, BLOCK_L: tl.constexpr):
    """Slots of a split, counted by a loop that ends at `length`."""
    at = tl.arange(0, BLOCK_L)
    total = tl.zeros([BLOCK_L], tl.float32)
    for first in range(tl.program_id(1) * length, tl.minimum(tl.program_id(1) * length + length, length), BLOCK_L):
        total += tl.load(KEYS + (first.to(tl.int64) + at) * D)
    tl.store(OUT + at, total)
