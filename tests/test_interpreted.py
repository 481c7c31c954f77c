"""tests/interpreted under TRITON_INTERPRET=1, a process for each file: interpretation and compilation of kernels do not mix in one."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "interpreted"
FILES = sorted(FOLDER.glob("test_*.py"))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")


def run_pytest(*options: str | Path, before: Path | None = None, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, in the interpreter or not, with the folder `before` going before all that is installed."""
    path = os.pathsep.join(str(folder) for folder in (before, ROOT, os.environ.get("PYTHONPATH")) if folder)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1" if interpret else "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def runs(request):
    """The process of each file that is asked for, two at a time."""
    chosen = request.config.getoption("markexpr")
    options = ["-m", chosen] if chosen else []
    asked = [item.callspec.params["file"] for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        yield {file: pool.submit(run_pytest, *options, file, interpret=True) for file in asked}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter(file, runs):
    done = runs[file].result()
    assert done.returncode == 0, done.stdout


def test_nothing_of_it_is_collected_without_the_interpreter():
    done = run_pytest("--collect-only", FOLDER)
    assert "no tests" in done.stdout, done.stdout
