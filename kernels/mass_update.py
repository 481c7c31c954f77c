"""Mass remembered beside each slot: what it was, decayed, and what a step added."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from learnkv.kernels.entry import Arch, Entry, Tile


@triton.jit(do_not_specialize=["pages", "P"])
def add_mass(memory, table, mass, decay, page_stride, slot_stride, pages, P, BLOCK_L: tl.constexpr):
    """Grid (blocks of slots, B * H): memory = decay * memory + mass over the slots of a head's pages."""
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    page = tl.load(table + head * pages + slot // P, mask=slot // P < pages, other=-1).to(tl.int64)  # [BLOCK_L]
    place = memory + page * page_stride + (slot % P).to(tl.int64) * slot_stride
    old = tl.load(place, mask=page >= 0, other=0.0)
    added = tl.load(mass + head * pages * P + slot, mask=page >= 0, other=0.0)
    tl.store(place, decay * old + added, mask=page >= 0)


def tile() -> Tile:
    return Tile({"BLOCK_L": 512}, 4, 1)


def mass_update(memory: Tensor, table: Tensor, mass: Tensor, decay: float) -> None:
    """memory [N, P] = decay * memory + mass [B, H, L] over the heads' pages, in place; no page stands twice in the table."""
    (B, H, pages), P = table.shape, memory.shape[1]
    if mass.shape != (B, H, pages * P):
        raise ValueError(f"mass_update: mass of shape {tuple(mass.shape)} for a table with room for {(B, H, pages * P)} slots")
    t = tile()
    grid = triton.cdiv(pages * P, t.blocks["BLOCK_L"]), B * H
    add_mass[grid](memory, table.contiguous(), mass.contiguous(), decay, *memory.stride(), pages, P, **t.blocks, **t.options)


def entries(arch: Arch) -> list[Entry]:
    """One column of several floats a slot, and one that has them to itself."""
    types = {"memory": "*fp32", "table": "*i32", "mass": "*fp32", "decay": "fp32", "pages": "i32", "P": "i32"}
    strided = {**types, "page_stride": "i32", "slot_stride": "i32"}
    alone = {"slot_stride": 1}
    return [
        Entry(add_mass, "one of several columns", strided, {}, tile(), aligned=("page_stride",)),
        Entry(add_mass, "one column", {**types, "page_stride": "i32"}, alone, tile(), aligned=("page_stride",)),
    ]
