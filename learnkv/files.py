"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path
from threading import get_ident


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file beside `path`, then puts it in its place: a reader finds the old file or the whole new one.

    Two writers at once each fill a file of their own.  Raises OSError with the file's name, on a full disk for one.
    """
    for left in path.parent.glob(f"{escape(path.name)}.*.tmp"):
        writer = re.fullmatch(r"\.(\d+)\.\d+\.tmp", left.name.removeprefix(path.name))
        if writer and not alive(int(writer[1])):  # a killed process left it
            left.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{get_ident()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # a read-only folder says so here again
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and str(error.filename or temporary) == str(temporary):
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    sync_folder(path.parent)


def alive(process: int) -> bool:
    """Whether a process of this number runs here."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
