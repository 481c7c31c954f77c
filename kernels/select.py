"""Which slots stay: the best of every row by its exact k-th key, without sorting; and which slot goes, where one must."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels.entry import Arch, Entry, Loop, Tile, arch_of
from learnkv.kernels.reference import check_scores

# a key is 64 bits, the score's 32 above the position's 32; it is found from the top, 8 bits a step
BITS = tl.constexpr(8)
BINS = tl.constexpr(256)
SCORE_STEPS = tl.constexpr(4)
STEPS = tl.constexpr(8)
MINUS_INFINITY = tl.constexpr(-2139095041)  # what `score_word` makes of it

ROW_BLOCKS = (256, 1024, 4096, 8192)  # rows up to the last fit in the registers of one program


@triton.jit
def score_word(score):
    """int32 that order as scores do: NaN as -inf, -0.0 as 0.0.  Integers only, so that no flushed denormal makes a tie."""
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, -8388608, bits)  # NaN: the bits of -inf
    bits = tl.where(bits == -2147483648, 0, bits)  # -0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unsigned(word):
    """uint32 that order as int32 do."""
    return (word ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def shift_of(step):
    """uint32 bits below the digit of a step, in its word."""
    return (24 - (step % SCORE_STEPS) * BITS).to(tl.uint32)


@triton.jit
def digit_of(score, position, high, low, step):
    """The digit that a step looks at, and whether all above it is what was found before.  score, position: unsigned words."""
    of_score = step < SCORE_STEPS
    shift = shift_of(step)
    word = tl.where(of_score, score, position)
    found = tl.where(of_score, high, low)
    same = (((word >> shift) >> BITS) == ((found >> shift) >> BITS)) & (score == tl.where(of_score, score, high))
    return ((word >> shift) & (BINS - 1)).to(tl.int32), same


@triton.jit
def descend(counts, high, low, left, step):
    """One digit more of the k-th key, from how many keys have each value there.

    counts     [BINS] int32
    high, low  uint32 words of score and position as far as they are found, 0 below
    left       int32 how many of the keys that begin so are wanted; -1 all of them, 0 none
    """
    digit = tl.arange(0, BINS)
    total = tl.sum(counts, 0)
    left = tl.minimum(left, total)
    above = total - tl.cumsum(counts, 0)  # [BINS] in bins above this one
    here = (above < left) & (above + counts >= left)
    bin = tl.sum(tl.where(here, digit, 0), 0)
    wanted = left - tl.sum(tl.where(here, above, 0), 0)
    wanted = tl.where(wanted == tl.sum(tl.where(here, counts, 0), 0), -1, wanted)
    word = bin.to(tl.uint32) << shift_of(step)
    high = high | tl.where(step < SCORE_STEPS, word, 0).to(tl.uint32)
    low = low | tl.where(step < SCORE_STEPS, 0, word).to(tl.uint32)
    return high, low, tl.where(left > 0, wanted, left)


@triton.jit
def least_word(left):
    """What a chosen slot's word lies above."""
    return tl.where(left == 0, 2147483647, MINUS_INFINITY)


@triton.jit
def most_ties(left):
    """How many slots with the k-th key itself are chosen."""
    return tl.where(left < 0, 2147483647, left)


@triton.jit
def wanted_of(counts, row, L):
    """int32 how many of a row are wanted: its count, 0 to L."""
    return tl.minimum(tl.maximum(tl.load(counts + row), 0), L).to(tl.int32)


