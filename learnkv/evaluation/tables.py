"""All tables of a comparison, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from learnkv.evaluation import report, trained
from learnkv.evaluation.report import FULL
from learnkv.evaluation.rows import Row
from learnkv.evaluation.trained import Lines, Verdict


@dataclass(frozen=True)
class Table:
    """Rows of cells under a title; `printed` says whether the command shows it, or only the file holds it."""

    title: str
    cells: list[list[str]]
    printed: bool = True


def tables(rows: Sequence[Row], groups: Mapping[str, Sequence[str]], gates: Lines, verdicts: Sequence[Verdict]) -> Iterator[Table]:
    """The methods on all prompts and on each group of kinds, what gates cost, their seeds and twins; for the file all in short, kinds and
    differences."""
    parts = parts_of(rows, groups)
    found = {title: report.summarise(part) for title, part in parts.items()}
    for title, summaries in found.items():
        yield Table(title, report.table(summaries))
    if gates:
        yield Table("costs", trained.costs(next(iter(found.values())), gates))
        yield from of_gates(rows, verdicts)
    of_groups = {title.split(":")[0]: summaries for title, summaries in list(found.items())[1:]}
    if of_groups:
        yield Table("in short: accuracy / NLL, share of the full cache's accuracy", trained.brief(of_groups, gates), printed=False)
    kinds = list(dict.fromkeys(row.kind for row in rows))
    for kind in kinds if len(kinds) > 1 else []:
        yield Table(kind, report.table(report.summarise(rows, kind=kind)), printed=False)
    yield from against(parts, gates)


def parts_of(rows: Sequence[Row], groups: Mapping[str, Sequence[str]]) -> dict[str, Sequence[Row]]:
    """Title -> rows: all of them, then those of each group of kinds that has any."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    parts = {"all kinds" if len(kinds) > 1 else kinds[0]: rows}
    for name, members in groups.items():
        if part := [row for row in rows if row.kind in members]:
            parts[f"{name}: {', '.join(kind for kind in kinds if kind in members)}"] = part
    return parts


def of_gates(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> Iterator[Table]:
    """Training seeds side by side, and gates beside their twins."""
    seeds = trained.seeds(rows)
    if len(seeds) > 1:
        yield Table("training seeds", seeds)
    if any(v.twin for v in verdicts):
        yield Table("twins trained on shuffled targets", trained.twins(verdicts))


def against(parts: Mapping[str, Sequence[Row]], gates: Lines) -> Iterator[Table]:
    """Each line of gates minus every other method, on all prompts and on each group; twins have a table of their own."""
    twins = {line for line, runs in gates.items() if all(run.shuffled for run in runs)}
    for title, rows in parts.items():
        lines = [line for line in report.by_line(rows) if line != FULL and line not in twins]
        for line in lines if len({row.prompt for row in rows}) > 1 else []:
            if line in gates:
                others = [other for other in lines if other != line]
                yield Table(f"{line} against the others, {title}", report.gaps(rows, line, others), printed=False)
