"""Haystack text: prose and code that Python itself ships, split once, by document, into train, dev and heldout."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from functools import cache
from itertools import accumulate
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Literal

Split = Literal["train", "dev", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "dev", "heldout")
Style = Literal["prose", "docstrings", "code"]


def split_of(name: str) -> Split:
    """The side a document, a key or a value belongs to for good: 3 in 5 train, 1 in 5 dev, 1 in 5 heldout, by its sha256."""
    fifth = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 5
    return "heldout" if fifth == 0 else "dev" if fifth == 1 else "train"


@cache
def documents(style: Style, split: Split) -> list[list[str]]:
    """Documents of one style and side, each a list of sentences (prose, docstrings) or of lines (code)."""
    make = {"prose": topic_documents, "docstrings": docstring_documents, "code": code_documents}[style]
    found = [pieces for name, pieces in make() if split_of(name) == split and len(pieces) >= 20]
    if not found:
        raise ValueError(f"this Python installation holds no {style} text for the {split} split; use a complete installation")
    return found


def topic_documents() -> list[tuple[str, list[str]]]:
    """The language reference as `help()` shows it, a document per topic."""
    return [(f"topic {name}", sentences(text)) for name, text in sorted(topics.items())]


def docstring_documents() -> list[tuple[str, list[str]]]:
    """The docstrings of the standard library, a document per module."""
    return [(f"docstrings {name}", [s for text in docstrings(source) for s in sentences(text)]) for name, source in library()]


def code_documents() -> list[tuple[str, list[str]]]:
    """The standard library's sources, a document per module, a piece per non-empty line."""
    return [(f"code {name}", [line for line in source.splitlines() if line.strip()]) for name, source in library()]


@cache
def library() -> list[tuple[str, str]]:
    """Name and source of the top-level modules of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [(path.name, path.read_text(encoding="utf-8", errors="replace")) for path in sorted(folder.glob("*.py"))]


def docstrings(source: str) -> list[str]:
    """Every docstring of a module, in order of appearance."""
    defined = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, defined)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def sentences(text: str) -> list[str]:
    """Sentences of readable prose: tables, grammar and examples fall out by length and by their share of letters."""
    flat = [re.sub(r"\s+", " ", s).strip() for s in re.split(r"(?<=[.!?])\s+|\n\s*\n", text)]
    return [s for s in flat if 30 < len(s) < 500 and sum(c.isalpha() or c == " " for c in s) > 0.8 * len(s)]


@cache
def words() -> list[str]:
    """Lower-case words of 5 to 9 letters that the prose uses."""
    found = {w for text in topics.values() for w in re.findall(r"\b[a-z]{5,9}\b", text)}
    return sorted(found)


def passage(rng: Random, style: Style, split: Split, num_chars: int) -> list[str]:
    """Pieces that follow each other in a document, of at least `num_chars` characters; where one ends another begins."""
    pieces: list[str] = []
    while sum(map(len, pieces)) + len(pieces) < num_chars:
        document = rng.choice(documents(style, split))
        pieces += document[rng.randrange(max(1, len(document) - 10)) :]
    begins = accumulate((len(piece) + 1 for piece in pieces), initial=1)  # one character for the glue after each
    return [piece for piece, begin in zip(pieces, begins, strict=False) if begin <= num_chars]
