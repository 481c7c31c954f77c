"""Speed and memory of the runtime, each figure beside what it is compared with, in one run: the least of several, taken in turns."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from learnkv import kvpress_decode, methods
from learnkv.budgets import Ratio
from learnkv.models import PreTrainedModel
from learnkv.policy import Policy
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from learnkv.runtime.step import LayerState, Step

Cache = Any  # an EvictionCache, or the DynamicCache that the model makes for itself

METHODS_TIMED = (
    *("snapkv", "ada_snapkv", "h2o", "tova", "key_diff", "expected_attention", "kvzip", "dapq"),
    *("kvp+adaptive", "lookaheadkv+adaptive", "fast_kvzip", "kvzap+adaptive_global", "foresight"),  # the shipped gates
)


@dataclass
class BenchSettings:
    """Sizes of the measurements."""

    num_tokens: int = 4096  # context of the decode measurements, tokens
    steps: int = 6  # tokens decoded in one turn
    turns: int = 6  # turns of each contender; the fastest counts
    stream: int = 16384  # positions of the chunked prefill, on a model of random weights
    chunk: int = 512  # tokens of each of its forwards
    stream_budget: int = 1024  # tokens per KV head that it keeps
    batch: int = 8  # rows of the batch measurement
    batch_tokens: int = 2048  # context of each of its rows, tokens
    kept: float = 0.1  # fraction of the context that stays
    methods: list[str] = field(default_factory=lambda: [*METHODS_TIMED])  # of part=overhead: as in evaluate.methods
    overhead_tokens: int = 2048  # of part=overhead: tokens of the prompt
    kvpress: str = ""  # python of an environment with kvpress, which then decodes beside; its transformers does not fit ours

    def __post_init__(self) -> None:
        for name in ("num_tokens", "steps", "turns", "stream", "chunk", "stream_budget", "batch", "batch_tokens", "overhead_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"bench.{name}={getattr(self, name)} must be 1 or more")
        methods.policy("snapkv", self.stream_budget)
        Ratio(self.kept)
        if self.kvpress and not shutil.which(self.kvpress):
            raise ValueError(f"bench.kvpress={self.kvpress} is no program; give the python of an environment in which kvpress is installed")


@dataclass(frozen=True)
class Figure:
    """One line of the result; `bound` is what we promise of it, "" where nothing is promised."""

    what: str
    value: str
    bound: str = ""


def runtime(model: PreTrainedModel, settings: BenchSettings) -> Iterator[Figure]:
    """The figures, each as soon as it is known."""
    yield from decoding(model, settings)
    if settings.kvpress:
        yield beside_kvpress(model, settings)
    yield selection(model, settings)
    yield chunked(model, settings)
    yield from batches(model, settings)


def decoding(model: PreTrainedModel, settings: BenchSettings) -> Iterator[Figure]:
    """Full cache, EvictionCache that keeps everything, and Ada-SnapKV's, decoding in turns."""
    policies = {"kept": None, "evicted": methods.policy("ada_snapkv", Ratio(settings.kept))}
    seconds, held = raced(model, tokens_of(model, 1, settings.num_tokens), policies, settings)
    full, kept, evicted = (seconds[name] / settings.steps * 1000 for name in ("full", "kept", "evicted"))
    at = f"at {settings.num_tokens:,} tokens"
    yield Figure(f"decode, DynamicCache {at}", f"{full:.1f} ms a token, holds {held['full'] / 2**20:.1f} MiB")
    yield Figure(f"decode, EvictionCache with nothing evicted {at}", f"{kept:.1f} ms, {kept / full:.2f} x DynamicCache", "at most 1.10 x")
    yield Figure(f"decode, Ada-SnapKV to {settings.kept:.0%} {at}", f"{evicted:.1f} ms, {full / evicted:.2f} x faster", "at least 1.35 x")
    yield Figure(
        "bytes, Ada-SnapKV", f"{held['evicted'] / 2**20:.1f} MiB, {held['evicted'] / held['full']:.1%} of DynamicCache", "at most 12%"
    )


