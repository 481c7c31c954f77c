"""How far a count of tokens may go: positions are int32."""

from __future__ import annotations

MOST = 2**31 - 1


def check_count(name: str, value: object) -> None:
    """Raises a ValueError where a count of tokens is no whole number, or above what positions can count."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is no whole number; give one")
    if value > MOST:
        raise ValueError(f"{name}={value} is above 2**31 - 1, where positions end; give a smaller number")
