"""LongBench's 16 English tasks (arXiv:2308.14508), with its metrics, generation lengths and cleaning, from a hub id or a folder.

The rows are those of kvpress's copy on the hub: context, question and answer_prefix with the benchmark's instructions in them, answers,
all_classes.  Prompts longer than asked for lose the middle of their context, as in the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from learnkv.prompts import Prompt, Question
from learnkv.tasks import metrics
from learnkv.tasks.hub import Row, Table, in_order
from learnkv.tasks.metrics import Metric
from learnkv.tasks.task import SPLIT, Task

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
    read = in_order(Table("LongBench", name, COLUMNS, config=name), partial(prompt_of, name, rules))
    return Task(
        f"longbench_{name}",
        read(source),
        rules.metric,
        rules.max_new_tokens,
        benchmark="LongBench",
        paper="2308.14508",
        count=rules.count,
        chat=rules.chat,
        clean=metrics.first_line if rules.first_line else metrics.as_it_is,
        read=read,
    )


def prompt_of(name: str, rules: Rules, row: Row) -> Prompt:
    """A row as our prompt; without a chat template the answer's prefix follows the question as the benchmark wrote it."""
    columns = row.columns
    if not columns["answers"]:
        raise ValueError(f"{row.where} has no answers, so nothing can be judged; give one or more")
    answers = [str(answer) for answer in columns["answers"]]
    references = [answers[0], *columns["all_classes"]] if rules.metric is metrics.classification else answers
    asked, begun = columns["question"], columns["answer_prefix"]
    text, prefix = (asked, begun) if rules.chat else (asked + begun, "")
    return Prompt(
        f"longbench_{name}", SPLIT, columns["context"], (Question(text, prefix, f" {answers[0]}", None, tuple(references)),), rules.chat
    )
