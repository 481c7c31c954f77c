"""Compare methods and budgets on the same prompts: accuracy and NLL of the answer after eviction, beside full cache, random and oracle.

python -m learnkv.evaluate recipe=compare                                   the shipped comparison
python -m learnkv.evaluate recipe=compare estimate=true                     measures one prompt, says the hours
python -m learnkv.evaluate method=snapkv budget=0.1                         one method; below 1 a fraction of the context, else tokens
python -m learnkv.evaluate gate=checkpoints/runs/kvp prompts=mine.jsonl     your gate on your prompts
python -m learnkv.evaluate 'evaluate.tasks=[niah_single_2,qa_1]' 'evaluate.kinds=[]' evaluate.count=20    tasks, with generated answers
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from learnkv import config, prompts, tasks
from learnkv.budgets import Ratio
from learnkv.checkpoint import load_gate
from learnkv.evaluation import claims, example, gather, history, report, trained
from learnkv.evaluation.claims import Primary
from learnkv.evaluation.compare import Estimate, EvaluateSettings, Plan, Work, compare, estimate, plan, plan_chosen, work_of
from learnkv.evaluation.contenders import contenders_of, entries_of
from learnkv.evaluation.document import Extras
from learnkv.evaluation.publish import BOARD, PAGES, SheetSettings, publish, sheet_of
from learnkv.evaluation.rows import Row, budget_of, read_rows
from learnkv.evaluation.statistics import FEWEST, too_few
from learnkv.evaluation.tables import tables
from learnkv.evaluation.trained import Lines, Trained, duration
from learnkv.evaluation.view import view
from learnkv.files import write_atomically
from learnkv.models import DTYPES, PreTrainedModel, PreTrainedTokenizerBase, load_model, refuse_long_contexts
from learnkv.places import EXAMPLE, ROWS
from learnkv.prompts import Prompt
from learnkv.prompts.prompt import Tokenizer


@dataclass
class EvaluateCommand:
    """What `python -m learnkv.evaluate` reads."""

    recipe: str = "compare"  # a shipped recipe, or a .yaml file
    model: str = "smollm2-135m"  # bundled name, hub id or folder
    method: str = ""  # one method instead of evaluate.methods
    budget: float | None = None  # one budget instead of evaluate.budgets
    gate: str = ""  # folder of a gate, instead of evaluate.methods or beside `method`
    prompts: str = ""  # your own prompts: JSONL with context, question, answer, or plain text
    estimate: bool = False  # measure one prompt, say how many rows and hours the run would take, and write nothing
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)


def run(command: EvaluateCommand) -> None:
    settings = settings_of(command)
    entries_of(settings.methods)  # a mistake in these should not wait for the model
    for budget in settings.budgets:
        budget_of(budget)
    chosen = development_rows(Path(settings.choose)) if settings.choose else []
    model, tokenizer = load_model(command.model, DTYPES[settings.dtype])
    if not command.prompts:
        refuse_long_contexts(model, "evaluate.num_tokens", settings.num_tokens, beside=int(bool(settings.kinds)))
    asked = prompts_of(command, settings, tokenizer)
    refuse_chosen_on(chosen, asked)
    plans = plans_of(settings, chosen, model, tokenizer)
    settings = replace(settings, primary=primary_of(command, settings, plans, asked))
    rows_file = Path(settings.out) / ROWS
    print(f"model: {command.model}, {settings.dtype}")
    print(
        f"prompts: {len(asked)} with {sum(len(p.questions) for p in asked)} questions, {len({topic_of(p) for p in asked})} kinds or tasks"
    )
    print(f"rows of each: {len(plans)}: {', '.join(dict.fromkeys(p.contender.line for p in plans))}", flush=True)
    if command.estimate:
        tell(estimate(model, tokenizer, asked, plans, path=rows_file, question=settings.question))
        return
    print(f"rows go to {rows_file}; a stopped run goes on from there", flush=True)
    history.remember(rows_file.parent, history.entry(config.arguments(command), gates_of(plans), settings.groups, settings.primary), asked)
    run_on = partial(compare, model, tokenizer, path=rows_file, question=settings.question, progress=watched)
    low = below_floor(run_on(asked, [each for each in plans if each.contender.scorer == "full"]), settings.floor) if settings.floor else {}
    asked = within_reach(asked, low, settings.floor)
    rows = run_on(asked, plans)
    show(rows, settings, gates_of(plans), {prompt.id for prompt in asked if prompt.pins}, low)
    shipped = "" if command.model == EvaluateCommand.model else " method=snapkv"  # the shipped gate is the bundled model's
    gate = f" gate={command.gate}" if command.gate else shipped
    page(rows, plans, model, tokenizer, {prompt.id: prompt for prompt in asked}, Path(settings.out))
    print(f"next: python -m learnkv.generate model={command.model}{gate} compare=true")


def tell(found: Estimate) -> None:
    """What a run would take."""
    print(f"left: {found.rows} rows on {found.prompts} prompts, about {duration(found.seconds)} on this machine; nothing was written")
    print("next: the same without estimate=true")


def watched(works: list[Work]) -> Iterator[Work]:
    """The prompts under a bar.  Once the second is done, and at each doubling, a line says how long the others will take: the first is left
    out, on which every method is timed."""
    work = [work_of(each) for each in works]
    began = time.monotonic()
    for done, each in enumerate(tqdm(works, desc="prompts", unit="prompt", file=sys.stderr)):
        if done == 1:
            began = time.monotonic()
        if done > 1 and done.bit_count() == 1:
            left = (time.monotonic() - began) / sum(work[1:done]) * sum(work[done:])
            tqdm.write(f"{done} of {len(works)} prompts done, about {duration(left)} left on this machine", file=sys.stderr)
        yield each


def below_floor(rows: Sequence[Row], floor: float) -> dict[str, float]:
    """Kind or task -> mean score of the full cache, where that is below the floor."""
    means = {topic: gather.mean_score(own) for topic, own in gather.grouped(rows, lambda row: row.topic).items()}
    return {topic: mean for topic, mean in means.items() if mean < floor}


def within_reach(asked: Sequence[Prompt], low: Mapping[str, float], floor: float) -> list[Prompt]:
    """The prompts of what the full cache can do.  Raises ValueError where that is nothing."""
    left = [prompt for prompt in asked if topic_of(prompt) not in low]
    if not left:
        raise ValueError(f"the full cache reaches evaluate.floor={floor:g} in none of {', '.join(low)}; lower it, or take an abler model")
    return left


def topic_of(prompt: Prompt) -> str:
    return prompt.task or prompt.kind


def primary_of(command: EvaluateCommand, settings: EvaluateSettings, plans: Sequence[Plan], asked: Sequence[Prompt]) -> Primary:
    """The declared endpoint; none where short keys ask for less than a recipe's comparison, which declared it.

    Raises ValueError for an endpoint that this comparison could say nothing about.
    """
    primary = settings.primary
    run = [(plan.contender.line, plan.budget.kept if isinstance(plan.budget, Ratio) else float(plan.budget)) for plan in plans]
    missing = [line for line in primary.methods if (line, primary.budget) not in run]
    if missing and (command.method or command.gate or command.budget is not None):
        print(f"note: {missing[0]} at budget {primary.budget:g}, of evaluate.primary, is not run here, so no primary endpoint is tested")
        return Primary()
    if missing:
        there = ", ".join(f"{line} at {budget:g}" for line, budget in run)
        raise ValueError(f"evaluate.primary names {missing[0]} at budget {primary.budget:g}, which is not run; run are: {there}")
    group = settings.groups.get(primary.group, [])
    prompts = sum(not primary.group or topic_of(prompt) in group for prompt in asked)
    if primary.methods and prompts < FEWEST:
        raise ValueError(f"evaluate.primary speaks of {too_few(prompts)}; raise evaluate.count")
    return primary


def gates_of(plans: Sequence[Plan]) -> dict[str, list[Trained]]:
    """Line -> its gates, one per training run."""
    contenders = dict.fromkeys(plan.contender for plan in plans)
    lines: dict[str, list[Trained]] = {}
    for contender in contenders:
        if contender.trained:
            lines.setdefault(contender.line, []).append(contender.trained)
    return lines


def development_rows(path: Path) -> list[Row]:
    if not path.is_file():
        raise ValueError(f"evaluate.choose={path} is no file; run the development recipe that writes it first")
    return read_rows(path)


def refuse_chosen_on(chosen: Sequence[Row], asked: Sequence[Prompt]) -> None:
    """Raises a ValueError where settings would be chosen on the prompts that are compared."""
    both = {row.prompt for row in chosen} & {prompt.id for prompt in asked}
    if both:
        raise ValueError(
            f"evaluate.choose holds rows of {len(both)} of the {len(asked)} prompts that are compared; choose settings on other prompts"
        )


def settings_of(command: EvaluateCommand) -> EvaluateSettings:
    """The settings with the command's short keys put in their place."""
    settings = command.evaluate
    named = [command.method] if command.method else []
    if command.gate:
        named.append(f"{load_gate(command.gate).METHOD}:{command.gate}")
    settings = replace(settings, methods=named or settings.methods)
    return replace(settings, budgets=[command.budget]) if command.budget is not None else settings


