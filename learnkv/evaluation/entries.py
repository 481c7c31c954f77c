"""How a method is named in a comparison: `snapkv`, `snapkv(kernel_size=5)+adaptive`, `kvp+adaptive_global:checkpoints/kvp-seed*`."""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from learnkv.budgets import ALLOCATORS
from learnkv.names import unknown

Knob = int | float | bool | str
FORM = re.compile(r"(?P<name>\w+)(?:\((?P<knobs>[^()]*)\))?(?:\+(?P<allocator>\w+))?(?::(?P<path>.+))?")


@dataclass(frozen=True)
class Entry:
    """One method of a comparison.

    name       a name in METHODS, or "full"
    knobs      settings of its scorer
    allocator  a name in ALLOCATORS, "" for the method's own
    path       folder of a gate; with * or ? every folder that matches is a training run (another seed) of the same line
    """

    name: str
    knobs: tuple[tuple[str, Knob], ...] = ()
    allocator: str = ""
    path: str = ""

    @property
    def method(self) -> str:
        """The entry without its path: `snapkv(kernel_size=5)+adaptive`; knobs in alphabetical order."""
        knobs = " ".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in sorted(self.knobs))
        return self.name + (f"({knobs})" if knobs else "") + (f"+{self.allocator}" if self.allocator else "")

    def __str__(self) -> str:
        return self.method + (f":{self.path}" if self.path else "")

    def folders(self) -> list[str]:
        """The gates' folders, one per training run; none for a method without a path."""
        if not re.search(r"[*?[]", self.path):
            return [self.path] if self.path else []
        found = sorted(str(Path(name).parent) for name in glob.glob(str(Path(self.path) / "gate.safetensors")))
        if not found:
            raise ValueError(f"method {self}: no folder matches {self.path} and holds a gate.safetensors; train one, or name its folder")
        return found


def parse_entry(text: str, names: list[str]) -> Entry:
    """The entry that `text` writes; `names` are the methods there are.

    Raises ValueError that names what is wrong and the nearest method or allocator.
    """
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"method {text!r} is not of the form name(knob=value knob=value)+allocator:folder; only the name is needed")
    name, allocator = match["name"], match["allocator"] or ""
    if name not in names:
        raise unknown("method", name, names)
    if allocator and allocator not in ALLOCATORS:
        raise unknown(f"allocator in method {text!r}:", allocator, ALLOCATORS)
    return Entry(name, parse_knobs(text, match["knobs"] or ""), allocator, (match["path"] or "").strip())


def parse_knobs(text: str, knobs: str) -> tuple[tuple[str, Knob], ...]:
    """`kernel_size=5 pooling=mean` as pairs; values as YAML reads them."""
    pairs: dict[str, Knob] = {}
    for part in knobs.split():
        key, equals, value = part.partition("=")
        if not (key.isidentifier() and equals and value) or "," in part:
            raise ValueError(f"method {text!r}: {part!r} is not knob=value; separate knobs by spaces: snapkv(kernel_size=5 pooling=mean)")
        if key in pairs:
            raise ValueError(f"method {text!r} gives {key} twice")
        pairs[key] = parse_value(text, value)
    return tuple(sorted(pairs.items()))


def parse_value(text: str, value: str) -> Knob:
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        parsed = None
    if not isinstance(parsed, int | float | bool | str):
        raise ValueError(f"method {text!r}: {value!r} is not a number, true, false or a word")
    return parsed
