"""What to say when a name is not known, and how to name a value that can't be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """The up to three known names most like `name`, comma-separated; all of them, shortened, where none is like it."""
    names = sorted(set(known))
    close = get_close_matches(name, names, n=3, cutoff=0.5) or [n for n in names if name and name in n][:3]
    if close:
        return "nearest: " + ", ".join(close)
    return "known: " + (", ".join(names[:12]) or "none") + (", ..." if len(names) > 12 else "")


def unknown(what: str, name: str, known: Iterable[str]) -> ValueError:
    """The error to raise for a name that is none of `known`: `raise unknown("method", name, METHODS)`."""
    return ValueError(f"unknown {what} {name!r}; {nearest(name, known)}")


def given(value: object) -> str:
    """A value of the wrong kind as an error shows it: texts and numbers as they are, of anything else the type."""
    return repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
