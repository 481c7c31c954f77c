"""What a comparison leaves beside its rows: the commands that made them, with what was known of their gates, and the prompts they asked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from learnkv.evaluation.claims import Primary
from learnkv.evaluation.trained import Lines, Trained
from learnkv.files import write_atomically
from learnkv.places import PROMPTS, RUN
from learnkv.prompts import Prompt, Question
from learnkv.typed import checked
from learnkv.version import __version__


@dataclass(frozen=True)
class Entry:
    """One run of a comparison; the same run twice is one entry, so that it says nothing of when.

    command  as it may be typed again
    gates    line -> its gates' trainings
    groups   name -> kinds that have a table together
    primary  the endpoint that was declared, as in evaluate.primary; {} for none
    """

    command: str
    learnkv: str = __version__
    gates: dict = field(default_factory=dict)
    groups: dict = field(default_factory=dict)
    primary: dict = field(default_factory=dict)


def entry(command: str, gates: Lines, groups: Mapping[str, Sequence[str]], primary: Primary) -> Entry:
    told = {line: [asdict(run) | {"kinds": list(run.kinds)} for run in runs] for line, runs in gates.items()}
    declared = asdict(primary) if primary.methods else {}
    return Entry(command, gates=told, groups={name: list(kinds) for name, kinds in groups.items()}, primary=declared)


def remember(folder: Path, made: Entry, prompts: Iterable[Prompt]) -> None:
    """Adds a run and what it asks to what lies in a comparison's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = list({json.dumps(asdict(e)): e for e in [*entries_in(folder), made]}.values())
    asked = prompts_in(folder) | {prompt.id: prompt for prompt in prompts}
    write_atomically(folder / RUN, lambda to: to.write_text(json.dumps([asdict(e) for e in entries], indent=1) + "\n"))
    lines = "".join(json.dumps({"id": name, **asdict(prompt)}) + "\n" for name, prompt in asked.items())
    write_atomically(folder / PROMPTS, lambda to: to.write_text(lines))


def entries_in(folder: Path) -> list[Entry]:
    """The runs that made a folder's rows, in their order; none where nothing was left."""
    return entries_of(folder / RUN)


def entries_of(path: Path) -> list[Entry]:
    """As `entries_in`, from the file that a run left, wherever it was laid."""
    if not path.is_file():
        return []
    try:
        return [checked(Entry(**values)) for values in checked_list(json.loads(path.read_text()))]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is truncated or was edited ({error}); delete it, the rows do without") from error


def checked_list(found: object) -> list:
    if not isinstance(found, list):
        raise TypeError(f"it holds a {type(found).__name__}")
    return found


def gates_in(entries: Sequence[Entry]) -> dict[str, list[Trained]]:
    """Line -> its gates, of all runs."""
    told = {line: runs for each in entries for line, runs in each.gates.items()}
    return {line: [Trained(**(run | {"kinds": tuple(run["kinds"])})) for run in runs] for line, runs in told.items()}


def prompts_in(folder: Path) -> dict[str, Prompt]:
    """Id -> prompt, of all that a comparison asked; none where they were not left."""
    path = folder / PROMPTS
    lines = path.read_text().splitlines() if path.is_file() else []
    return dict(prompt_of(line, f"{path}, line {number}") for number, line in enumerate(lines, 1))


def prompt_of(line: str, where: str) -> tuple[str, Prompt]:
    try:
        values = json.loads(line)
        name, questions, pins = values.pop("id"), values.pop("questions"), values.pop("pins")
        made = Prompt(**values, questions=tuple(map(question_of, questions)), pins=tuple((a, b) for a, b in pins))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is no prompt of a comparison ({error}); delete the file, the rows do without") from error
    if made.id != name:
        raise ValueError(f"{where}: its text does not fit its id {name}; delete the file, the rows do without")
    return name, made


def question_of(values: dict) -> Question:
    span = values["span"]
    return Question(**(values | {"span": tuple(span) if span else None, "references": tuple(values["references"])}))
