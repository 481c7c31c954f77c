"""What the compiler makes of each kernel, without a GPU: registers, spills, shared memory, instructions, and how fast its hot loop can be.

`python -m learnkv.kernels.build` rewrites benchmarks/static_bounds.json, the table of those bounds that a test compares.
Compiling and interpreting do not mix in one process: nothing here works under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

import triton

from learnkv import kernels
from learnkv.kernels.addresses import narrow_arguments
from learnkv.kernels.entry import Arch, Entry

# bytes that one block may ask for: CUDA C++ Programming Guide, table of compute capabilities; LDS of CDNA and RDNA
SHARED_MEMORY: Mapping[Arch, int] = {
    80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376,
    "gfx90a": 65_536, "gfx942": 65_536, "gfx950": 163_840,
}  # fmt: skip

# one H200, spec/kernels.md A2
PROCESSORS = 132
CLOCK = 1.98e9  # Hz
BANDWIDTH = 4.3e12  # bytes a second
MATRIX_RATE = 790e12  # operations a second on bfloat16 and float16; half on tensor-float32
EXPONENTIALS = 16  # a clock and processor
SCHEDULERS = 4  # of a processor, one warp's instruction a clock each

MATRIX_INSTRUCTION = re.compile(r"HMMA|HGMMA|QGMMA|QMMA|IMMA|IGMMA|UTC\w*MMA|v_s?mfma|v_wmma")
WIDE_LOAD = re.compile(r"LDG\S*\.(?:128|256)|LDGSTS\S*\.128|UTMALDG|UBLKCP|(?:global|buffer|flat)_load_(?:lds_)?(?:dwordx4|b128)")


@dataclass(frozen=True)
class Build:
    """One entry compiled for one architecture.

    matrix        matrix instructions in the code, by name
    wide_loads    loads of 16 bytes a thread or more, copies by the tensor memory accelerator included
    arguments     names of the run-time arguments, in order
    ttir          Triton's first form of the kernel
    instructions  the machine's, in order; labels stand for themselves with their colon
    """

    arch: Arch
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    matrix: Mapping[str, int]
    wide_loads: int
    arguments: tuple[str, ...] = field(repr=False)
    ttir: str = field(repr=False)
    instructions: tuple[str, ...] = field(repr=False)

    @property
    def shared_limit(self) -> int:
        return SHARED_MEMORY[self.arch]


@dataclass(frozen=True)
class Bound:
    """Clocks that one processor of an H200 spends on one pass through a hot loop, by what they go to; the largest is the bound.

    instructions  of the loop
    iterations    of the kernel's own loop that one pass does: 1, but where the compiler has unrolled all of it
    """

    instructions: int
    iterations: int
    issue: float
    memory: float
    matrix: float
    exponential: float

    @property
    def clocks(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("issue", "memory", "matrix", "exponential")}

    @property
    def verdict(self) -> str:
        return max(self.clocks, key=lambda name: self.clocks[name])


def all_entries(arch: Arch) -> list[Entry]:
    """Every entry of every module of learnkv.kernels."""
    modules = [import_module(f"learnkv.kernels.{found.name}") for found in pkgutil.iter_modules(kernels.__path__)]
    return [entry for module in modules if hasattr(module, "entries") for entry in module.entries(arch)]


def narrow_addresses(build: Build) -> set[str]:
    """Names of the pointer arguments that are addressed by int32 offsets which can wrap around; kernels/addresses.py says when."""
    return narrow_arguments(build.ttir, build.arguments)


# ---- compiling


def built(entry: Entry, arch: Arch) -> Build:
    """Compiles an entry for an architecture that need not be here."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError(f"{entry.name} can't be compiled under TRITON_INTERPRET=1; compile in a process without it")
    constants = constants_of(entry)
    arguments = tuple(name for name in names_of(entry) if name not in constants)
    compiled = triton.compile(source_of(entry), target=target_of(arch), options=entry.tile.options)
    numbers, instructions = read_amd(compiled) if isinstance(arch, str) else read_nvidia(compiled, arch)
    code = "\n".join(instructions)
    return Build(
        arch=arch,
        shared_bytes=compiled.metadata.shared,
        matrix=Counter(MATRIX_INSTRUCTION.findall(code)),
        wide_loads=len(WIDE_LOAD.findall(code)),
        arguments=arguments,
        ttir=compiled.asm["ttir"],
        instructions=instructions,
        **numbers,
    )


