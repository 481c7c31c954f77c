"""What a bug report should say of the machine: versions, processor, memory, disk, GPU, assets.  Nothing is fetched.

An installation that is broken is what this is for: torch and what needs it are imported where they are asked, and what fails is told.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from learnkv import assets
from learnkv.counts import size
from learnkv.version import __version__

Facts = dict[str, str]

PACKAGES = ("torch", "transformers", "triton", "lightning", "peft", "safetensors", "datasets", "accelerate", "gguf", "omegaconf", "kvpress")
SETTINGS = ("LEARNKV_KERNELS", "TRITON_INTERPRET", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "XDG_CACHE_HOME")


def facts(written: list[str]) -> dict[str, Facts]:
    """All of it by section.

    written  folders that commands write into unless told otherwise
    """
    places = [*map(Path, written), assets.cache_folder()]
    return {
        "versions": versions(),
        "processor": processor() | tried("torch", in_torch),
        "memory": memory(),
        "disk": tried("disk", lambda: {short(path): disk(path) for path in places}),
        "GPU": tried("card", cards) | {"C compiler": compiler()} | tried("Triton", triton),
        "assets": tried("wheels", fetched) | tried("models", dequantised),
        "environment": {name: short(os.environ[name]) for name in SETTINGS if name in os.environ},
    }


def tried(name: str, look: Callable[[], Facts]) -> Facts:
    """What `look` finds, or what stopped it under a name: whatever is wrong is what the reader wants to know."""
    try:
        return look()
    except Exception as error:
        return {name: f"fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def short(path: Path | str) -> str:
    """Without the name of the user."""
    return f"{path}".replace(f"{Path.home()}{os.sep}", "~/")


# ---- versions


def versions() -> Facts:
    own = __version__ + (f", commit {found}" if (found := commit(Path(__file__).parents[1])) else "")
    installed = {name: version_of(name) for name in PACKAGES}
    system = {"Python": platform.python_version(), "system": platform.platform()}
    return {"learnkv": own} | system | {name: version for name, version in installed.items() if version}


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit(root: Path) -> str:
    """Of a clone, and whether its files were changed since; "" where there is none, or no git."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (" and changes" if git("status", "--porcelain", "--untracked-files=no") else "")


# ---- processor, memory, disk

BFLOAT16 = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16"}  # as Linux calls them; the last two on ARM
VECTORS = {"avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_fp16", "amx_tile", "asimd", "sve", "sve2"}


def processor() -> Facts:
    info = cpu_info()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": info.get("model name") or platform.processor() or platform.machine(),
        "cores": f"{os.cpu_count()}, {usable} of them to be used",
        "instructions": " ".join(sorted(flags & (VECTORS | BFLOAT16))) or "not told by this system",
        "bfloat16": bfloat16(flags),
    }


def in_torch() -> Facts:
    import torch

    return {"torch": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"}


def cpu_info() -> Facts:
    """The first processor of Linux's list; {} elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().partition("\n\n")[0].splitlines() if path.is_file() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def bfloat16(flags: set[str]) -> str:
    if flags & BFLOAT16:
        return f"has instructions of its own here: {' '.join(sorted(flags & BFLOAT16))}"
    if not flags:
        return "unknown here"
    return "will be slow here, this processor has no instructions for it; take float32 (record.dtype, evaluate.dtype, dtype)"


def memory() -> Facts:
    found = psutil.virtual_memory()
    told = {"installed": size(found.total), "free": size(found.available)}
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        told["limit"] = size(int(text))
    return told


def disk(folder: Path) -> str:
    """Free space where a folder is, or would be made."""
    from learnkv.outline import refuse_unwritable
    from learnkv.traces.record import free_bytes

    try:
        refuse_unwritable(folder)
    except ValueError as error:
        return f"{size(free_bytes(folder))} free, but {error}"
    return f"{size(free_bytes(folder))} free"


# ---- GPU


def cards() -> Facts:
    import torch

    found = {f"card {i}": torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())}
    told = {name: f"{card.name}, {size(card.total_memory)}, compute capability {card.major}.{card.minor}" for name, card in found.items()}
    return (told or {"card": "none that torch sees"}) | {"CUDA of torch": torch.version.cuda or torch.version.hip or "none, built for CPU"}


def compiler() -> str:
    """That Triton builds its launcher with."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), "none, which Triton needs on a GPU")


def triton() -> Facts:
    """Whether it compiles a kernel of ours: for the first card, or where there is none for sm_90."""
    import torch

    from learnkv.ops import arch_of, builds

    arch = arch_of(torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu"))
    began = time.monotonic()
    name, _ = next(iter(builds(arch)))
    return {"Triton": f"compiles {name.split()[0]} for {arch}, {time.monotonic() - began:.1f} s"}


# ---- assets


def fetched() -> Facts:
    """Every pinned wheel: whether it is here, and whether its files are still those of the wheel."""
    return {name: wheel(asset) for name, asset in assets.ASSETS.items()}


def wheel(asset: assets.Asset) -> str:
    folder = assets.unpacked(asset)
    if not folder.is_dir():
        return f"not fetched, {asset.megabytes} MB"
    spoilt = assets.spoilt(folder)
    return f"spoilt: {', '.join(spoilt)}; delete {short(folder)}" if spoilt else "fetched, hashes hold"


def dequantised() -> Facts:
    """The models that were made of them."""
    from learnkv.models import BUNDLED, unpacked_folder

    return {
        f"{name}, dequantised": weights(unpacked_folder(name), bundled.weights_hash)
        for name, bundled in BUNDLED.items()
        if unpacked_folder(name).is_dir()
    }


def weights(folder: Path, wanted: str) -> str:
    """Whether a model's weights are the ones of this hash, "" for one that nobody has noted."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from learnkv.models import hash_of

    try:
        found = hash_of(load_file(folder / "model.safetensors"))
    except (SafetensorError, OSError) as error:
        return f"spoilt: {error}; delete {short(folder)}"
    if wanted not in ("", found):
        return f"spoilt: weights {found}, not {wanted}; delete {short(folder)}"
    return f"weights {found}" + (", hash holds" if wanted else "")