def beside_kvpress(model: PreTrainedModel, settings: BenchSettings) -> Figure:
    """kvpress's Ada-SnapKV beside its own full cache, in a process of its own."""
    sizes = [str(x) for x in (settings.num_tokens, settings.steps, settings.turns, settings.kept)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        script = shutil.copy(kvpress_decode.__file__, folder)  # in its own folder it would take our inspect.py for Python's
        command = [settings.kvpress, script, folder, str(model.dtype).removeprefix("torch."), *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        problem = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise ValueError(f"bench.kvpress={settings.kvpress} ended with {done.returncode}: {problem}")
    said = (done.stdout.strip().splitlines() or ["nothing"])[-1]
    try:
        found = json.loads(said)
    except json.JSONDecodeError as error:
        raise ValueError(f"bench.kvpress={settings.kvpress} gave no figures but {said[:80]!r}; give the python that has kvpress") from error
    faster, held = found["full_ms"] / found["ms"], found["bytes"] / found["full_bytes"]
    value = f"{found['ms']:.1f} ms, {faster:.2f} x faster than its full cache, holds {held:.0%} of it"
    return Figure(f"decode, kvpress's Ada-SnapKV to {settings.kept:.0%} at {settings.num_tokens:,} tokens", value)


def selection(model: PreTrainedModel, settings: BenchSettings) -> Figure:
    """Scoring, selection and compaction of SnapKV within a prefill; the least share of a few."""
    ids, shares = tokens_of(model, 1, settings.num_tokens), []
    with attach(model):
        for _ in range(3):
            with stopwatch(Step, "observe") as spent:
                begin = now()
                prefill(model, ids, EvictionCache(methods.policy("snapkv", Ratio(settings.kept)), model))
                shares.append((sum(spent) / (now() - begin), sum(spent)))
    share, seconds = min(shares)
    what = f"SnapKV's scoring, selection, compaction at {settings.num_tokens:,} tokens"
    return Figure(what, f"{seconds * 1000:.0f} ms, {share:.1%} of prefill", "at most 3%")


def chunked(base: PreTrainedModel, settings: BenchSettings) -> Figure:
    """The most tokens that any head ever held while a long prompt came in chunks."""
    model, most = random_model(base, settings.stream), 0

    def watched(step: Step, state: LayerState, queries: Tensor, scale: float) -> None:
        nonlocal most
        most = max(most, int(state.held.lengths.max()))
        observe(step, state, queries, scale)

    observe = Step.observe
    cache = EvictionCache(methods.policy("snapkv", settings.stream_budget), model)
    with attach(model), mock.patch.object(Step, "observe", watched):
        for chunk in tokens_of(model, 1, settings.stream).split(settings.chunk, 1):
            prefill(model, chunk, cache)
    limit = settings.stream_budget + settings.chunk
    return Figure(f"peak of {settings.stream:,} positions in chunks of {settings.chunk}", f"{most:,} tokens per head", f"at most {limit:,}")


def batches(model: PreTrainedModel, settings: BenchSettings) -> Iterator[Figure]:
    """Tokens a second of a batch, full cache and evicted."""
    policies = {"evicted": methods.policy("ada_snapkv", Ratio(settings.kept))}
    seconds, _ = raced(model, tokens_of(model, settings.batch, settings.batch_tokens), policies, settings)
    full, evicted = (settings.batch * settings.steps / seconds[name] for name in ("full", "evicted"))
    what = f"decode, batch of {settings.batch} x {settings.batch_tokens:,}, Ada-SnapKV to {settings.kept:.0%}"
    yield Figure(what, f"{evicted:.0f} tokens/s, {evicted / full:.2f} x DynamicCache's {full:.0f}")


# ---- parts


def raced(
    model: PreTrainedModel, ids: Tensor, policies: Mapping[str, Policy | None], settings: BenchSettings
) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds of the fastest turn of decoding after the prompt `ids`, and bytes held after it, of "full" (DynamicCache) and each policy."""
    with attach(model):
        caches: dict[str, Cache] = {"full": prefill(model, ids, None)}
        for name, policy in policies.items():
            caches[name] = prefill(model, ids, EvictionCache(policy, model))
            caches[name].frozen = True  # what is decoded stays
        held = {name: bytes_of(cache) for name, cache in caches.items()}  # what is decoded comes on top, of every cache alike
        token = tokens_of(model, len(ids), 1)
        runs = {name: partial(decode, model, token, cache, settings.steps) for name, cache in caches.items()}
        return in_turns(runs, settings.turns), held


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor, cache: Cache) -> Cache:
    return model(ids, cache=cache, use_cache=True, logits_to_keep=1).past_key_values


@torch.no_grad()
def decode(model: PreTrainedModel, token: Tensor, cache: Cache, steps: int) -> None:
    for _ in range(steps):
        model(token, cache=cache)


def in_turns(contenders: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Seconds of each contender's fastest turn; the first turn of each only warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns + 1):
        for name, run in contenders.items():
            begin = now()
            run()
            seconds[name].append(now() - begin)
    return {name: min(each[1:]) for name, each in seconds.items()}


def now() -> float:
    """Seconds, once all that was asked of a GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def stopwatch(owner: type, name: str) -> Iterator[list[float]]:
    """Seconds that each call of a method took inside the block."""
    method, spent = getattr(owner, name), []

    def timed(*args: object) -> object:
        begin = now()
        try:
            return method(*args)
        finally:
            spent.append(now() - begin)

    with mock.patch.object(owner, name, timed):
        yield spent


def bytes_of(cache: Cache) -> int:
    if isinstance(cache, EvictionCache):
        return cache.nbytes()
    return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


def tokens_of(model: PreTrainedModel, rows: int, count: int) -> Tensor:
    """[rows, count] random tokens."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(10, vocabulary, (rows, count), generator=torch.Generator().manual_seed(0), device="cpu").to(model.device)


def random_model(model: PreTrainedModel, positions: int) -> PreTrainedModel:
    """Two layers of the model's kind with random weights, all of them evictable, that take so many positions."""
    torch.manual_seed(0)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.max_position_embeddings = 2, positions
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * 2
    made: Any = type(model)(config)
    return made.to(model.device, model.dtype).eval()
