"""Rows of one or several comparisons, made fit to be shown together: mixtures are refused, and what a stopped run lacks is named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TypeVar

from learnkv.evaluation import report
from learnkv.evaluation.report import FULL
from learnkv.evaluation.rows import Row, read_rows
from learnkv.places import ROWS

Asked = tuple[str, int]  # prompt, question
K = TypeVar("K")


@dataclass(frozen=True)
class Gathered:
    """Rows of one protocol that may be compared, and what a reader should know of how they came about."""

    rows: list[Row]
    notes: list[str]


def file_of(path: Path) -> Path:
    """The rows of a comparison's folder, or the file itself."""
    found = path / ROWS if path.is_dir() else path
    if not found.is_file():
        raise ValueError(f"no rows of a comparison at {found}; python -m learnkv.evaluate writes them, rows= names its folder")
    return found


def rows_of(paths: Sequence[Path]) -> list[Row]:
    """The rows of all, a measurement that several hold once; raises ValueError where there is none, or they are of two models."""
    found = {(row.key, row.line): row for path in paths for row in read_rows(file_of(path))}
    if not found:
        raise ValueError(f"{file_of(paths[0])} holds no row of a comparison yet; run python -m learnkv.evaluate to its first prompt")
    rows = list(found.values())
    refuse_two_models(rows)
    return rows


def refuse_two_models(rows: Sequence[Row]) -> None:
    models = grouped(rows, lambda row: (row.model, row.weights_hash, row.rope))
    if len({key[1:] for key in models}) > 1:
        said = "; ".join(f"{len(own)} of {model}, weights {weights}, rope {rope}" for (model, weights, rope), own in models.items())
        raise ValueError(f"the rows are of two models: {said}; a comparison has one: report them apart, stale rows belong to another file")


def by_protocol(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """A name for each protocol that the rows were measured under -> its rows; figures of two are never averaged."""
    groups = grouped(rows, lambda r: (r.question_in_prefix, r.dtype, r.prefill, r.num_sinks, r.num_recent, r.split))
    return {name_of(own[0]): own for own in groups.values()}


def name_of(row: Row) -> str:
    """inside-float32-one-shot-4-16-heldout"""
    where = "inside" if row.question_in_prefix else "outside"
    return f"{where}-{row.dtype}-{row.prefill}-{row.num_sinks}-{row.num_recent}-{row.split}"


def gathered(rows: Sequence[Row]) -> Gathered:
    """The rows of one protocol that every line has; raises ValueError where lines were asked different prompts."""
    refuse_other_tokens(rows)
    within, left_out = reached(rows)
    whole, lacking = complete(within)
    return Gathered(whole, [*left_out, *lacking])


def reached(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Without the kinds and tasks on which the full cache alone was run, which are named with what it reaches."""
    lines = {topic: {row.line for row in own} for topic, own in grouped(rows, lambda row: row.topic).items()}
    alone = [topic for topic, found in lines.items() if found == {FULL}] if {row.line for row in rows} != {FULL} else []
    means = {topic: mean_score([row for row in rows if row.topic == topic]) for topic in alone}
    said = [f"left out: {topic}, on which the full cache alone was run and reaches {mean:.2f}" for topic, mean in means.items()]
    return [row for row in rows if row.topic not in means], said


def mean_score(rows: Sequence[Row]) -> float:
    return sum(row.accuracy for row in rows) / len(rows)


def refuse_other_tokens(rows: Sequence[Row]) -> None:
    """Raises a ValueError where one prompt has other tokens for another line: its template or tokenizer differs."""
    first: dict[Asked, Row] = {}
    for row in sorted(rows, key=lambda row: not row.tokens):  # those first that kept a hash of theirs
        other = first.setdefault((row.prompt, row.question), row)
        if other.num_tokens != row.num_tokens or (row.tokens and row.tokens != other.tokens):
            said = [f"{one.num_tokens} tokens{one.tokens and f' (hash {one.tokens})'} for {one.line}" for one in (other, row)]
            raise ValueError(f"prompt {row.prompt} has {' and '.join(said)}: another chat template or tokenizer; lines must see the same")


def complete(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The rows of the prompts that every line was asked at every budget, and what a stopped run lacks, by line.

    Raises ValueError where two lines were each asked what the other was not: nothing would be paired.
    """
    groups = grouped(rows, lambda row: (row.line, row.budget, row.gate))
    asked = {key: frozenset((row.prompt, row.question) for row in own) for key, own in groups.items()}
    if len(set(asked.values())) == 1:
        return list(rows), []
    refuse_different(asked)
    every, shared = frozenset().union(*asked.values()), frozenset.intersection(*asked.values())
    lacking = [
        f"{line} at {report.show_budget(budget)} lacks {len(every - own)}" for (line, budget, _), own in asked.items() if own != every
    ]
    said = f"this comparison was stopped, or is still running: of {len(every)} questions, {'; '.join(lacking)}. "
    said += f"All figures are of the {len(shared)} that every line has"
    return [row for row in rows if (row.prompt, row.question) in shared], [said]


def refuse_different(asked: Mapping[tuple[str, float, str], frozenset[Asked]]) -> None:
    named = {own: line for (line, _, _), own in asked.items()}
    for (one, line), (other, rival) in combinations(named.items(), 2):
        if one - other and other - one:
            raise ValueError(
                f"{line} and {rival} were asked different prompts: {len(one - other)} and {len(other - one)} that the other was not, "
                "of another seed, size or chat template; report each run apart, or run both in one comparison"
            )


def grouped(rows: Sequence[Row], key: Callable[[Row], K]) -> dict[K, list[Row]]:
    found: dict[K, list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return dict(found)


def with_lines(rows: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    """The rows under the short names of their lines."""
    return [replace(row, line=names.get(row.line, row.line)) for row in rows]
