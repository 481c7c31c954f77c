"""Locks: one process at a time at a file or folder, until it lets go or ends, however it ends."""

from __future__ import annotations

from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout


def lock_of(path: Path) -> FileLock:
    """The lock of a file or folder that need not exist yet: `with` waits for it.  It is a file beside it, in a folder that exists."""
    path = path.resolve()
    return FileLock(path.with_name(f"{path.name}.lock"))


def alone(path: Path, doing: str, advice: str = "wait for it, or stop it: what it has done stays") -> AcquireReturnProxy:
    """Holds a file or folder at once: to the end of a `with` block, or for as long as the result is kept.

    Raises ValueError where another process holds it; `doing` is what that one does, "recording into", and `advice` what to do.
    """
    try:
        return lock_of(path).acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"another process is {doing} {path}; {advice}") from error
