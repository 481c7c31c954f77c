"""tests/interpreted under TRITON_INTERPRET=1, a process for each file: interpretation and compilation of kernels do not mix in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "tests" / "interpreted").glob("test_*.py"))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")


def interpreted(file: Path, *options: str, before: Path | None = None) -> subprocess.CompletedProcess[str]:
    """pytest of one file in the interpreter, with the folder `before` going before all that is installed."""
    path = os.pathsep.join(str(folder) for folder in (before, ROOT, os.environ.get("PYTHONPATH")) if folder)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(file)]
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter(file, request):
    chosen = request.config.getoption("markexpr")
    done = interpreted(file, *(["-m", chosen] if chosen else []))
    assert done.returncode == 0, done.stdout


def test_nothing_of_it_is_collected_without_the_interpreter():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", str(FILES[0].parent)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "no tests" in done.stdout, done.stdout
