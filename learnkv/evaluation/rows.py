"""The rows of a comparison: one per prompt, question, method and budget, appended to a JSONL file that a stopped run goes on from."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

from learnkv.budgets import Ratio, resolve
from learnkv.counts import check_count
from learnkv.locks import alone
from learnkv.typed import checked

FORMAT_VERSION = 2
FOREIGN = "it was edited, or written by another version: use another file"


@dataclass(frozen=True)
class Cell:
    """What is measured: everything that decides a row's figures, and the names it is shown under.

    prompt, kind, split, question    the prompt's id, generator and side; which of its questions
    num_tokens                       tokens of the context, which is what may be evicted
    line                             the line of the table that the row belongs to
    method, scorer, allocator        `snapkv(kernel_size=5)+adaptive`, `snapkv`, `adaptive`
    run, gate                        folder and hash of a gate, or the hash of a method's file; several runs of a line are training seeds
    budget, budget_form              a fraction of the context ("ratio") or tokens per KV head ("tokens")
    question_in_prefix               whether the question was there when tokens were evicted
    prefill                          "one-shot", or "chunked"
    num_sinks, num_recent            first and last tokens that always stay
    model, weights_hash, rope, dtype the base model; rope is a hash of its RoPE frequencies
    task                             the task that judges the answer, "" where the answer's tokens are matched under teacher forcing
    tokens                           8 hex digits of context, question and answer as tokens; "" in rows from before it was kept
    """

    prompt: str
    kind: str
    split: str
    question: int
    num_tokens: int
    line: str
    method: str
    scorer: str
    allocator: str
    run: str
    gate: str
    budget: float
    budget_form: str
    question_in_prefix: bool
    prefill: str
    num_sinks: int
    num_recent: int
    model: str
    weights_hash: str
    rope: str
    dtype: str
    task: str = field(default="", kw_only=True)
    tokens: str = field(default="", kw_only=True)

    @property
    def topic(self) -> str:
        """What the row's prompt is one of: its task, or without one its kind."""
        return self.task or self.kind

    @property
    def key(self) -> str:
        """16 hex digits of what decides the figures; rows of equal keys are the same measurement, whatever line shows them."""
        shown = {"kind", "split", "num_tokens", "line", "run", "model", "tokens"}
        shown |= set() if self.task else {"task"}  # rows had their keys before there were tasks
        decides = {f.name: getattr(self, f.name) for f in fields(Cell) if f.name not in shown}
        return hashlib.sha256(json.dumps([FORMAT_VERSION, decides], sort_keys=True).encode()).hexdigest()[:16]

    @property
    def free(self) -> int:
        """Tokens per KV head that the budget leaves beside the protected ones."""
        budget = Ratio(self.budget) if self.budget_form == "ratio" else int(self.budget)
        kept = min(int(resolve(budget, torch.tensor(self.num_tokens))), self.num_tokens)
        return max(0, kept - self.num_sinks - self.num_recent)


@dataclass(frozen=True)
class Row(Cell):
    """A cell with its figures.

    accuracy         1.0 when every answer token is the argmax under teacher forcing, else 0.0; of a task its score, 0 to 1
    nll              mean negative log-likelihood of the answer's tokens, nats
    span_kept        share of the answer span's tokens that were kept, mean over layers and heads; None where no span is known
    kept_mean        tokens kept per head after eviction, mean and max over layers and heads
    kept_max
    bytes_held       what the cache holds after eviction, before the question
    prefill_seconds  one full-cache prefill of the run's first prompt, and what the method's scoring, extra passes and eviction add to it
    extra_seconds
    prediction       the generated answer that a task's score is of
    """

    accuracy: float
    nll: float
    span_kept: float | None
    kept_mean: float
    kept_max: int
    bytes_held: int
    prefill_seconds: float
    extra_seconds: float
    prediction: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        for name, figure in {"NLL": self.nll, "score": self.accuracy}.items():
            if not math.isfinite(figure):
                raise ValueError(
                    f"prompt {self.prompt}, {self.method} at budget {self.budget:g}: the answer's {name} is {figure}; row refused"
                )


def budget_of(value: float) -> int | Ratio:
    """A budget as it is typed: 0.1 is a fraction of the context, 64 is tokens per KV head."""
    if 0 < value < 1:
        return Ratio(value)
    if not (math.isfinite(value) and value >= 1 and value == int(value)):
        raise ValueError(f"budget={value:g} is neither a whole number of tokens per KV head nor a fraction between 0 and 1")
    check_count("budget", int(value))
    return int(value)


class RowFile:
    """A JSONL file of rows.  Each row is one write of one line; a line torn by a kill is dropped when the file is opened again.

    One process at a time: raises ValueError while another has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lock = alone(path, "writing rows to", "wait for it, or give another evaluate.out")
        rows = read_rows(path) if path.exists() else []
        self.done = {row.key: row for row in rows}
        self.shown = {(row.key, row.line) for row in rows}
        if path.exists():
            os.truncate(path, len(whole_lines(path)))

    def append(self, row: Row) -> None:
        data = f"{line_of(row)}\n".encode()
        with self.path.open("ab", buffering=0) as file:
            if file.write(data) != len(data):
                raise OSError(f"{self.path}: the disk took only part of a row; free some space and run again, nothing else is lost")
        self.done[row.key] = row
        self.shown.add((row.key, row.line))

    def show(self, rows: Iterable[Row]) -> None:
        """Appends the rows whose measurement is there under other lines only: whoever reads the file finds every line whole."""
        for row in rows:
            if (row.key, row.line) not in self.shown:
                self.append(row)


BEGIN = b'{"key": "'  # how every line begins


def line_of(row: Row) -> str:
    """The row as a line, with a checksum: an edited figure shows."""
    values = {"key": row.key, **asdict(row)}
    return json.dumps({**values, "crc": zlib.crc32(json.dumps(values).encode())})


def whole_lines(path: Path) -> bytes:
    """A file up to and including the last newline.

    What comes after must be the beginning of one of our lines, which a kill has torn; ValueError where it is anything else.
    """
    data = contents(path)
    whole, newline, rest = data.rpartition(b"\n")
    if rest and not (rest.startswith(BEGIN) or BEGIN.startswith(rest)):
        raise ValueError(f"{path}: its last line, without an end, is no row of a comparison: {rest[:40]!r}; {FOREIGN}")
    return whole + newline


def contents(path: Path) -> bytes:
    """The bytes of a file, unpacked where its name ends in .gz."""
    data = path.read_bytes()
    try:
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or no gzip file ({error})") from error


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; a torn last line is left out, any other broken line is an error with its number."""
    lines = whole_lines(path).decode(errors="replace").splitlines()
    return [parse_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def parse_row(line: str, where: str) -> Row:
    try:
        values = json.loads(line)
        crc = values.pop("crc")
        edited = crc != zlib.crc32(json.dumps(values).encode())
        key = values.pop("key")
        row = checked(Row(**values))
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is no row of a comparison ({error}); {FOREIGN}") from error
    except ValueError as error:  # a figure that no row may hold
        raise ValueError(f"{where}: {error}") from error
    if key != row.key:
        raise ValueError(f"{where}: its key is {key} but its values give {row.key}; {FOREIGN}")
    if edited:
        raise ValueError(f"{where}: its figures do not fit its checksum {crc}; {FOREIGN}")
    return row
