"""Whether values that came out of a file have the types that a dataclass says."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def checked(made: T) -> T:
    """The dataclass instance itself; a TypeError names the first field that holds another type than it declares."""
    assert dataclasses.is_dataclass(made)
    kind: Any = type(made)
    for name, hint in hints_of(kind).items():
        value = getattr(made, name)
        if not fits(value, hint):
            raise TypeError(f"{name} is {value!r}")
    return made


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of the type that an annotation means: bool is no int, an int is a float."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, h) for h in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(v, arguments[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)
