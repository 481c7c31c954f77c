"""LongBench's 16 English tasks (arXiv:2308.14508), with its metrics, generation lengths and cleaning, from a hub id or a folder.

The rows are those of kvpress's copy on the hub: context, question and answer_prefix with the benchmark's instructions in them, answers,
all_classes.  Prompts longer than asked for lose the middle of their context, as in the original.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from datasets import load_dataset

from learnkv.prompts import Prompt, Question
from learnkv.tasks import metrics
from learnkv.tasks.metrics import Metric
from learnkv.tasks.task import SPLIT, Make, Size, Task

HUB_ID = "Xnhyacinth/LongBench"
COLUMNS = ("context", "question", "answer_prefix", "answers", "all_classes")


@dataclass(frozen=True)
class Rules:
    """What LongBench lays down for a task: metric, tokens generated, chat template or not, first line only or not, prompts."""

    metric: Metric
    max_new_tokens: int
    chat: bool = True
    first_line: bool = False
    count: int = 200


RULES = {
    "narrativeqa": Rules(metrics.token_f1, 128),
    "qasper": Rules(metrics.token_f1, 128),
    "multifieldqa_en": Rules(metrics.token_f1, 64, count=150),
    "hotpotqa": Rules(metrics.token_f1, 32),
    "2wikimqa": Rules(metrics.token_f1, 32),
    "musique": Rules(metrics.token_f1, 32),
    "gov_report": Rules(metrics.rouge_l, 512),
    "qmsum": Rules(metrics.rouge_l, 512),
    "multi_news": Rules(metrics.rouge_l, 512),
    "trec": Rules(metrics.classification, 64, chat=False, first_line=True),
    "triviaqa": Rules(metrics.token_f1, 32, chat=False, first_line=True),
    "samsum": Rules(metrics.rouge_l, 128, chat=False, first_line=True),
    "passage_count": Rules(metrics.count, 32),
    "passage_retrieval_en": Rules(metrics.retrieval, 32),
    "lcc": Rules(metrics.edit_similarity, 64, chat=False, count=500),
    "repobench-p": Rules(metrics.edit_similarity, 64, chat=False, count=500),
}


def longbench(source: str = HUB_ID) -> tuple[Task, ...]:
    """The tasks, read from a hub id, or from a folder that holds NAME.jsonl of each task that is asked for."""
    return tuple(task(name, rules, source) for name, rules in RULES.items())


def task(name: str, rules: Rules, source: str) -> Task:
    clean: Callable[[str], str] = metrics.first_line if rules.first_line else as_it_is
    return Task(
        f"longbench_{name}",
        rows_of(name, rules, source),
        rules.metric,
        rules.max_new_tokens,
        benchmark="LongBench",
        paper="2308.14508",
        count=rules.count,
        chat=rules.chat,
        clean=clean,
        read=partial(rows_of, name, rules),
    )


def as_it_is(prediction: str) -> str:
    return prediction


def rows_of(name: str, rules: Rules, source: str) -> Make:
    """The benchmark's prompts in its order, whatever the seed."""

    def make(size: Size, seed: int) -> Iterator[Prompt]:
        for number, row in enumerate(read(name, source)):
            yield cut_middle(prompt_of(name, rules, checked(row, f"{source}, {name}, row {number}")), size)

    return make


def read(name: str, source: str) -> Iterable[dict]:
    """The rows of a task.  Raises ValueError where neither a folder nor the hub has them."""
    path = Path(source) / f"{name}.jsonl"
    if path.is_file():  # not through `datasets`, whose reader takes an answer like "2024-01-01" for a date
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    try:
        return load_dataset(source, name, split="test")
    except (OSError, ValueError) as error:  # no network, no such id, no such task in it
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"LongBench's {name} can't be read from {source} ({reason}); give a folder with {path.name}, or run with network"
        ) from error


def checked(row: dict, where: str) -> dict:
    """The row, refused by name where it lacks a column or an answer."""
    missing = [column for column in COLUMNS if column not in row]
    if missing:
        raise ValueError(f"{where} has no {missing[0]}; a row needs {', '.join(COLUMNS)}")
    if not row["answers"]:
        raise ValueError(f"{where} has no answers, so nothing can be judged; give one or more")
    return row


def prompt_of(name: str, rules: Rules, row: dict) -> Prompt:
    """A row as our prompt; without a chat template the answer's prefix follows the question as the benchmark wrote it."""
    answers = [str(answer) for answer in row["answers"]]
    references = [answers[0], *row["all_classes"]] if rules.metric is metrics.classification else answers
    text, prefix = (row["question"], row["answer_prefix"]) if rules.chat else (row["question"] + row["answer_prefix"], "")
    return Prompt(
        f"longbench_{name}", SPLIT, row["context"], (Question(text, prefix, f" {answers[0]}", None, tuple(references)),), rules.chat
    )


def cut_middle(prompt: Prompt, size: Size) -> Prompt:
    """The prompt with as many of the context's first and last tokens as fit."""
    if size.fits(prompt):
        return prompt
    ids = cast(list[int], size.tokenizer(prompt.context, add_special_tokens=False)["input_ids"])
    kept = len(ids)
    while kept > 0:
        kept -= max(1, size.over(prompt))
        ends = (ids[: kept - kept // 2], ids[len(ids) - kept // 2 :])
        prompt = replace(prompt, context="".join(size.tokenizer.decode(part) for part in ends if part))
        if size.fits(prompt):
            return prompt
    raise ValueError(f"a question of {prompt.kind} alone is longer than num_tokens={size.num_tokens}; give more")
