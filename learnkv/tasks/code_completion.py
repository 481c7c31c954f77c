"""Completion of a line of Python, as LCC (arXiv:2306.14893) and RepoBench (arXiv:2306.03091) ask for.  A task of our own.

The code is that of MODULES in the standard library of the Python that runs, so prompts are equal on machines whose Pythons have the same
minor version, as far as its patches left these modules alone: those of 3.11.2 and 3.11.7 are the same.  Installed packages differ more.
No gate was trained on them: the prompts of training and development hold modules at the top of the library only (prompts.haystack), and
all of these lie in packages.
"""

from __future__ import annotations

import keyword
import re
import sysconfig
import tokenize
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from random import Random

from learnkv.prompts import Prompt, Question
from learnkv.prompts.prompt import Tokenizer
from learnkv.tasks.drawn import endless, filled
from learnkv.tasks.metrics import as_it_is, edit_similarity
from learnkv.tasks.task import SPLIT, Size, Task

MODULES = (
    "concurrent/futures/_base.py",
    "email/headerregistry.py",
    "http/cookiejar.py",
    "importlib/metadata/__init__.py",
    "json/encoder.py",
    "logging/__init__.py",
    "multiprocessing/managers.py",
    "multiprocessing/pool.py",
    "unittest/case.py",
    "wsgiref/handlers.py",
    "xml/dom/expatbuilder.py",
    "xml/dom/minidom.py",
    "xml/etree/ElementTree.py",
    "xmlrpc/client.py",
)
SHORTEST = 20  # characters of a line worth completing
NEAR = 20  # lines before a line that must not hold all its names, so that they alone do not tell
TOKENS_A_LINE = (4, 16)  # few and many, between which their mean is: how many lines a prompt could hold, and how many it holds


@dataclass(frozen=True)
class Module:
    """A module's lines, and where those are that can be completed: place -> how many lines before it hold all its names."""

    lines: list[str]
    places: dict[int, int]


def complete(rng: Random, size: Size) -> Prompt | None:
    """Other modules and one up to the line to be completed, from as far back as fits; None where that does not hold the line's names."""
    name, *others = rng.sample(MODULES, len(MODULES))
    module = read(name)
    could, holds = (size.num_tokens // tokens for tokens in TOKENS_A_LINE)
    places = [place for place, back in module.places.items() if back <= holds]
    if not places:
        return None
    place = rng.choice(places)
    before = [line for other in others for line in (f"# {other}", *read(other).lines)]
    before = [*before, f"# {name}", *module.lines[:place]][-could:]

    def build(n: int) -> Prompt:
        context, answer = parted(size.tokenizer, "\n".join(before[-n:]), module.lines[place])
        return Prompt("code_completion_synth", SPLIT, context, (Question("", "", answer, None, (module.lines[place],)),), chat=False)

    return filled(build, size, module.places[place], len(before))


def parted(tokenizer: Tokenizer, before: str, line: str) -> tuple[str, str]:
    """Context and answer, parted at the start of the line; or before the line breaks that precede it, where the tokens of the two parts are
    those of the whole there only: GPT-2's tokenizer joins line breaks and blanks."""
    code = before.rstrip("\n")
    breaks = before[len(code) :] + "\n"

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    tail = code[-200:]  # farther back no token depends on where the text is parted
    joined = ids(tail + breaks + line)
    if joined != ids(tail + breaks) + ids(line) and joined == ids(tail) + ids(breaks + line):
        return code, breaks + line
    return code + breaks, line


# ---- which lines can be completed


@cache
def read(name: str) -> Module:
    """One of MODULES.  Raises ValueError where this Python does not have its source."""
    path = Path(sysconfig.get_paths()["stdlib"]) / name
    if not path.is_file():
        raise ValueError(f"code_completion_synth reads {path}, which this Python installation lacks; use a complete one")
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    return Module(lines, completable(lines, names_of(source)))


def completable(lines: list[str], names: dict[int, set[str]]) -> dict[int, int]:
    """Where the lines are whose names all stand before, but not all in the NEAR lines before."""
    last_seen: dict[str, int] = {}
    found = {}
    for place, line in enumerate(lines):
        known = names.get(place, set())
        if known and known <= last_seen.keys() and can_be_judged(line):
            back = place - min(last_seen[name] for name in known)
            if back > NEAR:
                found[place] = back
        last_seen |= dict.fromkeys(re.findall(r"\w+", line), place)
    return found


def can_be_judged(line: str) -> bool:
    """Long enough, no import, and without what the metric takes for a comment or the end of a code block."""
    return len(line.strip()) >= SHORTEST and not re.match(r"\s*(from|import)\b", line) and not re.search(r"`|#|//", line)


def names_of(source: str) -> dict[int, set[str]]:
    """The names in each line of code; none for a line that is within a text of several lines, or is text alone."""
    names: dict[int, set[str]] = {}
    texts: set[int] = set()
    for token in tokenize.generate_tokens(StringIO(source).readline):
        first, last = token.start[0] - 1, token.end[0] - 1
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            names.setdefault(first, set()).add(token.string)
        if last > first:
            texts.update(range(first, last + 1))
    return {place: found for place, found in names.items() if place not in texts}


CODE_COMPLETION = Task("code_completion_synth", endless("code_completion_synth", complete), edit_similarity, 64, chat=False, clean=as_it_is)
