"""Entry: one kernel at one setting, which is all that a launch, a compilation without a GPU, or a static bound has to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Arch = int | str  # 80, 89, 90, 100 of CUDA; "gfx942" of ROCm
ARCHS: tuple[Arch, ...] = (80, 89, 90, 100, "gfx942")


@dataclass(frozen=True)
class Tile:
    """Block sizes of one launch, by the names of the kernel's constants, and what the compiler is told."""

    blocks: Mapping[str, int]
    warps: int = 4
    stages: int = 2

    @property
    def options(self) -> dict[str, int | bool]:
        """Keyword arguments of a launch; fused multiply-add is asked for, since Triton 3.10 leaves it off."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


@dataclass(frozen=True)
class Loop:
    """Work of one iteration of a kernel's innermost loop, for the static bound: bytes of memory, operations of tl.dot, exponentials."""

    bytes: int = 0
    flops: int = 0
    exps: int = 0


@dataclass(frozen=True)
class Entry:
    """One kernel at one setting.

    kernel     the @triton.jit function
    label      what tells it from the kernel's other entries: "bf16 D=128 G=4"
    types      of its run-time arguments: "*bf16", "*i32", "i32", "i64", "fp32"
    constants  of its tl.constexpr arguments, block sizes left out
    tile       block sizes, warps and stages: what the launcher would take on this architecture
    aligned    run-time integers that the launcher promises to be multiples of 16, as Triton finds them at a launch
    loop       work of the hot loop where its bound is kept, else None
    """

    kernel: Callable
    label: str
    types: Mapping[str, str]
    constants: Mapping[str, object]
    tile: Tile
    aligned: tuple[str, ...] = ()
    loop: Loop | None = field(default=None)

    @property
    def name(self) -> str:
        return f"{self.kernel.__name__} {self.label}"


def arch_of(tensor: Tensor) -> Arch:
    """The architecture a launch on this tensor is compiled for; sm_90 where a CPU interprets it."""
    if not tensor.is_cuda:
        return 90
    if torch.version.hip:
        return torch.cuda.get_device_properties(tensor.device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def padded_head(D: int) -> int:
    """The block of a head's D numbers: a power of two, 16 at least, the rest of it masked."""
    return max(16, 1 << (D - 1).bit_length())
