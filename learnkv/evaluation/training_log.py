"""What a training run left for TensorBoard, as one curve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from learnkv.inventory import REWARD
from learnkv.places import EVENTS

NAMES = {REWARD: "held-out reward", "loss": "training loss"}  # the first that a run logged is shown


@dataclass(frozen=True)
class Log:
    """A figure over the steps of a run: points (step, value)."""

    run: str
    name: str
    points: tuple[tuple[float, float], ...]


def read(run: Path) -> Log | None:
    """The curve of a run's folder; None where it holds no events, as a gate that was shipped or copied."""
    if not (run / EVENTS).is_dir():
        return None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # half a second, for runs only

    log = EventAccumulator(str(run / EVENTS)).Reload()
    tag = next((tag for tag in NAMES if tag in log.Tags()["scalars"]), None)
    return Log(str(run), NAMES[tag], tuple((event.step, event.value) for event in log.Scalars(tag))) if tag else None
