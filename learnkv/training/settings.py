"""What a training run can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Cut = Literal["none", "uniform", "recorded"]


@dataclass
class TrainSettings:
    """Defaults train a small gate in minutes on two CPU cores; the published values of KVP are in recipes/paper/kvp.yaml."""

    steps: int = 1200  # optimiser steps
    batch: int = 1  # traces per step, over all processes together
    seed: int = 0  # of the weights, of the order of traces and of everything drawn
    cut: Cut = "none"  # where a trace ends in a step: at its end, anywhere (same questions), or at a recorded cut (its own future)
    min_cut: int = 32  # shortest context a cut leaves, tokens
    shuffled: bool = False  # a control: what tokens are worth (where outputs are distilled: what rows say) is dealt out anew, once for all
    optimizer: Literal["adamw", "sgd"] = "adamw"  # sgd has a momentum of 0.9
    lr: float = 1e-3  # after warm-up
    min_lr: float = 1e-6  # at the end of the cosine
    warmup: int = 100  # steps of linear warm-up, from a hundredth of lr
    weight_decay: float = 1e-3
    clip: float = 5.0  # norm of the gradient
    ema: float = 0.99  # decay of the averaged weights, which are the ones saved
    ema_start: int = 100  # steps before averaging begins
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"  # of the products; scores and losses stay float32
    log_every: int = 20  # steps between TensorBoard scalars
    eval_every: int = 200  # steps between held-out evaluations
    save_every: int = 200  # steps between checkpoints to resume from

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "min_cut", "log_every", "eval_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)} counts from 1; give 1 or more")
        for name in ("lr", "min_lr", "weight_decay", "clip"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"train.{name}={getattr(self, name)} is no finite number; give one")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"train.{name}={getattr(self, name)} must be above 0")
        for name in ("min_lr", "weight_decay", "warmup", "ema_start", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name}={getattr(self, name)} must be 0 or more")
        if self.seed >= 2**32:
            raise ValueError(f"train.seed={self.seed} is above 2**32 - 1; give a smaller number")
        if not 0 <= self.ema < 1:
            raise ValueError(f"train.ema={self.ema} is a decay; give a number from 0 (no averaging) to below 1")