@triton.jit(do_not_specialize=["L", "score_stride", "position_stride"])
def select_row(scores, positions, counts, keep, L, score_stride, position_stride, BLOCK_L: tl.constexpr):
    """A short row in one program.  grid (rows,)"""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_L)
    inside = slot < L
    word = score_word(tl.load(scores + row * score_stride + slot, mask=inside, other=float("-inf")))
    live = word > MINUS_INFINITY  # [BLOCK_L]
    score = unsigned(word)
    position = unsigned(tl.load(positions + row * position_stride + slot, mask=inside, other=-1))
    left = wanted_of(counts, row, L)
    high = tl.full([], 0, tl.uint32)
    low = tl.full([], 0, tl.uint32)
    step = tl.full([], 0, tl.int32)
    while (step < STEPS) & (left > 0):
        digit, same = digit_of(score, position, high, low, step)
        high, low, left = descend(tl.histogram(digit, BINS, mask=live & same), high, low, left, step)
        step += 1
    above = (score > high) | ((score == high) & (position > low))
    equal = live & (score == high) & (position == low)
    rank = tl.cumsum(equal.to(tl.int32), 0) - 1
    chosen = (word > least_word(left)) & (above | (equal & (rank < most_ties(left))))
    tl.store(keep + row * L + slot, chosen.to(tl.int8), mask=inside)


@triton.jit
def load_state(states, row):
    """high, low, left as a step left them."""
    high = tl.load(states + row * 3).to(tl.uint32, bitcast=True)
    low = tl.load(states + row * 3 + 1).to(tl.uint32, bitcast=True)
    return high, low, tl.load(states + row * 3 + 2)


@triton.jit
def store_state(states, row, high, low, left):
    tl.store(states + row * 3, high.to(tl.int32, bitcast=True))
    tl.store(states + row * 3 + 1, low.to(tl.int32, bitcast=True))
    tl.store(states + row * 3 + 2, left)


@triton.jit(do_not_specialize=["rows", "tiles", "L", "score_stride", "position_stride", "step"])
def count_digits(scores, positions, counts, states, histograms, rows, tiles, L, score_stride, position_stride, step, BLOCK_L: tl.constexpr):
    """One step of a long row: the digit before is settled by every program, the next one counted by all.  grid (rows * tiles,)

    states      [STEPS + 1, rows, 3] int32
    histograms  [STEPS, rows, BINS] int32, 0 to begin with
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    digits = tl.arange(0, BINS)
    high = tl.full([], 0, tl.uint32)
    low = tl.full([], 0, tl.uint32)
    left = wanted_of(counts, row, L)
    if step > 0:
        high, low, left = load_state(states + (step - 1) * rows * 3, row)
        high, low, left = descend(tl.load(histograms + ((step - 1) * rows + row) * BINS + digits), high, low, left, step - 1)
    if tile == 0:
        store_state(states + step * rows * 3, row, high, low, left)
    if left > 0:
        slot = tile.to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
        inside = slot < L
        word = score_word(tl.load(scores + row * score_stride + slot, mask=inside, other=float("-inf")))
        place = tl.load(positions + row * position_stride + slot, mask=slot < tl.where(step < SCORE_STEPS, 0, L), other=-1)
        digit, same = digit_of(unsigned(word), unsigned(place), high, low, step)
        found = tl.histogram(digit, BINS, mask=same & (word > MINUS_INFINITY))
        tl.atomic_add(histograms + (step * rows + row) * BINS + digits, found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "tiles", "L", "score_stride", "position_stride"])
def count_ties(scores, positions, states, histograms, ties, rows, tiles, L, score_stride, position_stride, BLOCK_L: tl.constexpr):
    """How many slots of a tile have the k-th key itself, where only some of those stay.  grid (rows * tiles,)

    ties  [rows, tiles] int32, left alone where all or none stay
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    high, low, left = load_state(states + (STEPS - 1) * rows * 3, row)
    last = tl.full([], STEPS - 1, tl.int32)
    high, low, left = descend(tl.load(histograms + ((STEPS - 1) * rows + row) * BINS + tl.arange(0, BINS)), high, low, left, last)
    if tile == 0:
        store_state(states + STEPS * rows * 3, row, high, low, left)
    if left > 0:
        slot = tile.to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
        inside = slot < L
        score = unsigned(score_word(tl.load(scores + row * score_stride + slot, mask=inside, other=float("-inf"))))
        position = unsigned(tl.load(positions + row * position_stride + slot, mask=inside, other=-1))
        equal = inside & (score == high) & (position == low)
        tl.store(ties + row * tiles + tile, tl.sum(equal.to(tl.int32), 0))


