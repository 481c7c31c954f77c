"""What the tests of gates that score a token once share: traces of a tiny model, gates, and what a cache remembers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learnkv import config
from learnkv.gates import GATES
from learnkv.gates.born import BornGate
from learnkv.models import BaseModel, describe
from learnkv.policy import Policy
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from learnkv.traces.dataset import TraceDataset
from learnkv.traces.format import Continuation, Trace
from learnkv.traces.measure import ALSO, measure
from learnkv.traces.record import RecordSettings
from learnkv.train import TrainCommand, config_of
from learnkv.training import fit
from tests.tiny_models import prompt, tiny
from tests.training_parts import quick, written

BORN = sorted(name for name, gate in GATES.items() if issubclass(gate, BornGate))
KNOBS: dict[str, dict[str, object]] = {
    "fast_kvzip": dict(width=4, num_sinks=3),
    "kvzap": dict(width=6),
    "locret": dict(width=6),
    "foresight": dict(width=6, inner_width=4, pooling=0.0),
}
WHOLE, ONWARD = torch.tensor([11, 12, 13]), torch.tensor([14, 15, 16, 17])


def bare_trace(n: int, seed: int = 0, split: str = "train") -> Trace:
    """n random tokens, a question of 5 and an answer of 3."""
    asked = Continuation(prompt(5, seed=100 + seed)[0], prompt(3, seed=200 + seed)[0], torch.empty(0, dtype=torch.int64))
    name = f"{n:04x}{seed:04x}{len(split):02x}"
    return Trace(name, "made", split, prompt(n, seed=seed)[0], [asked], repeat_whole=WHOLE, repeat_onward=ONWARD)


@cache
def model_of(family: str = "llama") -> PreTrainedModel:
    return tiny(family).requires_grad_(False)


@cache
def recorded(n: int, seed: int = 0, family: str = "llama", split: str = "train") -> Trace:
    """A float32 trace that holds all there is."""
    bare = bare_trace(n, seed, split)
    return measure(model_of(family), bare, future="question_answer", max_new_tokens=0, also=ALSO, dtype=torch.float32)


def made(name: str, base: BaseModel, **knobs: object) -> BornGate:
    """A gate of which no weight is 0."""
    torch.manual_seed(0)
    gate = GATES[name](GATES[name].Config(**KNOBS[name] | knobs), base)
    assert isinstance(gate, BornGate)
    for weight in gate.parameters():
        weight.data += 0.1 * torch.randn(weight.shape)
    return gate


def gate_for(name: str, family: str = "llama", **knobs: object) -> BornGate:
    return made(name, describe(model_of(family)), **knobs)


def published(recipe: str, base: BaseModel, **knobs: object) -> BornGate:
    """The gate of a paper's recipe, without memory for its weights."""
    command = config.load([f"recipe=paper/{recipe}", *(f"gate.{name}={value}" for name, value in knobs.items())], TrainCommand)
    with torch.device("meta"):
        gate = GATES[command.method](config_of(command), base)
    assert isinstance(gate, BornGate)
    return gate


def remembered(cache: EvictionCache) -> Tensor:
    """[layers, B, H, L] what the scorer wrote beside the tokens, of a cache whose heads are equally long; ascending in position."""
    slots = [pages.slots() for pages in cache.held_pages()]
    return torch.stack([s.gathered(s.memory_pages)[..., 0] for s in slots])


@torch.no_grad()
def live_scores(gate: BornGate, model: PreTrainedModel, ids: Tensor, sizes: list[int] | None = None, **rules: Tensor) -> Tensor:
    """`remembered` after ids [B, n] came in forwards of `sizes` tokens, nothing evicted."""
    with attach(model):
        cache = EvictionCache(Policy(gate, 10_000), model)
        for chunk in ids.split(sizes or [ids.shape[1]], 1):
            model(chunk, cache=cache, **rules)
    return remembered(cache)


def made_folder(folder: Path, *, train: int = 6, heldout: int = 2) -> TraceDataset:
    """Traces of the tiny Llama."""
    settings = RecordSettings(also=list(ALSO))
    return written(folder, lambda i, s: recorded(30 + 3 * i, i, split=s), describe(model_of()), settings, train=train, heldout=heldout)


def train(name: str, folder: Path, run: Path, **changes: object) -> BornGate:
    """One run on the traces of `folder`, all else the same."""
    traces = TraceDataset(folder)
    gate = fit(gate_for(name), traces.split("train"), traces.split("heldout"), run, quick(**changes))
    assert isinstance(gate, BornGate)
    return gate
