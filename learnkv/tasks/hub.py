"""A benchmark's rows, read from a hub id or from a folder with NAME.jsonl, and its prompts in their order.

A hub needs network the first time.  A row that lacks something is refused by its number; a prompt that is longer than asked for loses the
middle of its context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from learnkv.prompts import Prompt
from learnkv.prompts.make import json_object
from learnkv.tasks.task import Make, Size


@dataclass(frozen=True)
class Table:
    """Rows of one kind.

    benchmark  whose they are, for messages
    name       of the file in a folder, without .jsonl
    columns    what every row must have
    config     what the hub calls them, "" where it holds no others
    split      of the hub's
    """

    benchmark: str
    name: str
    columns: tuple[str, ...]
    config: str = ""
    split: str = "test"


@dataclass(frozen=True)
class Row:
    """A row's columns, and how a message calls it."""

    where: str
    columns: dict

    def text(self, column: str) -> str:
        """A column that must hold text."""
        text = self.columns.get(column)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{self.where} has no text as its {column}; give some")
        return text


def rows(table: Table, source: str) -> Iterator[Row]:
    """The rows in their order.  Raises ValueError where neither a folder nor the hub has them, or one lacks a column."""
    for number, columns in enumerate(read(table, source)):
        row = Row(f"{source}, {table.name}, row {number}", columns)
        missing = [column for column in table.columns if column not in columns]
        if missing:
            raise ValueError(f"{row.where} has no {missing[0]}; a row needs {', '.join(table.columns)}")
        yield row


def read(table: Table, source: str) -> Iterable[dict]:
    path = Path(source) / f"{table.name}.jsonl"
    if path.is_file():  # not through `datasets`, whose reader takes an answer like "2024-01-01" for a date
        lines = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        return [json_object(line, f"{path}, line {number}", "one object per line") for number, line in lines if line.strip()]
    from datasets import load_dataset  # seconds to import, for a hub's rows only

    try:
        return load_dataset(source, table.config or None, split=table.split)
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such id, no such table in it, a script for older `datasets`
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{table.benchmark}'s {table.name} can't be read from {source} ({reason}); give a folder with {path.name}, or run with network"
        ) from error


def in_order(table: Table, prompt_of: Callable[[Row], Prompt]) -> Callable[[str], Make]:
    """source -> a prompt of each row in the benchmark's order, whatever the seed."""

    def make(source: str, size: Size, seed: int) -> Iterator[Prompt]:
        for row in rows(table, source):
            yield cut_middle(prompt_of(row), size)

    return lambda source: partial(make, source)


def cut_middle(prompt: Prompt, size: Size) -> Prompt:
    """The prompt with as many of the context's first and last tokens as fit."""
    if size.fits(prompt):
        return prompt
    ids = cast(list[int], size.tokenizer(prompt.context, add_special_tokens=False)["input_ids"])
    kept = len(ids)
    while kept > 0:
        kept -= max(1, size.over(prompt))
        ends = (ids[: kept - kept // 2], ids[len(ids) - kept // 2 :])
        prompt = replace(prompt, context="".join(size.tokenizer.decode(part) for part in ends if part))
        if size.fits(prompt):
            return prompt
    raise ValueError(f"a question of {prompt.kind} alone is longer than num_tokens={size.num_tokens}; give more")
