"""A request trace: JSONL with arrival, prompt and output, or CSV with these columns; seconds and tokens."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from learnkv.serving.requests import Session, Turn

COLUMNS = ("arrival", "prompt", "output")


def read_trace(path: Path) -> list[Session]:
    """One session of one turn for each line, in the order of the file.

    Raises ValueError with the number of the first line that is no request, or that comes before the one above it.
    """
    found = list(jsonl(path) if path.suffix == ".jsonl" else table(path))
    if not found:
        raise ValueError(f"{path} holds no requests; give lines with {', '.join(COLUMNS)}")
    for (_, earlier), (line, later) in pairwise(found):
        if later.start < earlier.start:
            raise ValueError(f"{path}:{line}: arrival {later.start:g} comes before {earlier.start:g} of the request above; sort by arrival")
    return [session for _, session in found]


def jsonl(path: Path) -> Iterator[tuple[int, Session]]:
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if line.strip():
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error.msg}") from error
            yield number, request(f"{path}:{number}", values)


def table(path: Path) -> Iterator[tuple[int, Session]]:
    reader = csv.DictReader(text_of(path).splitlines())
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
    if missing:
        raise ValueError(f"{path}:1: no column {', '.join(missing)}; the first line names arrival, prompt and output")
    for values in reader:
        yield reader.line_num, request(f"{path}:{reader.line_num}", values)


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}") from error


def request(where: str, values: object) -> Session:
    """A line's request; ValueError where a value is missing or none."""
    if not isinstance(values, dict):
        raise ValueError(f"{where}: a request is an object with {', '.join(COLUMNS)}, this is {values!r}")
    arrival, prompt, output = (number_of(where, name, values.get(name)) for name in COLUMNS)
    if arrival < 0:
        raise ValueError(f"{where}: arrival {arrival:g} is before 0 seconds")
    for name, value in (("prompt", prompt), ("output", output)):
        if value < 1 or value != int(value):
            raise ValueError(f"{where}: {name} {value:g} is no count of tokens, 1 or more")
    return Session(arrival, (Turn(int(prompt), int(output)),))


def number_of(where: str, name: str, value: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: {name} is {value!r}; give a number")
    return number
