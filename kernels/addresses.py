"""Which pointer arguments of a kernel are addressed by int32 arithmetic that can wrap around, by Triton's first form of its code.

Every integer is followed through the code with these sizes in mind: program ids stay below 2**18; run-time integers, numbers loaded from
memory, sums and loop counters below 2**24; constants are what they are.  The product of two that are no constants is an index again and
so below 2**24, but where one of them is loaded from memory (a page, a start, a length) or is an argument with `stride` in its name, it
is as large as it gets.  A pointer argument is narrow where one of its offsets comes from int32 arithmetic that can pass 2**31 then.

So `tile * BLOCK + arange` and `split * slots_each` are fine in int32; a row or page times D, or anything times a stride, is not: it is
cast to int64 before it is multiplied.  tl.minimum with a good number makes good, and so does a loop's end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

PROGRAMS = 2**18
COUNTS = 2**24
WRAPS = 2**31


@dataclass(frozen=True)
class Number:
    """What is known of a value.

    size      it stays below
    exact     it is a constant of this size
    far       it comes from memory or is a stride, so that a product of it is no index
    wrapped   int32 arithmetic on the way to it may have passed 2**31
    argument  the pointer argument that it points into
    """

    size: int = COUNTS
    exact: bool = False
    far: bool = False
    wrapped: bool = False
    argument: str | None = None

    def either(self, other: Number) -> Number:
        return Number(
            size=max(self.size, other.size),
            exact=self.exact and other.exact,
            far=self.far or other.far,
            wrapped=self.wrapped or other.wrapped,
            argument=self.argument or other.argument,
        )

    def carried(self, yielded: Number) -> Number:
        """What a loop starts with and hands on: a count where it changes."""
        number = self.either(yielded)
        return number if self.size == yielded.size else replace(number, size=max(number.size, COUNTS), exact=False)


CARRIED = {
    "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.unsplat", "tt.bitcast",
    "arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast",
}  # fmt: skip
SIZES: dict[str, Callable[[Number, Number], int]] = {
    "addi": lambda a, b: a.size + b.size,
    "subi": lambda a, b: a.size + b.size,
    "muli": lambda a, b: a.size * b.size if a.exact or b.exact or a.far or b.far else min(a.size * b.size, COUNTS),
    "shli": lambda a, b: a.size << b.size if b.exact else COUNTS,
    "divsi": lambda a, b: a.size // max(1, b.size) + 1 if b.exact else a.size,
    "shrsi": lambda a, b: (a.size >> b.size) + 1 if b.exact else a.size,
    "andi": lambda a, b: min(a.size, b.size),
    "remsi": lambda a, b: min(a.size, b.size),
    "minsi": lambda a, b: min(a.size, b.size),
    "maxsi": lambda a, b: max(a.size, b.size),
    "ori": lambda a, b: max(a.size, b.size),
    "xori": lambda a, b: max(a.size, b.size),
}
VALUE = r"%[\w#]+"


def narrow_arguments(ttir: str, arguments: tuple[str, ...]) -> set[str]:
    """Those of a kernel's run-time arguments that are narrow pointers.  ttir: Triton's first form of it."""
    walk = Walk(arguments)
    for _ in range(3):  # what a loop carries reaches its start in the next round
        walk.round(ttir)
    return walk.narrow


class Walk:
    """One reading of a kernel's TTIR, line by line, since names are used again in regions that lie side by side."""

    def __init__(self, arguments: tuple[str, ...]):
        self.arguments = arguments
        self.yielded: dict[tuple[int, int], Number] = {}  # by the line of a loop and the place among its values: what it yields
        self.narrow: set[str] = set()

    def round(self, ttir: str) -> None:
        self.known: dict[str, Number] = {}
        self.open: list[tuple[int, str]] = []  # the line and text of each region around
        for at, line in enumerate(re.sub(r'\s*loc\((?:[^()"]|"[^"]*"|\([^()]*\))*\)', "", ttir).splitlines()):
            line = line.strip()
            if line.startswith("}"):
                self.close(line)
            if line.startswith("tt.func public"):
                self.begin(line)
            elif line.startswith(("scf.yield", "scf.condition")):
                self.leave(line)
            elif line.startswith("^bb0("):
                self.enter_block(line)
            elif line.startswith(("%", "scf.for", "scf.while")):
                self.operation(at, line)
            if line.endswith("{"):
                self.open.append(self.closed if line.startswith("}") else (at, line))

    def begin(self, line: str) -> None:
        """The function's arguments, in the order of the kernel's."""
        names = re.findall(rf"({VALUE}): (?:!|i|f|bf|tensor)", line)
        for name, argument in zip(names, self.arguments, strict=True):
            self.known[name] = Number(far="stride" in argument, argument=argument)

    def close(self, line: str) -> None:
        self.closed = self.open.pop()
        if not line.endswith("{"):
            self.results(*self.closed)

    def leave(self, line: str) -> None:
        """What a region hands on: to the start of its loop, to the block after a while's condition, or to the results of an if."""
        at, _ = self.open[-1]
        values = self.operands(line.split(" : ")[0])[line.startswith("scf.condition") :]
        for place, value in enumerate(values):
            before = self.yielded.get((at, place))
            self.yielded[at, place] = value if before is None else before.either(value)

    def enter_block(self, line: str) -> None:
        """The block of a while's body takes what its condition hands on; those of a reduction or scan take anything."""
        at, _ = self.open[-1]
        for place, name in enumerate(re.findall(rf"({VALUE}):", line)):
            self.known[name] = self.yielded.get((at, place), Number())

    def results(self, at: int, line: str) -> None:
        """The results of an operation with regions, once they are closed."""
        if not line.startswith("%"):
            return
        wrapped = any(x.wrapped for x in self.operands(line.split(" = ", 1)[1]))
        for place, name in enumerate(named(line)):
            self.known[name] = self.yielded.get((at, place), Number(wrapped=wrapped))

    def operation(self, at: int, line: str) -> None:
        code = line.split(" = ", 1)[1] if line.startswith("%") else line
        kind = code.split()[0].split("(")[0].strip('"')
        if line.endswith("{"):
            self.enter_loop(at, code, kind)
            return
        value = self.value(kind, code.split(" : ")[0], line.rsplit(" : ", 1)[-1])
        self.known |= dict.fromkeys(named(line), value)

    def enter_loop(self, at: int, code: str, kind: str) -> None:
        """The values that a for or while starts with, joined with what it carried in the round before."""
        if kind == "scf.for":
            counter, low, high = re.findall(VALUE, code)[:3]
            self.known[counter] = Number(max(self.number(low).size, self.number(high).size), wrapped=self.number(high).wrapped)
        starts = re.search(r"iter_args\((.*?)\) ->|scf\.while \((.*?)\) :", code)
        pairs = re.findall(rf"({VALUE}) = ({VALUE})", next(filter(None, starts.groups()), "")) if starts else []
        for place, (name, start) in enumerate(pairs):
            first = self.number(start)
            self.known[name] = first.carried(self.yielded.get((at, place), first))

    def value(self, kind: str, code: str, type: str) -> Number:
        """What one operation without regions makes of its operands."""
        given = self.operands(code)
        if kind == "tt.addptr":
            pointer, offset = given
            if offset.wrapped and pointer.argument:
                self.narrow.add(pointer.argument)
            return pointer
        if kind == "arith.constant":
            whole = re.search(r"(?:dense<|constant )(-?\d+)\b(?!\.)", code)
            return Number(abs(int(whole.group(1))), exact=True) if whole else Number()
        if kind == "tt.make_range":
            return Number(int(code.split("end = ")[1].split()[0]))
        if kind in ("tt.get_program_id", "tt.get_num_programs"):
            return Number(PROGRAMS)
        if kind in CARRIED and given:
            return given[0]
        if kind == "arith.select":
            return given[1].either(given[2])
        operator = re.sub("ui$", "si", kind.removeprefix("arith."))
        if operator in SIZES:
            return arithmetic(operator, given[0], given[1], "i32" in type)
        kept = kind.startswith("arith.") and "cmp" not in kind
        return Number(far=kind == "tt.load", wrapped=kept and any(x.wrapped for x in given))

    def operands(self, code: str) -> list[Number]:
        return [self.number(name) for name in re.findall(VALUE, code)]

    def number(self, name: str) -> Number:
        return self.known.get(name, Number())


def named(line: str) -> list[str]:
    """The names of an operation's results: %a, or %a#0, %a#1 and so on, or %a, %b."""
    left = line.split(" = ", 1)[0]
    name, _, count = left.partition(":")
    return [f"{name}#{i}" for i in range(int(count))] if count else left.split(", ")


def arithmetic(operator: str, a: Number, b: Number, narrow: bool) -> Number:
    """An integer operation; in int32 it wraps where its size passes 2**31.  What is held below a good number is good again."""
    size = SIZES[operator](a, b)
    before = (a.wrapped and b.wrapped) if operator in ("andi", "minsi") else (a.wrapped or b.wrapped)
    return Number(
        size=min(size, WRAPS) if narrow else size,
        exact=a.exact and b.exact,
        far=a.far or b.far,
        wrapped=before or (narrow and size >= WRAPS),
    )
