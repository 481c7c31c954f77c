"""What the tests of end-to-end distilled gates share: a tiny frozen model, traces of it, each gate in a small size, live scores."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from learnkv.budgets import Threshold
from learnkv.gates import GATES
from learnkv.gates.distilled import DistilledGate
from learnkv.gates.dms import DMSConfig
from learnkv.gates.duo_attention import DuoAttentionConfig
from learnkv.gates.trimkv import TrimKVConfig
from learnkv.models import BaseModel, describe
from learnkv.observation import Scorer
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from learnkv.traces.dataset import TraceDataset
from learnkv.traces.format import Continuation, Trace
from learnkv.traces.measure import measure
from learnkv.traces.record import RecordSettings
from tests.recording import tiny_model
from tests.tiny_models import left_padded
from tests.training_parts import Noting, written

SMALL = {
    "trimkv": TrimKVConfig(width=6, bias=3.0, budget=8),
    "dms": DMSConfig(window=6, ratio=4.0, ratio_steps=4),
    "duo_attention": DuoAttentionConfig(num_sinks=2, num_recent=6),
}


@cache
def model() -> LlamaForCausalLM:
    return tiny_model(layers=3)


@cache
def base() -> BaseModel:
    return describe(model())


def bare_trace(n: int, seed: int = 0, *, questions: int = 2, split: str = "train") -> Trace:
    """n random tokens of context and questions of 5 tokens with answers of 3."""
    g = torch.Generator().manual_seed(100 * n + seed)
    asked = [Continuation(draw(5, g), draw(3, g), draw(0, g)) for _ in range(questions)]
    return Trace(f"{n:08x}{seed:08x}", "made", split, draw(n, g), asked)


def draw(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(256, (count,), generator=generator)


def made_trace(n: int, seed: int = 0, *, questions: int = 2, split: str = "train") -> Trace:
    """The same as the model sees it, in float32."""
    bare = bare_trace(n, seed, questions=questions, split=split)
    also = ("hidden", "block_input")
    return measure(model(), bare, future="question_answer", max_new_tokens=0, also=also, dtype=torch.float32)


def made_gate(name: str, config: object = None, *, seed: int = 0) -> DistilledGate:
    """A gate that has met the model; weights that begin at 0 or 1 are spread, so that its scores say something."""
    torch.manual_seed(seed)
    gate = GATES[name](config or SMALL[name], base())
    assert isinstance(gate, DistilledGate)
    if name == "dms":
        gate.weight.data.normal_(std=0.02)
    if name == "duo_attention":
        gate.alpha.data.uniform_()
    gate.meet(model())
    return gate


def made_folder(folder: Path, *, train: int = 4, heldout: int = 2) -> TraceDataset:
    settings = RecordSettings(also=["hidden", "block_input"])
    return written(folder, lambda i, split: made_trace(30 + 3 * i, i, split=split), base(), settings, train=train, heldout=heldout)


@torch.no_grad()
def live_scores(scorer: Scorer, rows: list[Tensor], sizes: list[int] | None = None) -> list[Tensor]:
    """Per row [layers, H, n] scores after the last forward of a left-padded batch that comes in chunks of `sizes` columns."""
    policy = Noting(scorer, 10_000, Threshold(-torch.inf), num_sinks=0, num_recent=0)
    ids, mask = left_padded(rows)
    done = 0
    with attach(model()):
        cache = EvictionCache(policy, model())
        for part in ids.split(sizes or [ids.shape[1]], 1):
            done += part.shape[1]
            rope = (mask[:, :done].cumsum(-1) - 1).clamp(min=0)[:, -part.shape[1] :]
            model()(part, attention_mask=mask[:, :done], position_ids=rope, cache=cache)
    last = policy.given[-base().num_layers :]
    assert [obs.layer for _, obs in last] == list(range(base().num_layers))
    return [torch.stack([scores[b, :, : len(row)] for scores, _ in last]) for b, row in enumerate(rows)]
