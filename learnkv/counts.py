"""How far a count of tokens may go, positions being int32; and bytes in words."""

from __future__ import annotations

MOST = 2**31 - 1


def check_count(name: str, value: object) -> None:
    """Raises a ValueError where a count of tokens is no whole number, or above what positions can count."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is no whole number; give one")
    if value > MOST:
        raise ValueError(f"{name}={value} is above 2**31 - 1, where positions end; give a smaller number")


def size(num_bytes: int) -> str:
    """1.50 GiB, 20.0 MiB, 3.1 KiB"""
    if num_bytes >= 2**29:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**19 else f"{num_bytes / 2**10:.1f} KiB"
