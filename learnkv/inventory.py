"""What lies on this disk, told without torch: gates, runs and folders of traces, as cells of a line each."""

from __future__ import annotations

import json
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path

import yaml
from safetensors import SafetensorError, safe_open

from learnkv import config
from learnkv.counts import size
from learnkv.places import CONFIG, EVENTS, LAST, PARTS, RECIPE, SHARDS, WEIGHTS

Cells = tuple[str, ...]
BROKEN = (
    ValueError,
    KeyError,
    TypeError,
    OSError,
    SafetensorError,
    zipfile.BadZipFile,
    yaml.YAMLError,
)  # what files give that were cut off


def recipes() -> list[Cells]:
    """Name and first comment line of every shipped recipe."""
    return [(name, config.recipe_file(name).read_text().partition("\n")[0].removeprefix("# ")) for name in config.recipe_names()]


# ---- gates


def gates(*folders: Path) -> list[Cells]:
    """Folder, method, base model, size and held-out reward of every gate right under the folders."""
    found = {path.parent: None for folder in folders for path in sorted(folder.glob(f"*/{WEIGHTS}"))}
    return [(f"{folder}", *gate(folder)) for folder in found]


def gate(folder: Path) -> Cells:
    weights = folder / WEIGHTS
    try:
        card = json.loads(metadata(weights)["card"])
        told = [f"{card['method']}", f"{card['base_model']['name']}"]
    except BROKEN as error:
        return (damaged(error),)
    reward = heldout_reward(folder / EVENTS)
    return (*told, size(weights.stat().st_size), "" if reward is None else f"held-out reward {reward:.2f}")


def metadata(path: Path) -> dict[str, str]:
    """What the header of a safetensors file says beside its tensors."""
    with safe_open(path, framework="np") as opened:
        return dict(opened.metadata() or {})


def heldout_reward(events: Path) -> float | None:
    """The last one that a run wrote for TensorBoard, the oracle's being -1; None where it wrote none."""
    if not events.is_dir():
        return None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # half a second that other lines need not wait for

    log = EventAccumulator(str(events)).Reload()
    return log.Scalars(REWARD)[-1].value if REWARD in log.Tags()["scalars"] else None


REWARD = "heldout/reward"


def damaged(error: BaseException) -> str:
    return f"damaged: {config.one_line(error)}"


# ---- runs


def runs(folder: Path) -> list[Cells]:
    """Folder, method, steps and what may be done with every run right under the folder."""
    return [(f"{path.parent}", *run(path.parent)) for path in sorted(folder.glob(f"*/{RECIPE}"))]


def run(folder: Path) -> Cells:
    try:
        recipe = yaml.safe_load((folder / RECIPE).read_text())
        method, total = f"{recipe['method']}", int(recipe["train"]["steps"])
        done = steps_done(folder / LAST) if (folder / LAST).exists() else 0
    except BROKEN as error:
        return (damaged(error),)
    return method, f"{done} of {total} steps", state(folder, done, total)


def state(folder: Path, done: int, total: int) -> str:
    """In words; whether its gate can be used, and whether it can be gone on with."""
    if not (folder / LAST).exists():
        return "trained, without a checkpoint to go on from" if (folder / WEIGHTS).exists() else "starts over: no checkpoint yet"
    if done < total or not (folder / WEIGHTS).exists():
        return "can be resumed"
    return "trained"


def steps_done(path: Path) -> int:
    """The step at which a checkpoint was written.  Its pickle is read as text and never run."""
    with zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), "data.pkl")
        values = written(archive.read(name))
    for value in values:
        if value == "global_step":
            return int(next(values, -1))  # type: ignore[call-overload]
    raise ValueError(f"{path} names no step")


def written(pickled: bytes) -> Iterator[object]:
    """Texts and numbers of a pickle in the order in which they stand there."""
    for code, value, _ in pickletools.genops(pickled):
        if value is not None and not any(word in code.name for word in ("PUT", "GET", "FRAME")):  # whose numbers are the format's own
            yield value


# ---- traces


def traces(folder: Path) -> list[Cells]:
    """Folder, base model, mode, prompts and bytes of every folder of traces right under the folder."""
    return [(f"{path.parent}", *recorded(path.parent)) for path in sorted(folder.glob(f"*/{CONFIG}"))]


def recorded(folder: Path) -> Cells:
    shards, parts = sorted(folder.glob(SHARDS)), list(folder.glob(f"{PARTS}/*.safetensors"))
    try:
        found = json.loads((folder / CONFIG).read_text())
        told = [f"{found['base_model']['name']}", f"mode {found['settings']['mode']}"]
        num_prompts = sum(len(json.loads(metadata(shard)["rows"])) for shard in shards) + len(parts)
    except BROKEN as error:
        return (damaged(error),)
    num_bytes = sum(path.stat().st_size for path in [*shards, *parts])
    return (*told, f"{num_prompts} prompts", size(num_bytes), "being recorded, or stopped" if parts else "")
