"""SCBench (arXiv:2412.10319): several questions on one long context, which is compressed before any of them is known.

Each is asked on its own of the same compressed context (the benchmark's mode scdq; evaluate.questions=0 asks them all).  The rows come
from a hub id, or from a folder with scbench_kv.jsonl and so on.  Questions are in the benchmark's words, which the rows hold; what stands
before the context, and how options are put, is in ours.  A context that is too long loses its middle, as in the original, and with it what
some questions ask for: figures mean something at lengths that hold it, of 100,000 tokens and more.

The benchmark reports two figures for each of its two mixed sets, so each is two tasks here, which ask for one kind of question.

Differs: the published script takes an answer of qa_chn and many_shot for a list and walks its characters, here it is one answer; and it
rounds the figures of vt to two digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from learnkv.prompts import Prompt, Question
from learnkv.tasks import metrics, scbench_metrics
from learnkv.tasks.hub import Row, Table, cut_middle, rows
from learnkv.tasks.metrics import Metric
from learnkv.tasks.task import SPLIT, Make, Size, Task

HUB_ID = "microsoft/SCBench"
LETTERS = "ABCD"
Ask = Callable[[Row], Question]
"""A turn as a question."""


@dataclass(frozen=True)
class Rules:
    """What SCBench lays down for a task, and how we put it.

    table    of its rows, which the benchmark gives the same name
    of       what kind of turns are asked, "" where there is one
    metric   and
    max_new_tokens, count  as the benchmark has them
    ask      a turn as a question
    before   what stands before the context
    columns  that its rows have beside context and multi_turns
    """

    table: str
    metric: Metric
    max_new_tokens: int
    count: int
    ask: Ask
    before: str = ""
    of: str = ""
    columns: tuple[str, ...] = ()


# ---- turns as questions


def as_asked(turn: Row) -> Question:
    """The question as the benchmark words it; an answer of several parts has all of them as references."""
    references = answers(turn)
    return Question(turn.text("input").strip(), "", f" {' '.join(references)}", None, references)


def answers(turn: Row) -> tuple[str, ...]:
    """A text, a number, or a list of them, as texts."""
    found = turn.columns.get("answer")
    texts = tuple(str(part).strip() for part in (found if isinstance(found, list) else [found]) if part is not None)
    if not texts or not all(texts):
        raise ValueError(f"{turn.where} has no answer, so nothing can be judged; give one")
    return texts


def for_a_number(turn: Row) -> Question:
    question = as_asked(turn)
    if not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", question.references[0]):
        raise ValueError(f"{turn.where} has the answer {question.references[0]!r}; give a number")
    return question


def briefly(turn: Row) -> Question:
    references = answers(turn)
    return Question(
        f"Answer this question about the book in a few words: {turn.text('input').strip()}",
        "Answer:",
        f" {references[0]}",
        None,
        references,
    )


def briefly_in_chinese(turn: Row) -> Question:
    references = answers(turn)
    return Question(f"请用几个字回答这个关于本书的问题。{turn.text('input').strip()}", "答案是", references[0], None, references)


def chosen(turn: Row) -> Question:
    """Four options behind the question; the right one's text or letter will do."""
    right, options = answers(turn)[0], [option.strip() for option in turn.columns.get("options") or []]
    if len(options) != len(LETTERS) or right not in options:
        raise ValueError(f"{turn.where} has the options {options} and the answer {right!r}; give four, one of which is the answer")
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True))
    letter = LETTERS[options.index(right)]
    text = f"{turn.text('input').strip()}\n{listed}\nAnswer with the letter of the right option."
    return Question(text, "The right option is", f" {letter}", None, (right, letter))


def function(turn: Row) -> Question:
    """A function by its description, to be given back; the row's other functions become references where all rows are known."""
    code = answers(turn)[0]
    text = f"Here is what a function of that code does:\n{turn.text('input').strip()}\nGive it back letter by letter, in a code block."
    return Question(text, "", f"```\n{code}\n```", None, (code,))


# ---- rows as prompts


def read(name: str, rules: Rules, source: str) -> Make:
    return partial(in_order, name, rules, source)


def in_order(name: str, rules: Rules, source: str, size: Size, seed: int) -> Iterator[Prompt]:
    """The benchmark's prompts in its order, whatever the seed."""
    table = Table("SCBench", rules.table, ("context", "multi_turns", *rules.columns), config=rules.table)
    found = list(rows(table, source))
    functions = by_repository(rules, found) if rules.ask is function else {}
    for row in found:
        others = functions[row.columns["repo"]] if functions else ()
        questions = tuple(with_others(rules.ask(turn), others) for turn in turns_of(rules, row))
        context = f"{rules.before}{context_of(row)}\n\n"
        yield cut_middle(Prompt(name, SPLIT, context, questions), size)


