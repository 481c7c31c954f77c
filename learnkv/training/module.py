"""One LightningModule for every gate: optimiser, averaged weights, guards and what TensorBoard shows."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from learnkv.gates.base import Batch, Gate
from learnkv.gates.ranking import PROTECTED, reward_of
from learnkv.traces.dataset import TraceDataset
from learnkv.training.settings import TrainSettings
from learnkv.training.steps import Steps


class GateTraining(LightningModule):
    """Minimises `gate.loss`; `averaged` is what is evaluated and saved."""

    def __init__(self, gate: Gate, traces: TraceDataset, settings: TrainSettings) -> None:
        super().__init__()
        self.gate = gate
        self.average = AveragedModel(gate, multi_avg_fn=get_ema_multi_avg_fn(settings.ema)).requires_grad_(False)
        self.traces, self.settings = traces, settings

    @property
    def averaged(self) -> Gate:
        """The gate with averaged weights."""
        return cast(Gate, self.average.module)

    @property
    def trained_on(self) -> dict[str, str]:
        """The base model's weights and the traces, as far as a run that goes on must find the same."""
        traces = hashlib.sha256(json.dumps([row["id"] for row in self.traces.rows]).encode()).hexdigest()[:16]
        return {"base model's weights": self.traces.base_model.weights_hash, "traces": traces}

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint[TRAINED_ON] = self.trained_on

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """Refuses a checkpoint of another gate's shapes, base model or traces."""
        refuse_other_lessons(checkpoint.get(TRAINED_ON, {}), self.trained_on)
        there, mine = ({name: tuple(t.shape) for name, t in state.items()} for state in (checkpoint["state_dict"], self.state_dict()))
        for name in sorted(there.keys() | mine.keys()):
            if there.get(name) != mine.get(name):
                raise ValueError(
                    f"the run's last checkpoint has {name} of shape {there.get(name)}, this gate {mine.get(name)}: it was edited, or is "
                    "another gate's; delete it to train from the start"
                )

    def train_dataloader(self) -> Steps:
        return Steps(self.traces, self.settings, self.global_rank, self.trainer.world_size)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch  # a gate moves what it reads of a trace, and no more

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        found = self.gate.loss(batch)
        refuse_nan(found["losses"], batch)
        watched = {"loss": found["loss"].detach()} | ({"reward": found["reward"].mean()} if "reward" in found else {})
        self.log_dict(watched, prog_bar=True, sync_dist=True)
        self.last_batch = batch
        return found["loss"]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.global_step == 0:
            refuse_idle(self.gate)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.gate.parameters() if p.grad is not None])
        if not norm.isfinite():
            traces = ", ".join(trace.id for trace in self.last_batch.traces)
            raise ValueError(f"step {self.global_step}: the gradient is not finite; traces {traces}; look at them, or lower train.lr")
        self.log("gradient_norm", norm)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], object] | None = None,
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        # here rather than in on_train_batch_end, which runs after checkpoints are written
        if self.global_step <= self.settings.ema_start:
            self.average.n_averaged.zero_()  # the next update copies
        self.average.update_parameters(self.gate)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        s = self.settings
        optimizer = OPTIMIZERS[s.optimizer](self.gate.parameters(), lr=s.lr, weight_decay=s.weight_decay)
        schedule = LambdaLR(optimizer, lambda step: learning_rate(step, s) / s.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


TRAINED_ON = "trained_on"  # key in a checkpoint


def refuse_other_lessons(there: dict[str, str], mine: dict[str, str]) -> None:
    """Raises a ValueError for the first of `GateTraining.trained_on` that a checkpoint has otherwise."""
    for name, here in mine.items():
        if there.get(name) != here:
            raise ValueError(
                f"the run's last checkpoint was trained on other {name} ({there.get(name)}) than are here now ({here}); "
                "give another name=..., or resume=never to start over"
            )


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adamw": AdamW, "sgd": partial(SGD, momentum=0.9)}


def learning_rate(step: int, s: TrainSettings) -> float:
    """Linear from lr / 100 over the warm-up, then a cosine from lr to min_lr."""
    if step < s.warmup:
        return s.lr * (0.01 + 0.99 * step / s.warmup)
    done = (step - s.warmup) / max(1, s.steps - s.warmup)
    return s.min_lr + (s.lr - s.min_lr) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


class HeldOut(Callback):
    """Every `eval_every` steps and after the last: held-out reward of the averaged gate, as scalars per layer and a map of the heads."""

    def __init__(self, traces: TraceDataset) -> None:
        self.traces = traces

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int) -> None:
        module = cast(GateTraining, pl_module)
        if trainer.global_step % module.settings.eval_every == 0 or trainer.global_step == module.settings.steps:
            rewards = self.rewards(module)
            if trainer.is_global_zero:
                draw(trainer, rewards)

    def rewards(self, module: GateTraining) -> Tensor:
        """[layers, H] mean normalised reward over the held-out traces, shared by all processes."""
        own = range(module.global_rank, len(self.traces), module.trainer.world_size)
        shape = module.gate.base.num_layers, module.gate.base.num_kv_heads
        total = torch.zeros(shape, device=module.device)
        for trace in (self.traces[i] for i in own):
            scores = module.averaged.score_trace(trace)
            total += reward_of(scores, trace.targets["utility"].to(scores.device), num_sinks=PROTECTED[0], num_recent=PROTECTED[1])
        summed = cast(Tensor, module.trainer.strategy.reduce(total, reduce_op="sum"))
        return summed / len(self.traces)


class Stopwatch(Callback):
    """Seconds that the steps of a run took, held-out evaluations included; checkpoints carry them over interruptions."""

    seconds = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.mark = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int) -> None:
        now = time.monotonic()
        self.seconds += now - self.mark
        self.mark = now

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.seconds = state_dict["seconds"]


def draw(trainer: Trainer, rewards: Tensor) -> None:
    """rewards [layers, H] to TensorBoard; the map goes from 10 times the oracle's regret (black) to none (white)."""
    writer, step = cast(TensorBoardLogger, trainer.logger).experiment, trainer.global_step
    writer.add_scalar("heldout/reward", rewards.mean(), step)
    for layer, reward in enumerate(rewards.mean(1)):
        writer.add_scalar(f"heldout_layer/{layer:02d}", reward, step)
    shade = (1 - (-rewards).clamp(1, 10).log10()).cpu()[None]  # [1, layers, H]
    writer.add_image("heldout/reward_by_layer_and_head", shade.repeat_interleave(8, 1).repeat_interleave(8, 2), step)
    writer.flush()


def refuse_nan(losses: Tensor, batch: Batch) -> None:
    """Raises a ValueError with the id of the trace whose loss is not finite."""
    for trace, loss in zip(batch.traces, losses.tolist(), strict=True):
        if not math.isfinite(loss):
            raise ValueError(f"step {batch.step}: the loss of trace {trace.id} ({trace.kind}) is {loss}; look at it, or lower train.lr")


def refuse_idle(gate: Gate) -> None:
    """Raises a ValueError that names the trainable tensors without a gradient."""
    idle = [name for name, p in gate.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    if idle:
        raise ValueError(f"the {gate.METHOD} loss gives no gradient to {', '.join(idle)} in the first step; freeze them or change the loss")
