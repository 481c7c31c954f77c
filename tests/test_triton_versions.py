"""The kernels under the Triton versions that older torch builds pin: the same tests in the interpreter, the same gate for the H200."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from learnkv.assets import cache_folder, once
from tests.test_interpreted import FOLDER, ROOT, run_pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")]

# torch 2.11 pins 3.6.0, 2.13 pins 3.7.1; the interpreter of 3.6.0 wants numpy below 2.4
VERSIONS = {"3.6.0": ["numpy==2.3.5"], "3.7.1": []}


def installed(version: str) -> Path:
    """A folder of the user's cache with this Triton, to go before what is installed: 0.7 GB."""

    def fill(folder: Path) -> None:
        wheels = [f"triton=={version}", *VERSIONS[version]]
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--disable-pip-version-check",
            "--target",
            str(folder),
            *wheels,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return once(cache_folder() / f"triton-{version}", fill)


@pytest.fixture(scope="module", params=VERSIONS)
def runs(request):
    """pytest in the interpreter and of the gate, side by side."""
    before = installed(request.param)
    with ThreadPoolExecutor(2) as pool:
        interpreted = pool.submit(run_pytest, "-m", "not slow", FOLDER, before=before, interpret=True)
        gate = pool.submit(run_pytest, "-m", "not slow", ROOT / "tests" / "test_build.py", before=before)
        yield {"interpreted": interpreted, "gate": gate, "version": request.param, "folder": before}


def test_interpreted_tests_pass(runs):
    done = runs["interpreted"].result()
    assert done.returncode == 0, done.stdout


def test_compile_gate_passes(runs):
    done = runs["gate"].result()
    assert done.returncode == 0, done.stdout


def test_it_is_the_version_asked(runs):
    code = f"import sys; sys.path.insert(0, {str(runs['folder'])!r}); import triton; print(triton.__version__)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == runs["version"]
