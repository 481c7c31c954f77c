"""VERBS: every command by name.  A new command is a module learnkv/<verb>.py that runs under `python -m`, and a row here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """A row of `learnkv --help`.

    does     what the command does
    example  what may stand behind its name
    word     the key whose value may stand alone there, "" for none
    """

    does: str
    example: str
    word: str = ""


VERBS = {
    "record": Verb("record traces: full-cache passes with the attention that each token received later", "recipe=kvp"),
    "train": Verb("train a gate, recording what is missing", "recipe=kvp"),
    "evaluate": Verb("compare methods and budgets on held-out prompts", "recipe=compare estimate=true"),
    "report": Verb("show a comparison as a page, with figures, tables and a blind sheet", "data/comparisons/compare", "rows"),
    "generate": Verb("answer with a compressed cache, and with the full one beside it", "compare=true"),
    "bench": Verb("measure speed and memory", "runtime", "part"),
    "plan": Verb("say what eviction buys a server: what fits, how fast, beside what no scheduler beats", "recipe=plan_chat"),
    "profile": Verb("say where a model's heads look on your prompts, and which budgets that suggests", "prompts=mine.jsonl"),
    "export": Verb("write a gate as a press of kvpress", "gate=checkpoints/kvp-smollm2-135m"),
    "estimate": Verb("say what a recipe would take before it runs", "recipe=paper/kvp"),
    "ls": Verb("list recipes, methods, gates, runs and traces", "checkpoints", "what"),
    "cp": Verb("copy a shipped recipe to a file of your own", "kvp mine.yaml", "recipe"),
    "inspect": Verb("say what a folder or file of learnkv's is", "checkpoints/kvp-smollm2-135m", "path"),
    "doctor": Verb("say what this machine has, for a bug report", "json=true"),
    "completion": Verb("print what lets a shell complete verbs, recipes, methods and keys", "bash", "shell"),
}
