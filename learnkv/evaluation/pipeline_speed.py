"""Speed of recording beside a plain forward, and of training all heads at once beside one agent after another."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from learnkv.evaluation.speed import Figure, in_turns
from learnkv.gates import GATES
from learnkv.gates.base import Batch, Gate
from learnkv.models import BaseModel, PreTrainedModel
from learnkv.prompts.prompt import Tokenizer
from learnkv.traces.format import Trace
from learnkv.traces.record import Plan, RecordSettings, make_prompts, plan_recording, record_one, record_plan, trace_bytes
from learnkv.training import TrainSettings


@dataclass
class PipelineSettings:
    """Sizes of the measurements."""

    traces: int = 4  # prompts recorded, and traces of a training step
    num_tokens: int = 750  # of each
    turns: int = 3  # of each contender; the fastest counts

    def __post_init__(self) -> None:
        for name in ("traces", "num_tokens", "turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"pipeline.{name}={getattr(self, name)} must be 1 or more")


def recording(model: PreTrainedModel, tokenizer: Tokenizer, settings: PipelineSettings) -> Iterator[Figure]:
    """Tokens a second of what `learnkv.record` does to a prompt, and bytes that it leaves."""
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(model, tokenizer, settings, folder)
        fed = [
            torch.cat([job.ids, *(torch.cat([q.question, q.answer]) for q in job.questions)])[None].to(model.device) for job in plan.jobs
        ]
        runs = {
            "forward": lambda: [model(ids, use_cache=False, logits_to_keep=1) for ids in fed],
            "record": lambda: [record_one(model, job, plan.settings) for job in plan.jobs],
        }
        with torch.no_grad():
            seconds = in_turns(runs, settings.turns)
        tokens, stored = sum(len(job.ids) for job in plan.jobs), sum(trace_bytes(plan.config, plan.settings, job) for job in plan.jobs)
    rate = {name: tokens / found for name, found in seconds.items()}
    what = f"{len(plan.jobs)} prompts of {settings.num_tokens} tokens"
    yield Figure(f"plain forward, {what}", f"{rate['forward']:.0f} tokens/s")
    yield Figure(f"recording, {what}", f"{rate['record']:.0f} tokens/s, {seconds['record'] / seconds['forward']:.2f} x a forward's time")
    yield Figure("stored", f"{stored / tokens / 2**10:.1f} KiB a token, mode {plan.settings.mode}")


def training(
    model: PreTrainedModel, tokenizer: Tokenizer, method: str, gate_config: object, train: TrainSettings, settings: PipelineSettings
) -> Iterator[Figure]:
    """Milliseconds of a training step of all heads at once, beside what it can be compared with.

    That is as many gates of one head one after another; or, of a gate whose step runs the model, which one head can't, a plain forward
    of the traces.
    """
    with tempfile.TemporaryDirectory() as folder:
        dataset = record_plan(plan_of(model, tokenizer, settings, folder, sorted(GATES[method].READS)), model)
        traces, base = [dataset[i] for i in range(len(dataset))], dataset.base_model
        runs = {"together": step_of(GATES[method](gate_config, base), model, traces, train)}
        if GATES[method].meet is Gate.meet:
            heads = [first_head(trace, base) for trace in traces]
            runs["alone"] = step_of(GATES[method](gate_config, one_head(base)), model, heads, train)
        else:
            runs["forward"] = partial(forward, model, traces)
        seconds = in_turns(runs, settings.turns)
    yield from training_figures(seconds, base, f"training step of {method}, {len(traces)} traces of {settings.num_tokens} tokens", traces)


def training_figures(seconds: dict[str, float], base: BaseModel, what: str, traces: list[Trace]) -> Iterator[Figure]:
    """The step of all heads, and what it is beside."""
    heads, tokens, together = base.num_layers * base.num_kv_heads, sum(len(trace.ids) for trace in traces), seconds["together"]
    yield Figure(f"{what}, all {heads} heads", f"{together * 1000:.0f} ms, {tokens * heads / together / 1e6:.2f} M scored tokens/s")
    if "alone" in seconds:
        separate = seconds["alone"] * heads
        yield Figure(f"{what}, one agent {heads} times", f"{separate * 1000:.0f} ms, {separate / together:.1f} x all at once")
    else:
        plain = seconds["forward"]
        yield Figure(f"{what}, a plain forward of them", f"{plain * 1000:.0f} ms, the step takes {together / plain:.2f} x its time")


def step_of(gate: Gate, model: PreTrainedModel, traces: list[Trace], train: TrainSettings) -> Callable[[], None]:
    """The step of a fresh gate on the model's device, ready to run."""
    gate = gate.to(model.device)
    gate.meet(model)
    gate.prepare(traces)
    return partial(step, gate, Batch(traces, train.seed, 0))


@torch.no_grad()
def forward(model: PreTrainedModel, traces: list[Trace]) -> None:
    """The model over each context."""
    for trace in traces:
        model(trace.ids[None].to(model.device), use_cache=False, logits_to_keep=1)


def plan_of(model: PreTrainedModel, tokenizer: Tokenizer, settings: PipelineSettings, folder: str, also: Sequence[str] = ()) -> Plan:
    """What the default recipe would record of so many prompts, and what `also` names."""
    dtype = str(model.dtype).removeprefix("torch.")
    size = {"train": settings.traces, "heldout": 0, "num_tokens": [settings.num_tokens]}
    record = RecordSettings(**size, dtype=dtype, also=list(also))  # type: ignore[arg-type]
    return plan_recording(model, tokenizer, make_prompts(record, tokenizer), Path(folder) / "traces", record)


def step(gate: Gate, batch: Batch) -> None:
    """Loss and gradients of one batch."""
    gate.zero_grad()
    gate.loss(batch)["loss"].backward()


def one_head(base: BaseModel) -> BaseModel:
    """The model with its first KV head of its first layer alone."""
    return replace(base, num_layers=1, num_kv_heads=1, num_query_heads=base.num_query_heads // base.num_kv_heads)


def first_head(trace: Trace, base: BaseModel) -> Trace:
    """What a trace says of that head; of fields that all heads of a layer share, the layer's."""
    group = base.num_query_heads // base.num_kv_heads
    heads = {"keys": 1, "values": 1, "mass": 1, "queries": group, "queries_pre_rope": group}
    taken = {name: x[:1, : heads.get(name)] for name in (*heads, "hidden", "block_input") if (x := getattr(trace, name)) is not None}
    return replace(trace, **taken, targets={name: x[..., :1, :1, :] if x.ndim > 2 else x for name, x in trace.targets.items()})