def context_of(row: Row) -> str:
    """The text, or the numbers in brackets where the row has a list."""
    return str(row.columns["context"]) if isinstance(row.columns["context"], list) else row.text("context").strip()


def turns_of(rules: Rules, row: Row) -> list[Row]:
    """The turns that the task asks.  Raises ValueError where there are none."""
    turns = [Row(f"{row.where}, turn {i}", turn) for i, turn in enumerate(row.columns["multi_turns"])]
    found = [turn for turn in turns if not rules.of or turn.columns.get("task") == rules.of]
    if not found:
        raise ValueError(f"{row.where} has no turns{rules.of and f' of task {rules.of}'}; give one or more")
    return found


def by_repository(rules: Rules, found: list[Row]) -> dict[str, tuple[str, ...]]:
    """The functions that the questions of each repository ask for."""
    functions: dict[str, dict[str, None]] = {}
    for row in found:
        functions.setdefault(row.columns["repo"], {}).update(dict.fromkeys(answers(turn)[0] for turn in turns_of(rules, row)))
    return {repository: tuple(codes) for repository, codes in functions.items()}


def with_others(question: Question, functions: tuple[str, ...]) -> Question:
    """The question, with the other functions of the repository behind the right one."""
    others = (code for code in functions if code not in question.references)
    return Question(question.text, question.prefix, question.answer, question.span, (*question.references, *others))


KEYS = "Read the following JSON object. Values of it will be asked for.\n\n"
BOOK = "Read the following book. Questions about it come at the end.\n\n"
BOOK_IN_CHINESE = "请阅读下面这本书。最后会有关于它的问题。\n\n"
NUMBERS = "Read the following list of numbers. One that it holds will be asked for.\n\n"
CODE = "Read the following code. Functions of it will be asked for.\n\n"

RULES = {
    "scbench_kv": Rules("scbench_kv", scbench_metrics.contained, 150, 100, as_asked, KEYS),
    "scbench_prefix_suffix": Rules("scbench_prefix_suffix", scbench_metrics.contained, 150, 100, as_asked),
    "scbench_vt": Rules("scbench_vt", metrics.string_match_all, 30, 90, as_asked),
    "scbench_repoqa": Rules("scbench_repoqa", scbench_metrics.same_function, 1024, 88, function, CODE, columns=("repo",)),
    "scbench_qa_eng": Rules("scbench_qa_eng", metrics.string_match_part, 40, 69, briefly, BOOK),
    "scbench_qa_chn": Rules("scbench_qa_chn", scbench_metrics.characters_f1, 40, 35, briefly_in_chinese, BOOK_IN_CHINESE),
    "scbench_choice_eng": Rules("scbench_choice_eng", scbench_metrics.choice, 40, 58, chosen, BOOK),
    "scbench_many_shot": Rules("scbench_many_shot", metrics.string_match_part, 10, 54, as_asked),
    "scbench_mf": Rules("scbench_mf", scbench_metrics.first_number, 5, 100, for_a_number, NUMBERS),
    "scbench_summary": Rules("scbench_summary", scbench_metrics.rouge_lsum, 200, 70, as_asked),
    "scbench_summary_with_needles_summary": Rules(
        "scbench_summary_with_needles", scbench_metrics.rouge_lsum, 800, 70, as_asked, of="scbench_summary"
    ),
    "scbench_summary_with_needles_passkey": Rules(
        "scbench_summary_with_needles", scbench_metrics.first_integer, 15, 70, as_asked, of="scbench_passkey"
    ),
    "scbench_repoqa_and_kv_repoqa": Rules(
        "scbench_repoqa_and_kv", scbench_metrics.same_function, 1024, 88, function, of="scbench_repoqa", columns=("repo",)
    ),
    "scbench_repoqa_and_kv_kv": Rules("scbench_repoqa_and_kv", scbench_metrics.contained, 80, 88, as_asked, of="scbench_kv"),
}


def scbench(source: str = HUB_ID) -> tuple[Task, ...]:
    """The tasks, read from a hub id, or from a folder that holds NAME.jsonl of each set that is asked for."""
    return tuple(task(name, rules, source) for name, rules in RULES.items())


def task(name: str, rules: Rules, source: str) -> Task:
    return Task(
        name,
        read(name, rules, source),
        rules.metric,
        rules.max_new_tokens,
        benchmark="SCBench",
        paper="2412.10319",
        count=rules.count,
        read=partial(read, name, rules),
    )