def prompts_of(command: EvaluateCommand, settings: EvaluateSettings, tokenizer: Tokenizer) -> list[Prompt]:
    """The user's own prompts, or generated ones of every size; with the first `questions` of each."""
    if command.prompts:
        made = prompts.load_prompts(command.prompts)
    else:
        made = [prompt for size in settings.num_tokens for prompt in generated(settings, size, tokenizer)]
    return [replace(p, questions=p.questions[: settings.questions]) for p in made] if settings.questions else made


def generated(settings: EvaluateSettings, size: int, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of one size: of the kinds, then of each task."""
    made: list[Prompt] = []
    if settings.kinds or not settings.tasks:
        make = partial(prompts.make, settings.kinds, split=settings.split, count=settings.count)
        made = make(num_tokens=size, tokenizer=tokenizer, seed=settings.seed)
    for name in settings.tasks:
        made += tasks.named(name, settings.source).prompts(tokenizer, size, settings.count, settings.seed)
    return made


def plans_of(settings: EvaluateSettings, chosen: Sequence[Row], model: PreTrainedModel, tokenizer: Tokenizer) -> list[Plan]:
    """The methods at the budgets, and what the rows of a development run choose."""
    protected = (settings.num_sinks, settings.num_recent)
    plans = plan(contenders_of(settings.methods, model, tokenizer, *protected), settings.budgets)
    return plans + plan_chosen(chosen, settings.budgets, model, tokenizer, *protected) if settings.choose else plans


def show(rows: Sequence[Row], settings: EvaluateSettings, gates: Lines, pinned: Set[str], low: Mapping[str, float]) -> None:
    """Print the tables, write them and the plot to the folder."""
    folder = Path(settings.out)
    verdicts = trained.verdicts(rows, gates) if len({row.prompt for row in rows}) > 1 else []
    made = list(tqdm(tables(rows, settings.groups, gates, verdicts, settings.primary), desc="tables", unit="table", file=sys.stderr))
    told = [
        *out_of_reach(low, settings.floor),
        *notes(rows, pinned),
        *missing_groups(rows, settings.groups),
        *claims.said(rows),
        *trained.said(verdicts),
    ]
    print(f"\n{report.protocol(rows)}")
    for table in made:
        if table.printed:
            print(f"\n{table.title}\n{report.aligned(table.cells)}")
    print("\n" + "".join(f"{note}\n" for note in told), end="")
    parts = [report.protocol(rows), *(f"### {table.title}\n\n{report.markdown(table.cells)}" for table in made), *told]
    write_atomically(folder / "table.md", lambda to: to.write_text("\n\n".join(parts) + "\n"))
    write_atomically(folder / "plot.png", lambda to: report.plot(report.summarise(rows), to))
    print(f"rows: {folder / ROWS}\ntables, by kind too: {folder / 'table.md'}\nplot: {folder / 'plot.png'}")


def out_of_reach(low: Mapping[str, float], floor: float) -> list[str]:
    """What the model can't do with the full cache, which is in no table."""
    return [
        f"left out: {topic}, in which the full cache reaches {mean:.2f}, less than evaluate.floor={floor:g}" for topic, mean in low.items()
    ]


def page(
    rows: Sequence[Row],
    plans: Sequence[Plan],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Mapping[str, Prompt],
    folder: Path,
) -> None:
    """Write the page of the comparison, with what the lines in front keep of the first prompt."""
    fit = gather.gathered(rows)
    made = view(fit.rows)
    contenders = {each.contender.line: each.contender for each in reversed(plans)}  # of several training runs the first
    shown = [contenders[made.folders[line]] for line in made.styles]
    kept = example.look(model, tokenizer, asked[rows[0].prompt], tqdm(shown, desc="example", file=sys.stderr), made.budget, rows[0])
    kept.save(folder / EXAMPLE)
    command = f"python -m learnkv.report {shlex.quote(f'rows={folder}')}"
    judged = sheet_of(made, asked, "", SheetSettings.count, SheetSettings.seed)
    for what, where in publish(folder / PAGES, made, Extras(fit.notes, history.entries_in(folder), command, kept), judged, folder / BOARD):
        print(f"{what}: {where}")


def missing_groups(rows: Sequence[Row], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The groups of kinds that have no table here."""
    there = {row.topic for row in rows}
    return [f"no prompt is of group {name} ({', '.join(kinds)})" for name, kinds in groups.items() if not there & set(kinds)]


def notes(rows: Sequence[Row], pinned: Set[str] = frozenset()) -> list[str]:
    """What a reader should know of these rows: budgets that held whole contexts, those that hold protected tokens only, and those that
    did not hold what the prompts `pinned` pin."""
    evicting = [row for row in rows if row.scorer != "full"]
    whole = Counter(row.budget for row in evicting if row.kept_mean >= row.num_tokens)
    said = [f"budget {b:g} held the whole context in {count} rows: nothing was evicted there" for b, count in whole.items()]
    above = Counter(row.budget for row in evicting if row.prompt in pinned and row.kept_mean > row.num_sinks + row.num_recent + row.free)
    said += [f"budget {b:g} is less than {count} rows pin beside what is protected: they held more" for b, count in above.items()]
    forced = {r.budget: r.num_sinks + r.num_recent for r in evicting if r.budget * r.num_tokens <= r.num_sinks + r.num_recent}
    return said + [
        f"budget {b:g} is within the {n} protected tokens of some contexts: every method keeps the same" for b, n in forced.items()
    ]


if __name__ == "__main__":
    raise SystemExit(config.main(run, EvaluateCommand))