def names_of(entry: Entry) -> list[str]:
    """Of all arguments of the kernel."""
    return getattr(entry.kernel, "arg_names")  # noqa: B009  a jitted function has them


def constants_of(entry: Entry) -> dict[str, object]:
    return {**entry.constants, **entry.tile.blocks}


def source_of(entry: Entry) -> triton.compiler.ASTSource:
    """The kernel as a launch would specialise it: pointers, and the integers the entry names, are multiples of 16."""
    names, constants = names_of(entry), constants_of(entry)
    if missing := [name for name in names if name not in constants and name not in entry.types]:
        raise ValueError(f"{entry.name}: {', '.join(missing)} has neither a type nor a constant; name it in the entry")
    if unknown := constants.keys() - set(names):
        raise ValueError(f"{entry.name}: the kernel has no argument {', '.join(sorted(unknown))}; see the entry's constants and tile")
    signature = {name: "constexpr" if name in constants else entry.types[name] for name in names}
    multiples = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in entry.aligned]
    return triton.compiler.ASTSource(
        fn=entry.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in multiples},
    )


def target_of(arch: Arch) -> triton.backends.compiler.GPUTarget:
    if isinstance(arch, str):
        return triton.backends.compiler.GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    return triton.backends.compiler.GPUTarget("cuda", arch, 32)


