"""Every kernel at every setting compiles for every architecture, without a GPU, into code as it should be; planted faults show."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

if sys.platform != "linux" or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are compiled on Linux, and in a process that does not interpret them", allow_module_level=True)

import triton

from learnkv.kernels.build import Bound, Build, all_entries, built, hot_loop, innermost_loops, narrow_addresses, row
from learnkv.kernels.entry import ARCHS, Arch, Entry, Loop, Tile
from tests import planted

ROOT = Path(__file__).resolve().parents[1]
TABLE = json.loads((ROOT / "benchmarks" / "static_bounds.json").read_text())
REWRITE = "if this is meant, `python -m learnkv.kernels.build` rewrites benchmarks/static_bounds.json"
OLDER = [int(part) for part in triton.__version__.split(".")[:2]] < [int(part) for part in TABLE["triton"].split(".")[:2]]
MOST_SPILLED = 32 if OLDER else 0  # bytes: tiles are chosen for the newest compiler, and older ones may miss by a little
SLOWER = 1.02

Case = tuple[Arch, str]
LISTED = {arch: all_entries(arch) for arch in ARCHS}
ENTRIES: dict[Case, Entry] = {(arch, entry.name): entry for arch, entries in LISTED.items() for entry in entries}
HOT = [entry for entry in LISTED[90] if entry.loop]


def cases(archs: Iterable[Arch] = ARCHS, *, hot: bool = False) -> list:
    """Test parameters: those of the H200's architecture in every run, the others in slow ones."""
    return [
        pytest.param((arch, name), id=f"{arch}-{name}", marks=[] if arch == 90 else [pytest.mark.slow])
        for (arch, name), entry in ENTRIES.items()
        if arch in archs and (entry.loop or not hot)
    ]


def compiled(case: Case) -> Build:
    return built(ENTRIES[case], case[0])


