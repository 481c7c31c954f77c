"""TASKS: every task of the comparison by name; `TASKS["niah_single_1"].prompts(tokenizer, 4096, 20, seed=42)` are its prompts."""

from __future__ import annotations

from learnkv.names import unknown
from learnkv.tasks.longbench import longbench
from learnkv.tasks.needle import NEEDLE
from learnkv.tasks.passages import PASSAGES
from learnkv.tasks.ruler import RULER
from learnkv.tasks.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (*RULER, NEEDLE, *PASSAGES, *longbench())}


def named(name: str) -> Task:
    """TASKS[name], with the nearest names where there is no such task."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]


def table() -> list[tuple[str, str, str, str]]:
    """Rows of the README's table of tasks: name, paper, metric, tokens generated."""
    return [(t.name, f"arXiv:{t.paper}" if t.paper else "", t.metric.__name__, str(t.max_new_tokens)) for t in TASKS.values()]
