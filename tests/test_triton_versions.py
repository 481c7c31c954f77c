"""The kernels under the Triton versions that older torch builds pin: the same tests in the interpreter, the same gate for one H200."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from learnkv.assets import cache_folder, once
from tests.test_interpreted import FILES, ROOT, interpreted

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")]

# torch 2.11 pins 3.6.0, 2.13 pins 3.7.1; the interpreter of 3.6.0 wants numpy below 2.4
VERSIONS = {"3.6.0": ["numpy==2.3.5"], "3.7.1": []}


def installed(version: str) -> Path:
    """A folder of the user's cache with this Triton, to go before what is installed."""

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


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_interpreted_tests_pass(version, file):
    done = interpreted(file, "-m", "not slow", before=installed(version))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_compile_gate_passes(version):
    path = os.pathsep.join([str(installed(version)), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "tests/test_build.py"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_the_version_asked(version):
    code = "import triton; print(triton.__version__)"
    environment = {**os.environ, "PYTHONPATH": str(installed(version))}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == version
