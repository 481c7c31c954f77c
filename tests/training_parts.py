"""What the tests of gates share: traces with a pattern to learn, in memory and in a folder, and a training run of its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from learnkv.gates.base import Batch, Gate
from learnkv.gates.kvp import KVP, KVPConfig
from learnkv.models import BaseModel
from learnkv.observation import Observation
from learnkv.policy import Policy
from learnkv.traces import format
from learnkv.traces.dataset import TraceDataset
from learnkv.traces.format import Trace, TraceConfig
from learnkv.traces.record import RecordSettings
from learnkv.training import TrainSettings, fit

BASE = BaseModel(
    "tiny", "0123456789abcdef", num_layers=3, num_kv_heads=2, num_query_heads=4, head_dim=8, hidden_size=32, frequencies=(1.0, 0.1, 0.01)
)


def made_trace(n: int, seed: int = 0, *, base: BaseModel = BASE, split: str = "train") -> Trace:
    """n tokens of random keys and values; a token is worth what its key's last dimension says, which does not rotate."""
    g = torch.Generator().manual_seed(1000 * n + seed)
    shape = base.num_layers, base.num_kv_heads, n, base.head_dim
    keys, values = (torch.randn(shape, generator=g) for _ in range(2))
    mass = torch.rand(shape[:3], generator=g)
    window = torch.randn(base.num_layers, base.num_query_heads, min(n, 32), base.head_dim, generator=g)
    targets = {"utility": (2 * keys[..., -1]).exp() / n}
    return Trace(f"{split}{n:05d}{seed:05d}", "made", split, torch.arange(n), [], keys, values, window=window, mass=mass, targets=targets)


def made_gate(config: KVPConfig | None = None, *, base: BaseModel = BASE, seed: int = 0) -> KVP:
    torch.manual_seed(seed)
    gate = KVP(config or KVPConfig(branch_width=6, width=10, num_sinks=0, num_recent=0), base)
    gate.prepare([made_trace(40, seed, base=base)])
    return gate


def batch_of(*traces: Trace, seed: int = 0, step: int = 0) -> Batch:
    return Batch(traces, seed, step)


def losses_over(gate: Gate, batch_at: Callable[[int], Batch], *, lr: float, steps: int) -> list[float]:
    """The loss before each of so many steps of Adam."""
    optimizer, losses = torch.optim.Adam(gate.parameters(), lr), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = gate.loss(batch_at(step))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def written(
    folder: Path, made: Callable[[int, str], Trace], base: BaseModel, settings: RecordSettings, *, train: int, heldout: int
) -> TraceDataset:
    """The traces made(i, split) of a base model, as record writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("heldout", heldout)):
        for i in range(count):
            format.write_trace(folder / f"traces-00-{split}{i:03d}.safetensors", made(i, split))
    format.write_config(folder, TraceConfig(base, {}, settings.content()))
    format.write_manifest(folder)
    return TraceDataset(folder)


def made_folder(folder: Path, *, train: int = 6, heldout: int = 2) -> TraceDataset:
    """Traces of 40 and more tokens."""
    return written(folder, lambda i, split: made_trace(40 + 3 * i, i, split=split), BASE, RecordSettings(), train=train, heldout=heldout)


@contextmanager
def power_fails(kind: type[Gate], step: int) -> Iterator[None]:
    """A training of such gates, inside the block, that stops in this step."""
    loss = kind.loss

    def failing(self: Gate, batch: Batch) -> dict[str, Tensor]:
        if batch.step == step:
            raise ConnectionError("power")
        return loss(self, batch)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr(kind, "loss", failing)
        yield


def same(one: Gate, two: Gate) -> bool:
    """Whether all weights are equal to the bit."""
    return all(torch.equal(x, y) for x, y in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


@dataclass(frozen=True)
class Noting(Policy):
    """A policy that notes the scores it is given and what they are of, layer by layer."""

    given: list[tuple[Tensor, Observation]] = field(default_factory=list)

    @property
    def scores(self) -> list[Tensor]:
        return [scores for scores, _ in self.given]

    def mask(self, scores: Tensor, obs: Observation, pinned: Tensor) -> Tensor:
        self.given.append((scores.clone(), obs))
        return super().mask(scores, obs, pinned)


def quick(**changes: object) -> TrainSettings:
    """A dozen steps in a second."""
    fast: dict = {"steps": 12, "warmup": 3, "ema_start": 2, "eval_every": 5, "save_every": 4, "log_every": 1, "lr": 1e-2} | changes
    return TrainSettings(**fast)


def train(folder: str, run: str, **changes: object) -> KVP:
    """One run on the traces of `folder`, all else the same; for processes of their own too."""
    torch.set_num_threads(1)
    traces = TraceDataset(folder)
    gate = fit(made_gate(), traces.split("train"), traces.split("heldout"), Path(run), quick(**changes))
    assert isinstance(gate, KVP)
    return gate