@pytest.fixture(scope="module")
def builds(request):
    """What each case compiles into; two compilations at a time, of all that this run asks for.

    In processes, not threads: Python before 3.11.8 may raise a SystemError where two threads parse at once (python/cpython#106905).
    """
    asked = (item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec") and item.path == request.path)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        futures: dict[Case, Future[Build]] = {}

        def compiling(case: Case) -> Future[Build]:
            if case not in futures:
                futures[case] = pool.submit(compiled, case)
            return futures[case]

        for case in filter(ENTRIES.__contains__, asked):
            compiling(case)
        yield lambda case: compiling(case).result()
        pool.shutdown(cancel_futures=True)


# ---- what is refused


def refuse_spills(build: Build) -> None:
    assert build.spill_bytes <= MOST_SPILLED, f"{build.spill_bytes} bytes of registers spill; take a smaller tile or more warps"


def refuse_too_much_shared_memory(build: Build) -> None:
    assert build.shared_bytes <= build.shared_limit, f"{build.shared_bytes} bytes of shared memory, {build.shared_limit} are there"


def refuse_missing_matrix_instructions(build: Build) -> None:
    assert build.matrix or "tt.dot" not in build.ttir, "tl.dot became no matrix instruction"


def refuse_narrow_addresses(build: Build) -> None:
    narrow = narrow_addresses(build)
    assert not narrow, f"int32 offsets can wrap around on {', '.join(sorted(narrow))}; kernels/addresses.py says when"


def refuse_slower(bound: Bound, listed: dict) -> None:
    now, before = bound.issue / bound.iterations, listed["issue"] / listed["iterations"]
    assert now <= before * SLOWER, f"{now:.0f} issue clocks an iteration, {before:.0f} in the table; {REWRITE}"
    assert bound.verdict == listed["verdict"], f"bound by {bound.verdict}, by {listed['verdict']} in the table; {REWRITE}"


# ---- the gate


@pytest.mark.parametrize("arch", ARCHS)
def test_entries_have_names_of_their_own(arch):
    names = [entry.name for entry in LISTED[arch]]
    assert names and len(names) == len(set(names))


@pytest.mark.parametrize("case", cases())
def test_no_register_spills(case, builds):
    refuse_spills(builds(case))


@pytest.mark.parametrize("case", cases())
def test_shared_memory_is_within_the_limit(case, builds):
    refuse_too_much_shared_memory(builds(case))


@pytest.mark.parametrize("case", cases())
def test_dots_become_matrix_instructions(case, builds):
    refuse_missing_matrix_instructions(builds(case))


@pytest.mark.parametrize("case", cases(hot=True))
def test_loops_of_matrix_products_load_16_bytes_at_once(case, builds):
    """But for tensor-float32, whose operands have to lie one way round and are copied one by one where they lie the other."""
    build = builds(case)
    assert build.wide_loads or not build.matrix or any("TF32" in code for code in build.instructions)


@pytest.mark.parametrize("case", cases([90]))
def test_no_address_can_wrap_around(case, builds):
    refuse_narrow_addresses(builds(case))


# ---- the static bound


@pytest.mark.skipif(triton.__version__ != TABLE["triton"], reason=f"the table of bounds is of triton {TABLE['triton']}")
@pytest.mark.parametrize("case", cases([90], hot=True))
def test_no_hot_loop_is_slower_than_the_table_says(case, builds):
    assert case[1] in TABLE["bounds"], f"not in the table; {REWRITE}"
    refuse_slower(hot_loop(builds(case), ENTRIES[case]), TABLE["bounds"][case[1]])


def test_the_table_lists_hot_loops_and_nothing_else():
    assert set(TABLE["bounds"]) == {entry.name for entry in HOT}, REWRITE


def verdicts(builds, kernel: str, label: str) -> set[str]:
    """What bounds the hot loops of kernels whose name and label hold these words."""
    found = [entry for entry in HOT if kernel in entry.kernel.__name__ and label in entry.label]
    assert found, f"no {kernel} with {label!r} and a loop among the entries"
    return {hot_loop(builds((90, entry.name)), entry).verdict for entry in found}


def test_bf16_decode_is_bound_by_memory(builds):
    assert verdicts(builds, "decode_split", "bf16") == {"memory"}


def test_column_mass_of_all_queries_is_bound_by_matrix_products(builds):
    assert verdicts(builds, "column_mass", "all queries") == {"matrix"}


# ---- planted faults


def fault(kernel, constants: dict[str, int], blocks: dict[str, int], *, warps: int = 4, loop: Loop | None = None, **types: str) -> Entry:
    return Entry(kernel, "planted", {"KEYS": "*bf16", "OUT": "*bf16", **types}, constants, Tile(blocks, warps), loop=loop)


def test_spilling_tile_is_refused():
    spilling = fault(planted.spilling_tile, {"D": 128}, {"BLOCK_L": 64}, warps=1)
    with pytest.raises(AssertionError, match="bytes of registers spill"):
        refuse_spills(built(spilling, 90))


def test_int32_address_is_refused():
    with pytest.raises(AssertionError, match="int32 offsets can wrap around on KEYS;"):
        refuse_narrow_addresses(built(fault(planted.narrow_row, {"D": 128}, {}, row="i32"), 90))


NARROW = (
    planted.narrow_tile,
    planted.narrow_stride,
    planted.narrow_page,
    planted.late_cast,
    planted.narrow_counter,
    planted.narrow_branch,
    planted.narrow_step,
)


@pytest.mark.parametrize("kernel", NARROW)
def test_int32_address_is_refused_wherever_it_comes_from(kernel):
    entry = fault(kernel, {"D": 128}, {"BLOCK_L": 64}, table="*i32", stride="i32", length="i32")
    assert narrow_addresses(built(entry, 90)) == {"KEYS"}


@pytest.mark.parametrize("kernel", [planted.wide_tile, planted.held_split])
def test_right_addresses_are_not_refused(kernel):
    entry = fault(kernel, {"D": 128}, {"BLOCK_L": 64}, length="i32", stride="i64")
    refuse_narrow_addresses(built(entry, 90))


def test_dot_without_matrix_instructions_and_too_much_shared_memory_are_refused():
    build = built(fault(planted.narrow_row, {"D": 128}, {}, row="i32"), 90)
    with pytest.raises(AssertionError, match=r"tl\.dot became no matrix instruction"):
        refuse_missing_matrix_instructions(dataclasses.replace(build, ttir="tt.dot", matrix={}))
    with pytest.raises(AssertionError, match="232449 bytes of shared memory, 232448 are there"):
        refuse_too_much_shared_memory(dataclasses.replace(build, shared_bytes=232_449))


def test_slower_loop_and_another_verdict_are_refused():
    bound = Bound(instructions=100, iterations=1, issue=103.0, memory=200.0, matrix=0.0, exponential=0.0)
    with pytest.raises(AssertionError, match="103 issue clocks an iteration, 100 in the table"):
        refuse_slower(bound, {**row(bound), "issue": 100})
    with pytest.raises(AssertionError, match="bound by memory, by issue in the table"):
        refuse_slower(bound, {**row(bound), "verdict": "issue"})


# ---- how code is read


def test_innermost_loop_lies_between_a_label_and_the_jump_back():
    body = ["MOV R1, R2", "LDG.E R3, desc[UR4][R2.64]", "FADD R5, R5, R3", "IADD R1, R1, 1", "ISETP.GE P0, R1, R4"]
    outer = [".L_x_0:", "S2R R0, SR_TID.X", ".L_x_1:", *body, "@!P0 BRA `(.L_x_1)", "@P1 BRA `(.L_x_0)", ".L_x_2:", "BRA `(.L_x_2)"]
    assert innermost_loops(tuple(outer)) == [(*body, "BRA `(.L_x_1)")]


BODY = [*["HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 2, *["IADD R1, R1, 1"] * 5]
WORK = Loop(bytes=1024, flops=2 * 16 * 8 * 16 * 8 * 2, exps=32)


def bound_of(*instructions: str) -> Bound:
    build = Build(90, 32, 0, 0, 0, {}, 0, (), "", instructions)
    return hot_loop(build, fault(planted.narrow_row, {}, {}, warps=8, loop=WORK))


def test_clocks_of_a_loop_are_those_of_its_instructions_and_of_the_work_declared():
    bound = bound_of("MOV R1, R2", ".L_x_0:", *BODY, "@P0 BRA `(.L_x_0)", "EXIT")
    assert (bound.instructions, bound.iterations, bound.issue, bound.exponential) == (8, 1, 16.0, 2.0)
    assert bound.memory == pytest.approx(1024 / 16.45, rel=1e-3) and bound.verdict == "memory"


def test_of_two_loops_with_the_same_matrix_products_the_shorter_is_hot():
    masked = [".L_x_0:", *BODY, "SEL R1, R2, R3, P0", "@P0 BRA `(.L_x_0)"]
    assert bound_of(*masked, ".L_x_1:", *BODY, "@P0 BRA `(.L_x_1)").instructions == 8


def test_code_that_is_unrolled_whole_counts_the_iterations_in_it():
    bound = bound_of(*BODY * 4)
    assert (bound.instructions, bound.iterations, bound.issue, bound.exponential) == (28, 4, 56.0, 8.0)


def test_nothing_is_compiled_in_the_interpreter():
    code = (
        "from learnkv.kernels.build import built; from learnkv.kernels.entry import Entry, Tile; from tests import planted;"
        "built(Entry(planted.double_write, 'planted', {'OUT': '*fp32'}, {}, Tile({'BLOCK_L': 16})), 90)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: double_write planted can't be compiled under TRITON_INTERPRET=1; compile in a process without it"
    )


def test_an_argument_that_the_entry_does_not_name_is_named_in_the_error():
    with pytest.raises(ValueError, match="narrow_row planted: row has neither a type nor a constant"):
        built(fault(planted.narrow_row, {"D": 128}, {}), 90)
    with pytest.raises(ValueError, match="narrow_row planted: the kernel has no argument BLOCK_L"):
        built(fault(planted.narrow_row, {"D": 128}, {"BLOCK_L": 8}, row="i32"), 90)
