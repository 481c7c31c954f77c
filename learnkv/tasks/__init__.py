"""Tasks of the comparison: prompts with a generated answer, how it is judged, and what each benchmark lays down."""

from learnkv.tasks.registry import TASKS, named
from learnkv.tasks.task import Task

__all__ = ["TASKS", "Task", "named"]
