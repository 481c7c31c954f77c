"""Report a comparison: one HTML page with curves, maps, costs, tables and claims, the same as Markdown and PNG files, and a blind sheet.

python -m learnkv.report rows=data/comparisons/compare                    what evaluate wrote; the page lies in report/ beside it
python -m learnkv.report rows=benchmarks/results/compare_inside.jsonl.gz out=reports/inside
python -m learnkv.report 'examples=[snapkv,kvp:checkpoints/kvp-smollm2-135m]'    with what was kept of one prompt: loads the model
python -m learnkv.report tally=answers.json                                what a judge of the blind sheet found
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from learnkv import config
from learnkv.evaluation import example, gather, history
from learnkv.evaluation.contenders import contenders_of
from learnkv.evaluation.document import Extras
from learnkv.evaluation.example import Example
from learnkv.evaluation.publish import BOARD, PAGES, SheetSettings, publish, sheet_of
from learnkv.evaluation.rows import Row
from learnkv.evaluation.sheet import tally
from learnkv.evaluation.view import View, named, short_names, view
from learnkv.models import DTYPES, load_model
from learnkv.places import COMPARISONS_FOLDER, EXAMPLE
from learnkv.prompts import Prompt, load_prompts, make


@dataclass
class ReportCommand:
    """What `python -m learnkv.report` reads."""

    rows: list[str] = field(
        default_factory=lambda: [f"{COMPARISONS_FOLDER}/compare"]
    )  # folders that evaluate wrote, or files of rows, .gz too
    out: str = ""  # folder of the page; "" for report/ beside the first rows
    front: list[str] = field(default_factory=list)  # lines in colour; [] for gates and the best heuristic
    budget: float | None = None  # the one that bars, sheet and examples show; null for 0.1, or the middle one
    examples: list[str] = field(default_factory=list)  # methods, as in evaluate.methods, whose kept tokens are shown on one prompt
    prompts: str = ""  # file whose first prompt that is; "" for the first of the comparison, or one of ours where it left none
    model: str = ""  # that runs it; "" for the rows' own
    tally: str = ""  # choices that the blind sheet gave out: says who won, and writes no page
    sheet: SheetSettings = field(default_factory=SheetSettings)


def run(command: ReportCommand) -> None:
    folder = out_of(command)
    if command.tally:
        print(tally(Path(command.tally), folder).said())
        return
    paths = [Path(path) for path in command.rows]
    found = gather.by_protocol(gather.rows_of(paths))
    beside = [path if path.is_dir() else path.parent for path in paths]
    if len(found) == 1:
        (rows,) = found.values()
        board = folder if command.out else folder.parent  # beside the rows, unless the page has a place of its own
        one_page(command, rows, beside, folder, board / BOARD, beside[0] / EXAMPLE)
        return
    print(f"note: the rows are of {len(found)} protocols, which are never averaged: a page for each")
    for protocol, rows in found.items():
        example_file = beside[0] / EXAMPLE.replace(".", f"-{protocol}.")
        one_page(command, rows, beside, folder / protocol, folder / protocol / BOARD, example_file)


def one_page(command: ReportCommand, rows: list[Row], beside: list[Path], place: Path, board: Path, example_file: Path) -> None:
    """Everything about rows of one protocol; what runs left lies in the folders `beside`."""
    fit = gather.gathered(rows)
    made = view(fit.rows, command.front, command.budget)
    entries = [entry for folder in beside for entry in history.entries_in(folder)]
    prompts = {name: prompt for folder in beside for name, prompt in history.prompts_in(folder).items()}
    shown = example_of(command, made, rows[0], prompts, example_file)
    extras = Extras(fit.notes, entries, f"python -m learnkv.report {config.arguments(command)}".rstrip(), shown)
    line = named(command.sheet.line, short_names(fit.rows)) if command.sheet.line else ""
    judged = sheet_of(made, prompts, line, command.sheet.count, command.sheet.seed)
    say(made, fit.notes, publish(place, made, extras, judged, board))


def out_of(command: ReportCommand) -> Path:
    """Where the page goes."""
    if not command.rows:
        raise ValueError("rows= is empty; give the folder of a comparison")
    first = Path(command.rows[0])
    return Path(command.out) if command.out else (first if first.is_dir() else first.parent) / PAGES


def example_of(command: ReportCommand, made: View, like: Row, prompts: dict[str, Prompt], path: Path) -> Example | None:
    """The example that lies beside the rows, made first where methods are named; None where there is none."""
    if command.examples:
        look(command, made.budget, like, prompts).save(path)
        print(f"tokens kept of one prompt: {path}")
    if not path.exists():
        return None
    found = example.load(path)
    example.refuse_other(found, like, path)
    return found


def look(command: ReportCommand, budget: float, like: Row, prompts: dict[str, Prompt]) -> Example:
    model, tokenizer = load_model(command.model or like.model, DTYPES[like.dtype])
    own = load_prompts(command.prompts)[0] if command.prompts else prompts.get(like.prompt)
    prompt = own or make(["codes"], split="heldout", count=1, num_tokens=700, tokenizer=tokenizer)[0]
    print(f"model: {command.model or like.model}, {like.dtype}; looking at prompt {prompt.id}", flush=True)
    contenders = contenders_of(command.examples, model, tokenizer, like.num_sinks, like.num_recent, always=())
    return example.look(model, tokenizer, prompt, contenders, budget, like)


def say(made: View, notes: Sequence[str], written: Sequence[tuple[str, Path]]) -> None:
    print(f"rows: {len(made.rows):,} of {len(made.folders)} lines on {len({row.prompt for row in made.rows})} prompts")
    for note in notes:
        print(f"note: {note}")
    for what, where in written:
        print(f"{what}: {where}")


if __name__ == "__main__":
    sys.exit(config.main(run, ReportCommand, words=("rows",)))