def read_amd(compiled: triton.compiler.CompiledKernel) -> tuple[dict[str, int], tuple[str, ...]]:
    """Registers, spills and stack as the code's own header says, bytes a lane, and the instructions."""
    code = compiled.asm["amdgcn"]
    value = {name: int(number) for name, number in re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", code)}
    numbers = {
        "registers": value["vgpr_count"],
        "spill_bytes": 4 * value["vgpr_spill_count"],
        "stack_bytes": value["private_segment_fixed_size"],
    }
    lines = (line.split(";")[0].strip() for line in code.splitlines())
    return numbers, tuple(line for line in lines if line and not line.startswith("."))


def read_nvidia(compiled: triton.compiler.CompiledKernel, arch: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """Registers, spills and stack as ptxas says them when it translates the same PTX once more, and the instructions."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"])
        log = run(*ptxas(arch), str(ptx), "-o", str(cubin))
        cubin.write_bytes(compiled.asm["cubin"])
        listing = run(str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"), "-c", str(cubin))
    stack, *spills = map(int, found(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log))
    registers = int(*found(r"Used (\d+) registers", log))
    lines = re.findall(r"^(\.L_x_\d+:)|^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", listing, re.MULTILINE)
    return {"registers": registers, "spill_bytes": sum(spills), "stack_bytes": stack}, tuple(label or code.strip() for label, code in lines)


def found(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of a pattern that must be there."""
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in: {text}"
    return match.groups()


def ptxas(arch: int) -> list[str]:
    """Triton's own call of its own ptxas, with the resources printed."""
    from triton.backends.nvidia import compiler

    flag = "--regAllocOptLevel=2"
    flags = [flag] if flag in inspect.getsource(compiler) else []
    return [compiler.get_ptxas(arch).path, "-v", "-lineinfo", *flags, f"--gpu-name={compiler.sm_arch_from_capability(arch)}"]


def run(*command: str) -> str:
    """What a tool of the compiler prints, errors and notes included."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stdout.strip()}")
    return done.stdout


# ---- the hot loop


def hot_loop(build: Build, entry: Entry) -> Bound:
    """The static bound of an entry's innermost loop on an H200, by its machine code and the work that the entry declares.

    Of several loops the one with the most matrix instructions counts, and of those the shortest: where a kernel has one loop for masked
    tiles and one for whole ones, most tiles are whole.  Without matrix instructions it is the longest.  Where the compiler has left no
    loop, all of the code is one pass, and its matrix instructions say of how many iterations.
    """
    assert entry.loop is not None, f"{entry.name} declares no loop"
    work, warps = entry.loop, entry.tile.warps
    loops, iterations = innermost_loops(build.instructions), 1
    if not loops:
        loops = [tuple(code for code in build.instructions if not code.endswith(":"))]
        iterations = max(1, round(operations(loops[0], warps) / work.flops)) if work.flops else 1
    matrix = {loop: sum(bool(MATRIX_INSTRUCTION.match(code)) for code in loop) for loop in loops}
    most = max(matrix.values())
    loop = min((loop for loop in loops if matrix[loop] == most), key=len) if most else max(loops, key=len)
    rate = MATRIX_RATE / (2 if any("TF32" in code for code in loop) else 1)
    return Bound(
        instructions=len(loop),
        iterations=iterations,
        issue=len(loop) * warps / SCHEDULERS,
        memory=iterations * work.bytes * PROCESSORS * CLOCK / BANDWIDTH,
        matrix=iterations * work.flops * PROCESSORS * CLOCK / rate,
        exponential=iterations * work.exps / EXPONENTIALS,
    )


def innermost_loops(instructions: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The instructions between a label and a jump back to it that hold no other such stretch; predicates left out."""
    code: list[str] = []
    labels: dict[str, int] = {}
    stretches: list[tuple[int, int]] = []
    for line in instructions:
        if line.endswith(":"):
            labels[line.removesuffix(":")] = len(code)
            continue
        jump = re.search(r"\bBRA\S*\s.*`\((\.L_x_\d+)\)", line)
        if jump and labels.get(jump.group(1), len(code)) < len(code) - 4:  # a shorter one is a wait, or the trap at the end
            stretches.append((labels[jump.group(1)], len(code) + 1))
        code.append(re.sub(r"^@!?U?P\w+\s+", "", line))
    inner = [(a, z) for a, z in stretches if not any((b, y) != (a, z) and a <= b and y <= z for b, y in stretches)]
    return [tuple(code[a:z]) for a, z in inner]


def operations(loop: tuple[str, ...], warps: int) -> int:
    """Multiplications and additions of a loop's matrix instructions of Ampere's and Hopper's kind, over all warps of a program."""
    total = 0
    for code in loop:
        if shape := re.match(r"HMMA\.(\d+)\.", code):  # 16816: 16 x 8 x 16, a warp's
            m, n, k = {"16816": (16, 8, 16), "1688": (16, 8, 8), "1684": (16, 8, 4)}[shape.group(1)]
            total += 2 * m * n * k * warps
        elif shape := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)\.", code):  # a group's of four warps
            m, n, k = map(int, shape.groups())
            total += 2 * m * n * k * warps // 4
    return total


# ---- the table of bounds

TABLE = Path("benchmarks/static_bounds.json")
TABLE_ARCH = 90


def static_bounds() -> dict[str, dict[str, float | str]]:
    """The bound of every entry that declares a loop, by the entry's name, clocks rounded to whole ones."""
    entries = [entry for entry in all_entries(TABLE_ARCH) if entry.loop]
    return {entry.name: row(hot_loop(built(entry, TABLE_ARCH), entry)) for entry in entries}


def row(bound: Bound) -> dict[str, float | str]:
    return {**{name: round(value) for name, value in asdict(bound).items()}, "verdict": bound.verdict}


def write_table() -> None:
    """The table of this repository, from its root."""
    table = {"triton": triton.__version__, "arch": TABLE_ARCH, "bounds": static_bounds()}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    write_table()
