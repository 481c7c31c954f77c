"""TASKS: every task of the comparison by name; `TASKS["niah_single_1"].prompts(tokenizer, 4096, 20, seed=42)` are its prompts."""

from __future__ import annotations

from dataclasses import replace

from learnkv.names import unknown
from learnkv.tasks.longbench import longbench
from learnkv.tasks.needle import NEEDLE
from learnkv.tasks.passages import PASSAGES
from learnkv.tasks.ruler import RULER
from learnkv.tasks.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (*RULER, NEEDLE, *PASSAGES, *longbench())}


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
