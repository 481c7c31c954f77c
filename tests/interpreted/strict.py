"""Triton's interpreter made strict: `with strict(order="shuffle") as run: launch(...)` raises where a GPU would be wrong without a word.

By itself TRITON_INTERPRET=1 takes bfloat16 for uint16, touches any address, and runs programs in grid order only.  Inside `strict()`

values   bfloat16 is rounded to nearest even and tl.dot of it accumulates in float32; other arithmetic on it raises Bf16Arithmetic
bounds   every element touched lies in the view that its pointer's argument is, gaps between rows left out, or OutOfBounds is raised
races    no program touches what another one stores, and none reads or stores again what it stored itself with no barrier since;
         no store names an address twice; no atomic is on floats, whose sum depends on the order: otherwise Race is raised
order    programs run in grid order, in reverse or shuffled by `seed`
bytes    `run.stats[kernel]` is a Traffic, after masking

One program is a sequence of whole-block operations here.  So tensor-float32 and exp2.approx are exact, and a warp that stores over what
another warp of the same program has yet to load goes unseen.
Stands on private names of triton.runtime.interpreter that are the same in 3.6, 3.7 and 3.9.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Literal
from unittest.mock import patch

import numpy as np
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceScanOpInterface, TensorHandle

Kind = Literal["load", "store", "atomic"]
Order = Literal["grid", "reverse", "shuffle"]

ROLE = {"load": "reader", "store": "writer", "atomic": "updater"}
REFUSED = {"load": ("writer", "updater"), "store": ("writer", "reader", "updater"), "atomic": ("writer", "reader")}
NOW = {"load": "reads", "store": "stores to", "atomic": "updates"}
BEFORE = {"reader": "read", "writer": "stored", "updater": "updated atomically"}

SEVERAL = -1  # programs read a granule
MOST_GAPS = 2**26  # elements of a view with gaps up to which each gap is known


class Race(AssertionError):
    """The result depends on the order in which programs, or warps of one, run."""


class OutOfBounds(AssertionError):
    """An element outside the tensor that the kernel was given."""


class Bf16Arithmetic(AssertionError):
    """Arithmetic on bfloat16 other than tl.dot; cast to float32 after the load."""


@dataclass
class Traffic:
    """What a kernel moved over all its launches.  Bytes of masked elements do not count."""

    launches: int = 0
    programs: int = 0
    load_bytes: int = 0
    store_bytes: int = 0
    atomic_bytes: int = 0
    unique_bytes: int = 0  # touched at all, launch by launch: what a perfect cache would move


# ---- bfloat16


def to_float32(bits: np.ndarray) -> np.ndarray:
    """The numbers that bfloat16 bit patterns (uint16) stand for."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Bit patterns (uint16) of float32 numbers rounded to nearest, ties to even."""
    numbers = np.ascontiguousarray(numbers, dtype=np.float32)
    bits = numbers.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + even + np.uint32(0x7FFF)) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)


