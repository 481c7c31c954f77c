"""The README's tables of results, from the files in benchmarks/results: `python -m benchmarks.tables` writes each between its markers.

<!-- short NAME -->    accuracy / NLL and share of the full cache's accuracy by group of kinds and budget; weights and training of gates
<!-- tasks NAME -->    score by budget over all tasks, with its share of the full cache's, then score / NLL of each task at one budget
<!-- lengths NAME -->  score by the length of the prompt and budget
Each ends with <!-- end -->.  NAME.jsonl.gz holds the rows of a comparison and NAME.run.json what its runs left beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from learnkv.evaluation import history, report, trained
from learnkv.evaluation.choice import BEST
from learnkv.evaluation.claims import CONTROLS
from learnkv.evaluation.history import Entry
from learnkv.evaluation.report import ALL, FULL, Summary
from learnkv.evaluation.rows import Row, read_rows
from learnkv.evaluation.trained import TWIN
from learnkv.files import write_atomically
from learnkv.gates import GATES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- (?P<kind>short|tasks|lengths) (?P<name>\w+) -->\n.*?<!-- end -->", re.DOTALL)
SHOWN = 0.1  # the budget at which each task is shown


def written(text: str) -> str:
    """The README with its tables as the files have them."""
    return BLOCK.sub(lambda found: f"<!-- {found['kind']} {found['name']} -->\n{table(found['kind'], found['name'])}\n<!-- end -->", text)


def table(kind: str, name: str) -> str:
    rows = [row for row in read_rows(RESULTS / f"{name}.jsonl.gz") if not row.line.endswith(TWIN) and row.line != BEST]
    rows.sort(key=standing)
    entries = history.entries_of(RESULTS / f"{name}.run.json")
    return report.markdown({"short": short, "tasks": by_task, "lengths": by_length}[kind](rows, entries))


def standing(row: Row) -> int:
    """Controls first, then gates, then heuristics."""
    return 0 if row.scorer in CONTROLS else 1 if row.scorer in GATES else 2


def short(rows: Sequence[Row], entries: Sequence[Entry]) -> list[list[str]]:
    groups = {name: kinds for each in entries for name, kinds in each.groups.items()}
    parts = {name: report.summarise([row for row in rows if row.topic in kinds]) for name, kinds in groups.items()}
    cells = trained.brief(parts, history.gates_in(entries))
    return [line[:-1] for line in quoted(cells)]  # without what a method adds to a prefill, which was taken beside other work


def by_task(rows: Sequence[Row], entries: Sequence[Entry]) -> list[list[str]]:
    topics = list(dict.fromkeys(row.topic for row in rows))
    parts = {ALL: report.summarise(rows)} | {topic: report.summarise(rows, kind=topic) for topic in topics}
    budgets = budgets_of(parts[ALL])
    header = ["method", *(f"all, {report.show_budget(b)}" for b in budgets), *(f"{t}, {report.show_budget(SHOWN)}" for t in topics)]
    wanted = [*((ALL, b) for b in budgets), *((topic, SHOWN) for topic in topics)]
    return quoted([header, *filled(parts, wanted)])


def by_length(rows: Sequence[Row], entries: Sequence[Entry]) -> list[list[str]]:
    lengths = sorted({length_of(row) for row in rows})
    parts = {f"{n:,} tokens": report.summarise([row for row in rows if length_of(row) == n]) for n in lengths}
    wanted = [(part, b) for part in parts for b in budgets_of(parts[part])]
    header = ["method", *(f"{part}, {report.show_budget(b)}" for part, b in wanted)]
    return quoted([header, *filled(parts, wanted)])


def filled(parts: Mapping[str, Sequence[Summary]], wanted: Sequence[tuple[str, float]]) -> list[list[str]]:
    """A row per line: score / NLL and share of the full cache's score in each (part, budget)."""
    found = {(part, s.line, s.budget): s for part, summaries in parts.items() for s in summaries}
    lines = {s.line: s for s in next(iter(parts.values()))}
    return [
        [trained.short_name(first), *(trained.kept(found.get((part, line, first.budget if line == FULL else b))) for part, b in wanted)]
        for line, first in lines.items()
    ]


def budgets_of(summaries: Sequence[Summary]) -> list[float]:
    return sorted({s.budget for s in summaries if s.line != FULL}, reverse=True)


def length_of(row: Row) -> int:
    """The length that was asked for, a power of two just above context and question."""
    return 1 << (row.num_tokens - 1).bit_length()


def quoted(cells: list[list[str]]) -> list[list[str]]:
    """Names of methods as code."""
    header, *rows = cells
    return [header, *([as_code(row[0]), *row[1:]] for row in rows)]


def as_code(name: str) -> str:
    """`snapkv(kernel_size=5)+adaptive`, 3 seeds"""
    return name if name == FULL else re.sub(r"^[^, (]+(\([^)]*=[^)]*\))?(\+\w+)?", r"`\g<0>`", name)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = written(readme.read_text())
    write_atomically(readme, lambda to: to.write_text(text))
