"""What to say when a name is not known: the nearest ones that are."""

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
