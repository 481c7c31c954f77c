"""All tables of a comparison, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from learnkv.evaluation import claims, report, trained
from learnkv.evaluation.claims import Claims, Primary
from learnkv.evaluation.report import FULL
from learnkv.evaluation.rows import Row
from learnkv.evaluation.statistics import FEWEST, too_few
from learnkv.evaluation.trained import Lines, Verdict


@dataclass(frozen=True)
class Table:
    """Rows of cells under a title; `printed` says whether the command shows it, or only the file holds it."""

    title: str
    cells: list[list[str]]
    printed: bool = True


def tables(
    rows: Sequence[Row], groups: Mapping[str, Sequence[str]], gates: Lines, verdicts: Sequence[Verdict], primary: Primary | None = None
) -> Iterator[Table]:
    """The methods on all prompts and on each group of kinds, what gates cost, their seeds and twins; for the file claims, all in
    short, kinds and differences.  A declared endpoint comes first."""
    primary = primary or Primary()
    parts = parts_of(rows, groups)
    found = {title: report.summarise(part) for title, part in parts.items()}
    claimed = claims_of_parts(rows, groups, parts, primary)
    if primary.methods:
        yield endpoint(rows, groups, primary)
    for title, summaries in found.items():
        yield Table(counted(title, parts[title]), report.table(summaries, claims.marks(claimed[title]) if title in claimed else None))
    if gates:
        yield Table("costs", trained.costs(next(iter(found.values())), gates))
        yield from of_gates(rows, verdicts)
    for title, of_part in claimed.items():
        yield Table(f"claims, {title}", claims.table(of_part), printed=False)
    of_groups = {title.split(":")[0]: summaries for title, summaries in list(found.items())[1:]}
    if of_groups:
        yield Table("in short: accuracy / NLL, share of the full cache's accuracy", trained.brief(of_groups, gates), printed=False)
    kinds = list(dict.fromkeys(row.topic for row in rows))
    for kind in kinds if len(kinds) > 1 else []:
        own = [row for row in rows if row.topic == kind]
        yield Table(counted(kind, own), report.table(report.summarise(own)), printed=False)
    yield from against(parts, gates)


def claims_of_parts(
    rows: Sequence[Row], groups: Mapping[str, Sequence[str]], parts: Mapping[str, Sequence[Row]], primary: Primary
) -> dict[str, Claims]:
    """Title -> what may be claimed on these prompts, where they are enough; the declared endpoint is not corrected where it stands."""
    declared = part_of(rows, groups, primary.group) if primary.metric == "accuracy" else []
    spared = [(line, primary.budget) for line in primary.methods]
    enough = {title: part for title, part in parts.items() if count(part) >= FEWEST}
    return {title: claims.claims_of(part, uncorrected=spared if part == declared else ()) for title, part in enough.items()}


def endpoint(rows: Sequence[Row], groups: Mapping[str, Sequence[str]], primary: Primary) -> Table:
    """The declared endpoint: the one table whose p-values are not corrected."""
    cells = [(line, primary.budget) for line in primary.methods]
    found = claims.claims_of(part_of(rows, groups, primary.group), metric=primary.metric, uncorrected=cells)
    where = primary.group or "all prompts"
    return Table(f"primary endpoint: {primary.metric}, {report.show_budget(primary.budget)}, {where}", claims.table(found, cells))


def part_of(rows: Sequence[Row], groups: Mapping[str, Sequence[str]], group: str) -> list[Row]:
    """The rows of a group of kinds, all of them for ""."""
    return [row for row in rows if not group or row.topic in groups[group]]


def count(rows: Sequence[Row]) -> int:
    return len({row.prompt for row in rows})


def counted(title: str, rows: Sequence[Row]) -> str:
    """The title, and why its figures have no intervals where they have none."""
    return title if count(rows) >= FEWEST else f"{title} (no intervals: {too_few(count(rows))})"


def parts_of(rows: Sequence[Row], groups: Mapping[str, Sequence[str]]) -> dict[str, Sequence[Row]]:
    """Title -> rows: all of them, then those of each group of kinds that has any."""
    kinds = list(dict.fromkeys(row.topic for row in rows))
    whole = "all tasks" if any(row.task for row in rows) else "all kinds"
    parts = {whole if len(kinds) > 1 else kinds[0]: rows}
    for name, members in groups.items():
        if part := [row for row in rows if row.topic in members]:
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