@triton.jit(do_not_specialize=["rows", "tiles", "L", "score_stride", "position_stride"])
def mark(
    scores,
    positions,
    states,
    ties,
    keep,
    rows,
    tiles,
    L,
    score_stride,
    position_stride,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Everything above the k-th key stays, and of the slots that have it the first ones.  grid (rows * tiles,)"""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    high, low, left = load_state(states + STEPS * rows * 3, row)
    slot = tile.to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    inside = slot < L
    word = score_word(tl.load(scores + row * score_stride + slot, mask=slot < tl.where(left == 0, 0, L), other=float("-inf")))
    live = word > least_word(left)  # [BLOCK_L]
    score = unsigned(word)
    position = unsigned(tl.load(positions + row * position_stride + slot, mask=live & (score == high), other=-1))
    equal = live & (score == high) & (position == low)
    before = tl.full([], 0, tl.int32)
    if left > 0:
        for start in range(0, tile, BLOCK_T):
            other = start + tl.arange(0, BLOCK_T)
            before += tl.sum(tl.load(ties + row * tiles + other, mask=other < tile, other=0), 0)
    rank = before + tl.cumsum(equal.to(tl.int32), 0) - 1
    above = (score > high) | ((score == high) & (position > low))
    chosen = live & (above | (equal & (rank < most_ties(left))))
    tl.store(keep + row * L + slot, chosen.to(tl.int8), mask=inside)


def row_tile(L: int) -> Tile | None:
    """`select_row`, None for rows longer than the last of ROW_BLOCKS."""
    block = next((size for size in ROW_BLOCKS if size >= L), None)
    return None if block is None else Tile({"BLOCK_L": block}, warps=max(4, block // 512), stages=1)


def tile(arch: Arch) -> Tile:
    """`count_digits` and `count_ties`; `mark` beside its BLOCK_T."""
    return Tile({"BLOCK_L": 2048}, warps=8, stages=1)


def mark_tile(arch: Arch) -> Tile:
    return Tile({**tile(arch).blocks, "BLOCK_T": 256}, warps=8, stages=1)


def evict_tile(arch: Arch) -> Tile:
    return Tile({"BLOCK_L": 2048}, warps=8, stages=1)


def as_rows(x: Tensor) -> Tensor:
    """[..., L] -> [rows, L] with the numbers of a row side by side; a view where that can be one."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def select(scores: Tensor, positions: Tensor, count: Tensor) -> Tensor:
    """As reference.select: one launch for rows of up to 8,192, eleven for longer ones; asks the device nothing."""
    check_scores("select", scores)
    assert positions.dtype == torch.int32, f"{positions.dtype} positions"
    keep = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    if not keep.numel():
        return keep
    count = count.expand(scores.shape[:-1]).reshape(-1).long().contiguous()  # a view of one number else
    scores, positions = as_rows(scores), as_rows(positions.expand(scores.shape))
    rows, L = scores.shape
    flags, strides, arch = keep.view(torch.int8), (scores.stride(0), positions.stride(0)), arch_of(scores)
    if (small := row_tile(L)) is not None:
        select_row[(rows,)](scores, positions, count, flags, L, *strides, **small.blocks, **small.options)
        return keep
    step_tile, last = tile(arch), mark_tile(arch)
    tiles = triton.cdiv(L, step_tile.blocks["BLOCK_L"])
    grid, sizes = (rows * tiles,), (rows, tiles, L, *strides)
    states = torch.empty(STEPS.value + 1, rows, 3, dtype=torch.int32, device=scores.device)
    histograms = torch.zeros(STEPS.value, rows, BINS.value, dtype=torch.int32, device=scores.device)
    ties = torch.empty(rows, tiles, dtype=torch.int32, device=scores.device)
    for step in range(STEPS.value):
        count_digits[grid](scores, positions, count, states, histograms, *sizes, step, **step_tile.blocks, **step_tile.options)
    count_ties[grid](scores, positions, states, histograms, ties, *sizes, **step_tile.blocks, **step_tile.options)
    mark[grid](scores, positions, states, ties, flags, *sizes, **last.blocks, **last.options)
    return keep


@triton.jit(do_not_specialize=["L", "score_stride", "position_stride", "protected_stride"])
def worst_slot(scores, positions, protected, slots, L, score_stride, position_stride, protected_stride, BLOCK_L: tl.constexpr):
    """The slot with the lowest key of those that may go, -1 where none may.  grid (heads,)"""
    head = tl.program_id(0).to(tl.int64)
    lowest = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    worst = tl.full([], -1, tl.int64)
    for start in range(0, L, BLOCK_L):
        slot = start + tl.arange(0, BLOCK_L)
        position = tl.load(positions + head * position_stride + slot, mask=slot < L, other=-1)
        filled = position >= 0
        free = filled & (tl.load(protected + head * protected_stride + slot, mask=filled, other=1) == 0)
        word = score_word(tl.load(scores + head * score_stride + slot, mask=free, other=float("inf")))
        key = tl.where(free, word.to(tl.int64) * 4294967296 + position, 0x7FFFFFFFFFFFFFFF)  # [BLOCK_L]
        here = tl.min(key, 0)
        last = tl.max(tl.where(free & (key == here), slot, -1), 0)
        found = (last >= 0) & (here <= lowest)
        lowest = tl.where(found, here, lowest)
        worst = tl.where(found, last.to(tl.int64), worst)
    tl.store(slots + head, worst)


def evict_slot(scores: Tensor, positions: Tensor, protected: Tensor) -> Tensor:
    """As reference.evict_slot: one launch, asks the device nothing."""
    check_scores("evict_slot", scores)
    assert positions.dtype == torch.int32, f"{positions.dtype} positions"
    L = scores.shape[-1]
    slots = torch.full(scores.shape[:-1], -1, dtype=torch.int64, device=scores.device)
    if scores.numel():
        scores, positions, flags = as_rows(scores), as_rows(positions), as_rows(protected.view(torch.int8))
        strides, shape = (scores.stride(0), positions.stride(0), flags.stride(0)), evict_tile(arch_of(scores))
        worst_slot[(len(scores),)](scores, positions, flags, slots, L, *strides, **shape.blocks, **shape.options)
    return slots


def entries(arch: Arch) -> list[Entry]:
    """What the launchers above can launch."""
    data = {"scores": "*fp32", "positions": "*i32", "counts": "*i64", "keep": "*i8", "states": "*i32", "histograms": "*i32", "ties": "*i32"}
    sizes = {name: "i32" for name in ("rows", "tiles", "L", "score_stride", "position_stride", "step")}
    found = [Entry(select_row, f"L<={block}", {**data, **sizes}, {}, shape) for block in ROW_BLOCKS if (shape := row_tile(block))]
    loop = Loop(bytes=9 * evict_tile(arch).blocks["BLOCK_L"])  # score, position and flag
    evict = {"scores": "*fp32", "positions": "*i32", "protected": "*i8", "slots": "*i64", **sizes, "protected_stride": "i32"}
    return [
        *found,
        Entry(count_digits, "long rows", {**data, **sizes}, {}, tile(arch)),
        Entry(count_ties, "long rows", {**data, **sizes}, {}, tile(arch)),
        Entry(mark, "long rows", {**data, **sizes}, {}, mark_tile(arch)),
        Entry(worst_slot, "any L", evict, {}, evict_tile(arch), loop=loop),
    ]
