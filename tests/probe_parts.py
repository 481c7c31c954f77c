"""What the tests of probe tokens share: a tiny model, traces of it with its own responses, gates that met it, a policy that notes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learnkv.capture import capture
from learnkv.gates import GATES
from learnkv.gates.probe_tokens import ProbeTokens
from learnkv.models import describe
from learnkv.observation import Scorer
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from learnkv.traces.dataset import TraceDataset
from learnkv.traces.format import Continuation, Trace
from learnkv.traces.measure import measure
from learnkv.traces.record import RecordSettings
from learnkv.training import fit
from tests.recording import tiny_model
from tests.training_parts import Noting, quick, written

SMALL: dict[str, dict[str, int]] = {"lookaheadkv": dict(num_tokens=5, rank=2, kernel_size=3), "judge_q": dict(num_tokens=5, kernel_size=3)}


@cache
def model() -> PreTrainedModel:
    return tiny_model(layers=3)


def ids(n: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 256, (n,), generator=torch.Generator().manual_seed(1000 * n + seed))


@cache
def trace(n: int, seed: int = 0, split: str = "train") -> Trace:
    """A prompt of n random tokens and the model's own response of a few tokens."""
    nothing = torch.empty(0, dtype=torch.int64)
    bare = Trace(f"{split}{n:05d}{seed:05d}", "made", split, ids(n, seed), [Continuation(nothing, nothing, nothing)])
    return measure(model(), bare, future="response", max_new_tokens=4, also=["attention"], dtype=torch.float32)


def gate_of(method: str, *, seed: int = 0, meets: bool = True, **knobs: object) -> ProbeTokens:
    torch.manual_seed(seed)
    kind = GATES[method]
    gate = kind(kind.Config(**SMALL[method] | knobs), describe(model()))
    if meets:
        gate.meet(model())
    assert isinstance(gate, ProbeTokens)
    return gate


def moved_gate(method: str, **knobs: object) -> ProbeTokens:
    """A gate whose every weight matters."""
    gate, generator = gate_of(method, **knobs), torch.Generator().manual_seed(1)
    for weight in gate.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return gate.eval().requires_grad_(False)


def served(
    scorer: Scorer, tokens: Tensor, lm: PreTrainedModel | None = None, chunks: tuple[int, ...] = (), budget: int = 8
) -> list[Tensor]:
    """Scores [1, H, L] of each selection in a live cache, layer by layer; chunks are sizes, all in one without."""
    lm, policy = lm or model(), Noting(scorer, budget, num_sinks=1, num_recent=2)
    with torch.no_grad(), attach(lm):
        held = EvictionCache(policy, lm)
        for chunk in tokens[None].split(list(chunks or (len(tokens),)), 1):
            lm(chunk, cache=held)
    return policy.scores


def rows_by_hand(lm: PreTrainedModel, behind: PreTrainedModel, tokens: Tensor, rows: Tensor) -> Tensor:
    """[layers, Q, n] float64: `lm` reads the prompt, `behind` the rows after it; mean over the rows of their softmax attention."""
    n, R = len(tokens), len(rows)
    with torch.no_grad(), capture(behind, {"queries"}) as taken:
        held = lm(tokens[None], use_cache=True).cache
        behind.model(inputs_embeds=rows[None], position_ids=torch.arange(n, n + R)[None], cache=held, use_cache=True)
        found = []
        for layer, queries in taken.queries.items():
            keys = held.layers[layer].keys[0].repeat_interleave(queries.shape[1] // held.layers[layer].keys.shape[1], 0)
            logits = queries[0] @ keys.mT * queries.shape[-1] ** -0.5  # [Q, R, n + R]
            later = torch.arange(n + R) > n + torch.arange(R)[:, None]
            found.append(logits.masked_fill(later, -torch.inf).softmax(-1)[..., :n].mean(1))
    return torch.stack(found)


def folder_of_traces(folder: Path) -> TraceDataset:
    settings = RecordSettings(future="response", also=["attention"])
    return written(folder, lambda i, split: trace(20 + 3 * i, i, split), describe(model()), settings, train=4, heldout=2)


def train(method: str, traces: TraceDataset, run: Path, **changes: object) -> ProbeTokens:
    """A dozen steps."""
    found = fit(gate_of(method), traces.split("train"), traces.split("heldout"), run, quick(**changes))
    assert isinstance(found, ProbeTokens)
    return found
