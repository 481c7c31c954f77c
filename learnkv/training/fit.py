"""From a gate and traces to a trained gate; Lightning runs the loop, its checkpoints are written whole or not at all."""

from __future__ import annotations

import io
import logging
import os
import pickle
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerStatus

from learnkv.files import write_atomically
from learnkv.gates.base import Batch, Gate
from learnkv.places import EVENTS, LAST
from learnkv.traces.dataset import TraceDataset
from learnkv.traces.format import Trace
from learnkv.training.module import GateTraining, HeldOut, Stopwatch
from learnkv.training.settings import TrainSettings
from learnkv.training.steps import taught

FIRST_TRACES = 8  # that input statistics are taken from
CALIBRATION_TRACES = 64


def fit(gate: Gate, train: TraceDataset, heldout: TraceDataset, run: Path, settings: TrainSettings, *, resume: bool = True) -> Gate:
    """The gate with averaged weights after the last step, calibrated.

    run     folder of last.ckpt and of the TensorBoard events
    resume  goes on from last.ckpt where there is one; the result is the same to the bit on CPU
    """
    torch.set_float32_matmul_precision("high")
    gate.prepare(spread(train, FIRST_TRACES))
    module = GateTraining(gate, train, settings)
    last = run / LAST
    with quiet_lightning():
        trainer = make_trainer(run, heldout, settings)
        go(trainer, module, last if resume and last.exists() else None)
        trainer.save_checkpoint(last)
    averaged = module.averaged.cpu()
    lessons = Batch(spread(train, CALIBRATION_TRACES), settings.seed, 0, settings.shuffled)
    averaged.calibrate(taught(lessons).traces)
    return averaged.eval()


def seconds_trained(run: Path) -> float | None:
    """What the steps of a run took, those before its interruptions included; None where its checkpoint does not say."""
    counted = WholeCheckpoints().load_checkpoint(run / LAST).get("callbacks", {}).get(Stopwatch().state_key, {})
    seconds: float = counted.get("seconds", 0.0)
    return seconds or None


def make_trainer(run: Path, heldout: TraceDataset, settings: TrainSettings) -> Trainer:
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's count
    nodes = int(os.environ.get("WORLD_SIZE", devices)) // devices
    return Trainer(
        accelerator="auto",
        strategy="ddp" if devices * nodes > 1 else "auto",
        devices=devices,
        num_nodes=nodes,
        precision=settings.precision,
        max_epochs=1,  # a run is one epoch of `steps` batches
        max_steps=settings.steps,
        gradient_clip_val=settings.clip,
        log_every_n_steps=settings.log_every,
        logger=TensorBoardLogger(run, name=EVENTS, version=""),
        callbacks=[
            HeldOut(heldout),
            Stopwatch(),
            ModelCheckpoint(run, Path(LAST).stem, every_n_train_steps=settings.save_every, enable_version_counter=False),
            TQDMProgressBar(refresh_rate=10),
        ],
        plugins=[WholeCheckpoints()],
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def go(trainer: Trainer, module: GateTraining, checkpoint: Path | None) -> None:
    """Runs the steps; Ctrl-C comes out as KeyboardInterrupt."""
    try:
        trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
    except SystemExit:
        # Lightning turns Ctrl-C into exit(1)
        if trainer.state.status == TrainerStatus.INTERRUPTED:
            raise KeyboardInterrupt from None
        raise


START_OVER = "delete it to train from the start"
# what unpickling gives on noise
NOT_A_CHECKPOINT = (RuntimeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError)


class WholeCheckpoints(TorchCheckpointIO):
    """Checkpoints that a kill or a full disk can't leave half written.

    Differs: Lightning's own writes to the system's temporary folder and moves, which copies where that is another file system.
    """

    def save_checkpoint(self, checkpoint: dict, path: str | Path, storage_options: object = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()  # torch.save to a full disk is a RuntimeError
        torch.save(checkpoint, content)
        write_atomically(Path(path), lambda to: to.write_bytes(content.getbuffer()))

    def load_checkpoint(self, path: str | Path, map_location: object = None, weights_only: bool | None = None) -> dict:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            lacking = [name for name in ("pytorch-lightning_version", "state_dict", "loops", "optimizer_states") if name not in found]
        except NOT_A_CHECKPOINT as error:
            raise ValueError(f"checkpoint {path} is truncated or was edited ({error or 'it is empty'}); {START_OVER}") from error
        if lacking:
            raise ValueError(f"checkpoint {path} lacks {', '.join(lacking)}: it is none of a training run; {START_OVER}")
        return found


class quiet_lightning:
    """Lightning without tips, hints on workers and lists of devices; its errors are exceptions anyway."""

    def __enter__(self) -> None:
        self.loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
        self.levels = [logger.level for logger in self.loggers]
        for logger in self.loggers:
            logger.setLevel(logging.ERROR)
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.filterwarnings("ignore", module=r"lightning\..*")

    def __exit__(self, *error: object) -> None:
        self.warnings.__exit__(None, None, None)
        for logger, level in zip(self.loggers, self.levels, strict=True):
            logger.setLevel(level)


def spread(traces: TraceDataset, count: int) -> list[Trace]:
    """Up to `count` traces at equal distances."""
    count = min(count, len(traces))
    return [traces[i * len(traces) // count] for i in range(count)]
