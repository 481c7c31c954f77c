"""TASKS: every task of the comparison by name; `TASKS["niah_single_1"].prompts(tokenizer, 4096, 20, seed=42)` are its prompts."""

from __future__ import annotations

from dataclasses import replace

from learnkv.names import unknown
from learnkv.tasks.boolq import BOOLQ
from learnkv.tasks.code_completion import CODE_COMPLETION
from learnkv.tasks.govreport import GOVREPORT
from learnkv.tasks.gsm8k import GSM8K
from learnkv.tasks.longbench import longbench
from learnkv.tasks.needle import NEEDLE
from learnkv.tasks.oasst2 import OASST2
from learnkv.tasks.passages import PASSAGES
from learnkv.tasks.perplexity import PERPLEXITY
from learnkv.tasks.ruler import RULER
from learnkv.tasks.scbench import scbench
from learnkv.tasks.task import Task

MADE_HERE = (*RULER, NEEDLE, *PASSAGES, CODE_COMPLETION, PERPLEXITY, GSM8K)
READ_FROM_A_HUB = (*longbench(), BOOLQ, GOVREPORT, OASST2, *scbench())
TASKS: dict[str, Task] = {task.name: task for task in (*MADE_HERE, *READ_FROM_A_HUB)}


def named(name: str, source: str = "") -> Task:
    """TASKS[name], with the nearest names where there is no such task.

    source  folder with NAME.jsonl, for a task whose prompts are else read from a hub; the others' are made as ever
    """
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    task = TASKS[name]
    return replace(task, make=task.read(source)) if source and task.read else task


def table() -> list[tuple[str, str, str, str]]:
    """Rows of the README's table of tasks: name, paper, metric, tokens generated."""
    return [(t.name, f"arXiv:{t.paper}" if t.paper else "", t.metric_name, str(t.max_new_tokens)) for t in TASKS.values()]
