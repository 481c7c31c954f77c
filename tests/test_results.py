"""Committed results: rows that are read whole, and the README's tables as they give them."""

from pathlib import Path

import pytest

from benchmarks import tables
from learnkv.evaluation import history
from learnkv.evaluation.rows import read_rows

FILES = sorted(tables.RESULTS.glob("*.jsonl.gz"))


def test_the_readmes_tables_are_what_the_files_give():
    readme = (tables.ROOT / "README.md").read_text()
    assert tables.BLOCK.search(readme)
    assert tables.written(readme) == readme, "run python -m benchmarks.tables"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_line_of_committed_rows_has_every_prompt(path):
    rows = read_rows(path)
    asked = {(row.prompt, row.question) for row in rows if row.scorer == "full"}
    cells = {}
    for row in rows:
        cells.setdefault((row.line, row.budget, row.gate), set()).add((row.prompt, row.question))
    assert asked and all(found == asked for found in cells.values())


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.run.json")), ids=lambda path: path.name)
def test_what_made_committed_rows_is_told_with_every_gate(path: Path):
    entries = history.entries_of(path)
    lines = {row.line for row in read_rows(path.with_name(path.name.replace(".run.json", ".jsonl.gz"))) if ":" in row.line}
    assert entries and lines <= history.gates_in(entries).keys()
