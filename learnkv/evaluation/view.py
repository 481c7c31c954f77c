"""View: a comparison's rows summarised once for a page, with the names that lines go by and those that stand in front."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learnkv.evaluation import claims, report
from learnkv.evaluation.charts import STYLES, Style
from learnkv.evaluation.gather import with_lines
from learnkv.evaluation.report import ALL, FULL, Summary
from learnkv.evaluation.rows import Row
from learnkv.evaluation.trained import TWIN
from learnkv.gates import GATES
from learnkv.names import unknown

WANTED = 0.1  # the budget that is shown where only one can be
FRONT = 6  # lines in front, unless they are named: more can't be told apart at a glance


@dataclass(frozen=True)
class View:
    """Rows under their short names, and what a page's figures are drawn from.

    folders  short name -> the line as the rows had it
    topics   "all" and every kind or task, where there are several -> summaries
    styles   line in front -> how it is drawn
    budget   the one that bars, sheet and examples are of
    """

    rows: list[Row]
    folders: dict[str, str]
    topics: dict[str, list[Summary]]
    styles: dict[str, Style]
    budget: float

    @property
    def summaries(self) -> list[Summary]:
        return self.topics[ALL]

    @property
    def lines(self) -> list[str]:
        """Lines in front first, then the others, the full cache aside."""
        own = [line for line in dict.fromkeys(s.line for s in self.summaries) if line != FULL]
        return [*self.styles, *(line for line in own if line not in self.styles)]

    @property
    def score(self) -> str:
        """What the figures are called."""
        return "score" if any(row.task for row in self.rows) else "accuracy"

    def level(self, topic: str = ALL) -> float | None:
        """The full cache's score."""
        return next((s.accuracy.value for s in self.topics[topic] if s.line == FULL), None)

    def at(self, line: str) -> Summary | None:
        """A line at the one budget; the full cache at its own."""
        return next((s for s in self.summaries if s.line == line and (line == FULL or s.budget == self.budget)), None)


def view(rows: Sequence[Row], front: Sequence[str] = (), budget: float | None = None) -> View:
    """Raises ValueError for a line in front or a budget that is not among the rows."""
    names = short_names(rows)
    found = with_lines(rows, names)
    topics = list(dict.fromkeys(row.topic for row in found))
    summaries = {ALL: report.summarise(found)} | {t: report.summarise(found, kind=t) for t in topics if len(topics) > 1}
    chosen = chosen_budget(summaries[ALL], budget)
    lines = [named(line, names) for line in front] or in_front(found, summaries[ALL], chosen)
    styles = dict(zip(lines, STYLES, strict=False))
    return View(found, {short: line for line, short in names.items()}, summaries, styles, chosen)


def short_names(rows: Sequence[Row]) -> dict[str, str]:
    """Line -> the line without its gates' folder, or with the folder's end where two would be called the same."""
    lines = list(report.by_line(rows))
    twice = {name for name, count in Counter(map(shortened, lines)).items() if count > 1}
    return {line: shortened(line, f" ({folder_of(line)})" if shortened(line) in twice and ":" in line else "") for line in lines}


def shortened(line: str, where: str = "") -> str:
    """What a line is called, with `where` before the words that tell a twin."""
    twin = TWIN if line.endswith(TWIN) else ""
    return line.removesuffix(TWIN).split(":", 1)[0] + where + twin


def folder_of(line: str) -> str:
    return line.removesuffix(TWIN).rpartition("/")[2]


def chosen_budget(summaries: Sequence[Summary], budget: float | None) -> float:
    there = sorted({s.budget for s in summaries if s.line != FULL})
    if not there:
        raise ValueError("the rows are of the full cache alone, so there is nothing to compare; evaluate a method beside it")
    if budget is not None and budget not in there:
        raise ValueError(f"budget={budget:g} is not among the rows; there are {', '.join(f'{b:g}' for b in there)}")
    wanted = WANTED if budget is None else budget
    return wanted if wanted in there else there[len(there) // 2]


def named(line: str, names: Mapping[str, str]) -> str:
    """The short name of a line that was given by either name."""
    if line in names.values():
        return line
    if line not in names:
        raise unknown("line", line, [*names.values()])
    return names[line]


def in_front(rows: Sequence[Row], summaries: Sequence[Summary], budget: float) -> list[str]:
    """The best gates and the best heuristic; without gates the best of all."""
    cells = claims.cells_of(rows)
    own = {line: found for (line, _), found in cells.items() if not claims.is_control(found)}
    ranked = sorted(own, key=lambda line: standing(summaries, line), reverse=True)
    gates = [line for line in ranked if own[line][0].scorer in GATES][: FRONT - 1]
    best = claims.best_heuristics(cells).get(budget)
    return [*gates, *([best] if best else [])] if gates else ranked[:FRONT]


def standing(summaries: Sequence[Summary], line: str) -> tuple[float, float]:
    """Mean accuracy over a line's budgets, then the NLL turned round."""
    own = [s for s in summaries if s.line == line]
    return sum(s.accuracy.value for s in own) / len(own), -sum(s.nll.value for s in own) / len(own)