def is_bfloat16(handle: object) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def widened(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(to_float32(handle.data), tl.float32) if is_bfloat16(handle) else handle


def narrowed(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(to_bfloat16(handle.data), tl.bfloat16)


def is_float8(handle: TensorHandle) -> bool:
    return handle.dtype.scalar.is_floating() and handle.dtype.scalar.primitive_bitwidth == 8


# ---- memory


class View:
    """The addresses that one tensor argument stands for."""

    def __init__(self, name: str, tensor: Tensor):
        extent = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s]
        self.name, self.size = name, tensor.element_size()
        self.elements = 1 + sum((n - 1) * s for n, s in extent) if tensor.numel() else 0
        self.start = tensor.data_ptr() if self.elements else 0
        self.stop = self.start + self.elements * self.size
        self.shadow: Shadow | None = None
        self.held = None
        if int(np.prod([n for n, _ in extent])) < self.elements <= MOST_GAPS:
            self.held = np.zeros(self.elements, dtype=bool)
            np.lib.stride_tricks.as_strided(self.held, [n for n, _ in extent], [s for _, s in extent])[...] = True

    def holds(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which accesses of `size` bytes lie inside.  addresses [N] uint64 -> [N] bool"""
        inside = (addresses >= self.start) & (addresses + np.uint64(size) <= self.stop)
        if self.held is not None:
            index = (addresses[inside] - np.uint64(self.start)) // np.uint64(self.size)
            inside[inside] = self.held[index.astype(np.int64)]
        return inside


class Shadow:
    """Who touched each granule of a stretch of memory in one launch; views that overlap share it.

    A stamp grows with every program and every barrier, so stamps from a program's first one on are its own.  0 is nobody.
    """

    def __init__(self, views: list[View]):
        self.start = min(view.start for view in views)
        self.granule = min(view.size for view in views)
        self.granules = -(-(max(view.stop for view in views) - self.start) // self.granule)
        self.touched = np.zeros(self.granules, dtype=bool)
        self.stamps: dict[str, np.ndarray] = {}  # by role, made when first needed: zeros are virtual memory until touched

    def granules_of(self, addresses: np.ndarray, size: int) -> np.ndarray:
        first = (addresses - np.uint64(self.start)).astype(np.int64) // self.granule
        return first if size <= self.granule else (first[:, None] + np.arange(size // self.granule)).ravel()

    def touch(self, at: np.ndarray) -> int:
        """Marks granules and returns how many bytes of them were never touched before."""
        fresh = np.unique(at[~self.touched[at]])
        self.touched[fresh] = True
        return fresh.size * self.granule

    def of(self, role: str, at: np.ndarray) -> np.ndarray | None:
        return self.stamps[role][at] if role in self.stamps else None

    def mark(self, role: str, at: np.ndarray, first: int, now: int) -> None:
        stamps = self.stamps.setdefault(role, np.zeros(self.granules, dtype=np.int32)) if role not in self.stamps else self.stamps[role]
        if role == "reader":
            before = stamps[at]
            stamps[at] = np.where((before == 0) | (before >= first), now, SEVERAL)
        else:
            stamps[at] = now


def with_shadows(views: list[View]) -> None:
    """Gives each view its shadow, one to all that overlap."""
    stop, stretch = -1, 0
    stretches = []
    for view in sorted((view for view in views if view.elements), key=lambda view: view.start):
        stretch += view.start >= stop
        stop = max(stop, view.stop)
        stretches.append((stretch, view))
    for _, group in groupby(stretches, key=lambda pair: pair[0]):
        together = [view for _, view in group]
        shadow = Shadow(together)
        for view in together:
            view.shadow = shadow


# ---- one run


class Run:
    """The state of a `with strict()` block; `stats` is what its user reads."""

    def __init__(self, order: Order, seed: int, races: bool, bounds: bool):
        self.stats: dict[str, Traffic] = {}
        self.order, self.races, self.bounds = order, races, bounds
        self.random = random.Random(seed)
        self.kernel = ""

    # a launch: begin, then one view per tensor argument, then the grid, then each program

    def begin(self, kernel: str, arguments: dict[str, object]) -> None:
        self.kernel, self.views = kernel, []
        self.names = {key_of(x): name for name, x in reversed(arguments.items()) if isinstance(x, Tensor)}
        self.traffic = self.stats.setdefault(kernel, Traffic())
        self.traffic.launches += 1

    def view(self, tensor: Tensor) -> View:
        view = View(self.names.get(key_of(tensor), "an argument"), tensor)
        self.views.append(view)
        return view

    def place(self, grid: tuple[int, int, int]) -> None:
        with_shadows(self.views)
        self.grid = grid
        count = grid[0] * grid[1] * grid[2]
        programs = list(range(count))
        if self.order == "shuffle":
            self.random.shuffle(programs)
        self.programs = iter(reversed(programs) if self.order == "reverse" else programs)
        self.traffic.programs += count
        self.now, self.firsts, self.ran = 0, [], []

    def next_program(self) -> tuple[int, int, int]:
        _, ny, nz = self.grid
        program = next(self.programs)
        self.index = (program // (ny * nz), program // nz % ny, program % nz)
        self.now += 1
        self.firsts.append(self.now)
        self.ran.append(self.index)
        return self.index

    def barrier(self) -> None:
        self.now += 1

    # an access

    def access(self, pointers: TensorHandle, mask: TensorHandle, kind: Kind) -> None:
        """Counts and checks one load, store or atomic of a program."""
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        if not addresses.size:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        view = pointers.attr.get("view") or self.view_at(int(addresses[0]))
        setattr(self.traffic, f"{kind}_bytes", getattr(self.traffic, f"{kind}_bytes") + addresses.size * size)
        addresses = addresses[self.within(view, addresses, size, kind)]
        if not addresses.size:
            return
        at = view.shadow.granules_of(addresses, size)
        self.traffic.unique_bytes += view.shadow.touch(at)
        if self.races:
            self.refuse_races(view, at, kind)
            view.shadow.mark(ROLE[kind], at, self.firsts[-1], self.now)

    def view_at(self, address: int) -> View:
        """Where a pointer came by no known way: the argument that holds its address."""
        found = next((view for view in self.views if view.start <= address < view.stop), None)
        if found is None:
            raise OutOfBounds(f"{self.kernel}, program {self.index}: a pointer to no tensor argument")
        return found

    def within(self, view: View, addresses: np.ndarray, size: int, kind: Kind) -> np.ndarray:
        inside = view.holds(addresses, size)
        outside = addresses.size - int(np.count_nonzero(inside))
        if outside and self.bounds:
            raise OutOfBounds(
                f"{self.kernel}, program {self.index}: {NOW[kind]} {outside} of {addresses.size} elements outside {view.name}"
            )
        return inside

    def refuse_races(self, view: View, at: np.ndarray, kind: Kind) -> None:
        for role in REFUSED[kind]:
            stamps = view.shadow.of(role, at)
            if stamps is not None:
                others = stamps[(stamps != 0) & (stamps < self.firsts[-1])]
                self.refuse(view, kind, others.size, at.size, f"{self.who(others)} {BEFORE[role]}")
                if role == "writer" and kind != "atomic":
                    own = np.count_nonzero(stamps == self.now)
                    self.refuse(view, kind, own, at.size, "it stored itself with no barrier since")
        if kind == "store":
            self.refuse(view, kind, at.size - np.unique(at).size, at.size, "the same store names twice")

    def refuse(self, view: View, kind: Kind, bad: int, of: int, what: str) -> None:
        if bad:
            raise Race(f"{self.kernel}, program {self.index}: {NOW[kind]} {bad} of {of} elements of {view.name} that {what}")

    def who(self, stamps: np.ndarray) -> str:
        """The program that one of these stamps is of."""
        known = stamps[stamps != SEVERAL]
        return f"program {self.ran[bisect_right(self.firsts, int(known[0])) - 1]}" if known.size else "several programs"


def key_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


# ---- what the interpreter does otherwise

Change = tuple[object, str, Callable]  # a class or module, the name in it, what stands there during the run


def value_changes() -> list[Change]:
    """Exact casts and products of bfloat16."""
    cast, fp_to_fp, dot = (getattr(InterpreterBuilder, name) for name in ("cast_impl", "create_fp_to_fp", "create_dot"))

    def cast_impl(self, source, target):
        if target.scalar == tl.bfloat16:
            return source if is_bfloat16(source) else narrowed(cast(self, source, tl.float32))
        return cast(self, widened(source), target)

    def create_fp_to_fp(self, source, target, rounding):
        if target.scalar == tl.bfloat16:
            wide = fp_to_fp(self, source, tl.float32, rounding) if is_float8(source) else source
            return cast_impl(self, wide, target)
        if is_bfloat16(source) and target.scalar.primitive_bitwidth >= 16:
            return cast_impl(self, source, target)
        return fp_to_fp(self, widened(source), target, rounding)

    def create_dot(self, a, b, total, *rest):
        a, b = widened(a), widened(b)
        if is_float8(a) or is_float8(b) or total.dtype.scalar != tl.float32:
            return dot(self, a, b, total, *rest)
        return TensorHandle(np.matmul(a.data.astype(np.float32), b.data.astype(np.float32)) + total.data, tl.float32)

    def get_bf16(self, number):  # a constant: missing in 3.6 and 3.7
        return narrowed(self.get_fp32(number))

    return [(InterpreterBuilder, change.__name__, change) for change in (cast_impl, create_fp_to_fp, create_dot, get_bf16)]


def arithmetic_changes(run: Run) -> list[Change]:
    """Arithmetic that would run on bfloat16's bit patterns raises."""

    def refuse(operands: object) -> None:
        if any(is_bfloat16(x) for x in operands):
            raise Bf16Arithmetic(f"{run.kernel}, program {run.index}: arithmetic on bfloat16; cast to float32 after the load")

    def guarded(old: Callable) -> Callable:
        def operation(self, *operands):
            refuse(operands)
            return old(self, *operands)

        return operation

    def guarded_reduction(self, input):
        refuse(x.handle for x in (input if isinstance(input, tuple) else (input,)))
        return reduce(self, input)

    names = ("binary_op", "unary_op", "create_fabs", "create_fma", "create_clampf", "create_rsqrt", "create_erf")
    reduce = ReduceScanOpInterface.apply
    here = [(InterpreterBuilder, name, guarded(old)) for name in names if (old := getattr(InterpreterBuilder, name, None))]
    return [*here, (ReduceScanOpInterface, "apply", guarded_reduction)]


def memory_changes(run: Run) -> list[Change]:
    """Loads, stores and atomics are counted and checked before they happen."""
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    rmw, cas = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_atomic_cas

    def create_masked_load(self, pointers, mask, *rest, **options):
        run.access(pointers, mask, "load")
        return load(self, pointers, mask, *rest, **options)

    def create_masked_store(self, pointers, value, mask, *rest):
        run.access(pointers, mask, "store")
        return store(self, pointers, value, mask, *rest)

    def create_atomic_rmw(self, operation, pointers, value, mask, *rest):
        if run.races and operation.name == "FADD":
            raise Race(f"{run.kernel}, program {run.index}: an atomic sum of floats depends on the order of programs")
        run.access(pointers, mask, "atomic")
        return rmw(self, operation, pointers, value, mask, *rest)

    def create_atomic_cas(self, pointers, *rest):
        run.access(pointers, TensorHandle(np.ones_like(pointers.data, dtype=bool), tl.int1), "atomic")
        return cas(self, pointers, *rest)

    def create_barrier(self):
        run.barrier()

    changes = (create_masked_load, create_masked_store, create_atomic_rmw, create_atomic_cas, create_barrier)
    return [(InterpreterBuilder, change.__name__, change) for change in changes]


def pointer_changes(run: Run) -> list[Change]:
    """A pointer keeps the view of the argument that it was made from."""
    convert = interpreter._implicit_cvt

    def implicit_cvt(argument):
        converted = convert(argument)
        if isinstance(argument, Tensor):
            converted.handle.attr["view"] = run.view(argument)
        return converted

    def carried(old: Callable) -> Callable:
        def operation(self, *operands, **options):
            made = old(self, *operands, **options)
            views = (x.attr["view"] for x in operands if isinstance(x, TensorHandle) and "view" in x.attr)
            if (view := next(views, None)) is not None and isinstance(made.dtype.scalar, tl.pointer_type):
                made.attr["view"] = view
            return made

        return operation

    names = ("addptr", "splat", "unsplat", "broadcast", "expand_dims", "reshape", "trans", "bitcast", "select")
    made = [(InterpreterBuilder, f"create_{name}", carried(getattr(InterpreterBuilder, f"create_{name}"))) for name in names]
    return [*made, (interpreter, "_implicit_cvt", implicit_cvt)]


def launch_changes(run: Run) -> list[Change]:
    """Programs in the order asked, and our own errors as they were raised, not as the interpreter wraps them."""
    call, set_grid_dim, set_grid_idx = GridExecutor.__call__, InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx

    def launch(self, *args, **kwargs):
        run.begin(self.fn.__name__, dict(zip(self.arg_names, args, strict=False)) | kwargs)
        try:
            return call(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            cause: BaseException | None = error
            while isinstance(cause, interpreter.InterpreterError):
                cause = cause.__cause__
            if isinstance(cause, (Race, OutOfBounds, Bf16Arithmetic)):
                raise cause from None
            raise

    def placed(self, *grid):
        set_grid_dim(self, *grid)
        run.place(grid)

    def in_order(self, *_):
        set_grid_idx(self, *run.next_program())

    return [
        (GridExecutor, "__call__", launch),
        (InterpreterBuilder, "set_grid_dim", placed),
        (InterpreterBuilder, "set_grid_idx", in_order),
    ]


@contextmanager
def strict(*, order: Order = "grid", seed: int = 0, races: bool = True, bounds: bool = True) -> Iterator[Run]:
    """Kernels launched inside run in the strict interpreter.

    order    of the programs of a launch: "grid", "reverse", or "shuffle" by `seed`
    races    False: programs may touch what others store, for kernels that are right in spite of it
    bounds   False: addresses are not checked
    """
    assert order in ("grid", "reverse", "shuffle"), order
    run = Run(order, seed, races, bounds)
    with ExitStack() as stack:
        changes = [*value_changes(), *arithmetic_changes(run), *memory_changes(run), *pointer_changes(run), *launch_changes(run)]
        for owner, name, change in changes:
            stack.enter_context(patch.object(owner, name, change, create=name == "get_bf16"))
        yield run
