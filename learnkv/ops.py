"""The one door to kernels: every op by name, in plain torch or in Triton.

CUDA tensors go to Triton, all others to plain torch; `use` forces one side, and `last_used` says which one the last call took.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, get_args

from torch import Tensor

from learnkv.kernels import entry, reference

if TYPE_CHECKING:
    from learnkv.kernels.build import Build

P = ParamSpec("P")
R = TypeVar("R")
Side = Literal["reference", "triton"]

forced: ContextVar[Side | None] = ContextVar("learnkv_ops_forced", default=None)
last_used: Side | None = None


@contextmanager
def use(side: Side) -> Iterator[None]:
    """Every op inside the block runs on this side, whatever its tensors' device.  Triton on CPU tensors takes TRITON_INTERPRET=1."""
    if side not in get_args(Side):
        raise ValueError(f'ops.use("{side}"): there are "reference" and "triton"')
    token = forced.set(side)
    try:
        yield
    finally:
        forced.reset(token)


def side_of(tensors: Iterable[object]) -> Side:
    """Where a call goes: as `use` or LEARNKV_KERNELS says, else by the device of its first tensor."""
    told = forced.get() or os.environ.get("LEARNKV_KERNELS")
    if not told:
        return "triton" if next((x.is_cuda for x in tensors if isinstance(x, Tensor)), False) else "reference"
    if told not in get_args(Side):
        raise ValueError(f'LEARNKV_KERNELS={told}: there are "reference" and "triton"')
    if told == "reference":
        return "reference"
    first = next((x for x in tensors if isinstance(x, Tensor)), None)
    if first is not None and not first.is_cuda and os.environ.get("TRITON_INTERPRET", "0") == "0":
        raise ValueError(
            f"ops.use or LEARNKV_KERNELS asks for Triton, and tensors are on {first.device}; move them to CUDA, "
            "start Python with TRITON_INTERPRET=1, or take the reference"
        )
    return "triton"


def triton_op(module: str, name: str) -> Callable:
    """The Triton side of an op; raises a RuntimeError where Triton is missing."""
    try:
        return getattr(import_module(f"learnkv.kernels.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        hint = "pip install triton, or set LEARNKV_KERNELS=reference for plain torch"
        raise RuntimeError(f"ops.{name} got CUDA tensors and Triton is not installed; {hint}") from error


def door(op: Callable[P, R], module: str) -> Callable[P, R]:
    """An op of the reference, whose Triton side has the same name and signature in kernels/<module>.py."""

    @wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        global last_used
        last_used = side_of([*args, *kwargs.values()])
        return (op if last_used == "reference" else triton_op(module, op.__name__))(*args, **kwargs)

    return call


column_mass = door(reference.column_mass, "column_mass")
row_lse = door(reference.row_lse, "column_mass")
pool = door(reference.pool, "pool")
select = door(reference.select, "select")
evict_slot = door(reference.evict_slot, "select")
compact = door(reference.compact, "compact")
copy_kept = door(reference.copy_kept, "compact")
append_kv = door(reference.append_kv, "append")
pl_logprob = door(reference.pl_logprob, "ranking")
budget_reward = door(reference.budget_reward, "ranking")
mlp_scorer = door(reference.mlp_scorer, "mlp_scorer")
BranchWeights = reference.BranchWeights  # of mlp_scorer
TrunkWeights = reference.TrunkWeights
gate_scorer = door(reference.gate_scorer, "gate_scorer")
attend = door(reference.attend, "attend")
attend_with_lse = door(reference.attend_with_lse, "attend")
attend_with_mass = door(reference.attend_with_mass, "attend")
mass_update = door(reference.mass_update, "mass_update")
gather_pages = door(reference.gather_pages, "gather_pages")
page_score = door(reference.page_score, "page_score")
page_evict = door(reference.page_evict, "page_evict")
page_minmax = door(reference.page_minmax, "page_bound")
page_bound = door(reference.page_bound, "page_bound")
owners = reference.owners  # bookkeeping of the reference's own
Owners = reference.Owners
page_rows = reference.page_rows
ARCHS = entry.ARCHS
arch_of = entry.arch_of


def builds(arch: entry.Arch) -> Iterator[tuple[str, Build]]:
    """Every kernel of the table compiled for an architecture that need not be here, by name."""
    build = import_module("learnkv.kernels.build")
    for found in build.all_entries(arch):
        yield found.name, build.built(found, arch)
