"""learnkv: learned KV-cache eviction for frozen language models.  Public names are imported when first used."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from learnkv.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from learnkv.budgets import Ratio
    from learnkv.policy import Policy

__all__ = ["EvictionCache", "Policy", "Scorer", "__version__", "attach", "chat_spans", "evict", "load_gate", "load_model"]

HOMES = {
    "EvictionCache": "learnkv.runtime.cache",
    "Policy": "learnkv.policy",
    "Scorer": "learnkv.observation",
    "attach": "learnkv.runtime.attach",
    "chat_spans": "learnkv.prompts.chat",
    "load_gate": "learnkv.checkpoint",
    "load_model": "learnkv.models",
}


def say_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C as one line."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # a command of ours is starting, and imports for seconds before its own `main` runs
    sys.excepthook = say_interrupted


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module 'learnkv' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})


def evict(
    model: PreTrainedModel,
    method: str | Policy,
    *,
    budget: int | Ratio | None = None,
    positions: Literal["original", "renumbered"] = "original",
    **knobs: object,
) -> AbstractContextManager[PreTrainedModel]:
    """Inside the block, generate and forward without a cache of their own evict by `method`.

    with learnkv.evict(model, "snapkv", budget=512):
        model.generate(ids)

    method     a name in learnkv.methods.METHODS, with its budget and knobs, or a Policy
    positions  as EvictionCache takes them
    """
    from learnkv import methods
    from learnkv.runtime import attach

    if not isinstance(method, str):
        if budget is not None or knobs:
            given = ["budget"] * (budget is not None) + list(knobs)
            raise ValueError(f"a Policy has its budget and knobs already; drop {', '.join(given)}")
        return attach.evict(model, method, positions)
    if budget is None:
        raise ValueError(f"evict(model, {method!r}) needs budget=: tokens per KV head (512), or a fraction of the prompt (Ratio(0.2))")
    return attach.evict(model, methods.policy(method, budget, **knobs), positions)
