"""What recording and training will take, from the recipe and the model's configuration alone: sizes and counts; nothing runs."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from learnkv import prompts
from learnkv.counts import size
from learnkv.gates.base import Gate
from learnkv.geometry import max_positions
from learnkv.models import DTYPES, PreTrainedModel, describe, load_architecture, refuse_long_contexts
from learnkv.prompts import Prompt
from learnkv.reconstruction import CHUNK_SIZE, ONWARD, OVERLAP, WHOLE
from learnkv.traces.format import Continuation, Trace
from learnkv.traces.record import (
    Plan,
    RecordSettings,
    bytes_needed,
    free_bytes,
    one_by_one,
    own_prompts,
    refuse_beyond,
    trace_bytes,
    trace_config,
    wanted,
)
from learnkv.training import TrainSettings

CHARS = 4  # of a text, taken for a token: there need not be a tokenizer
TEMPLATE = 16  # tokens that a chat template puts behind a question


@dataclass(frozen=True)
class Outline:
    """A recording as it can be known without weights and tokenizer.

    model  on the meta device
    plan   every context as long as the recipe asks for, no trace there yet
    """

    model: PreTrainedModel
    plan: Plan

    @property
    def num_weights(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def num_positions(self) -> float:
        return max_positions(self.model)

    def jobs(self, split: str) -> list[Trace]:
        return [job for job in self.plan.jobs if job.split == split]


def outline(model_name: str, settings: RecordSettings, path: str = "") -> Outline:
    """The outline of `plan_recording`; raises ValueError as that does for what is wrong with the recipe or the model."""
    refuse_unwritable(Path(settings.folder))
    model = load_architecture(model_name, DTYPES[settings.dtype])
    if not path:
        refuse_long_contexts(model, "record.num_tokens", settings.num_tokens)
    jobs = jobs_of(settings, path)
    if not path:
        refuse_long(model, jobs, settings)
    config, folder = trace_config(model, settings), Path(settings.folder)
    needed = bytes_needed([trace_bytes(config, settings, job) for job in jobs], settings)
    return Outline(model, Plan(folder, config, settings, jobs, frozenset(job.id for job in jobs), needed, free_bytes(folder)))


def refuse_unwritable(folder: Path) -> None:
    """Raises a ValueError where no such folder could be made or written into."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file, where a folder should be made; give another path")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{there} can't be written into; give another path")


def refuse_long(model: PreTrainedModel, jobs: list[Trace], settings: RecordSettings) -> None:
    """Refuses contexts that leave the model no positions for what follows them."""
    limit = max_positions(model)
    for job in jobs:
        after = [len(asked.question) + num_answer(asked, settings) for asked in job.questions]
        rows = [count(ONWARD) + OVERLAP + min(len(job.ids), CHUNK_SIZE)] if settings.repeats else []
        refuse_beyond(limit, f"a prompt of kind {job.kind}", len(job.ids), max(after + rows))


def jobs_of(settings: RecordSettings, path: str) -> list[Trace]:
    """One Trace per prompt, whose ids and texts have a length and no content."""
    if path:
        own = {prompt.id: prompt for prompt in own_prompts(path)}
        sized = [(count(prompt.context), prompt) for prompt in own.values()]
    else:
        sized = [
            (size, prompt)
            for split, number, size in wanted(settings)
            for prompt in prompts.drafts(settings.kinds, split=split, count=number, num_tokens=size, seed=settings.seed)
        ]
    if settings.question == "inside":
        sized = [(size, one) for size, prompt in sized for one in one_by_one([prompt])]
    # named by their place: drafts may be equal where the prompts are not
    return [job_of(str(i), prompt, size, settings) for i, (size, prompt) in enumerate(sized)]


def job_of(name: str, prompt: Prompt, num_context: int, settings: RecordSettings) -> Trace:
    """The prompt as `bare_trace` makes it, in lengths."""
    inside = settings.question == "inside"
    questions = [TEMPLATE + count(asked.text + asked.prefix) if prompt.chat else count(asked.prefix) for asked in prompt.questions]
    asked = [
        Continuation(empty(1 if inside else question), empty(count(asked.answer)), empty(0))
        for question, asked in zip(questions, prompt.questions, strict=True)
    ]
    whole, onward = (empty(count(text)) if settings.repeats else None for text in (WHOLE, ONWARD))
    return Trace(
        name,
        prompt.kind,
        prompt.split,
        empty(num_context + (questions[0] - 1 if inside else 0)),
        asked,
        repeat_whole=whole,
        repeat_onward=onward,
    )


def count(text: str) -> int:
    """Tokens of a text, roughly."""
    return -(-len(text) // CHARS)


def empty(length: int) -> Tensor:
    return torch.empty(length, dtype=torch.int64, device="meta")


# ---- tokens that the model runs


def recorded_tokens(job: Trace, settings: RecordSettings) -> int:
    """To record the trace."""
    answering = sum(len(asked.question) + settings.max_new_tokens for asked in job.questions) if settings.future == "response" else 0
    if settings.mode == "ids":
        return len(job.ids) + answering if answering else 0
    return measured_tokens(job, settings) + answering


def measured_tokens(job: Trace, settings: RecordSettings) -> int:
    """To compute what the trace holds once its tokens are known."""
    rows = len(job.ids) + -(-len(job.ids) // CHUNK_SIZE) * (count(ONWARD) + OVERLAP) if settings.repeats else 0
    return len(job.ids) + continued_tokens(job, settings) + rows


def continued_tokens(job: Trace, settings: RecordSettings) -> int:
    """Of all questions and what follows them."""
    return sum(len(asked.question) + num_answer(asked, settings) for asked in job.questions)


def num_answer(asked: Continuation, settings: RecordSettings) -> int:
    return settings.max_new_tokens if settings.future == "response" else len(asked.answer)


def trained_tokens(found: Outline, gate: Gate, train: TrainSettings) -> int:
    """To train the gate: by its loss, and to compute traces again of which token ids only are stored."""
    settings, training, heldout = found.plan.settings, found.jobs("train"), found.jobs("heldout")
    again = {job.id: measured_tokens(job, settings) if settings.mode == "ids" else 0 for job in found.plan.jobs}
    sequences = [min(len(job.ids) + continued_tokens(job, settings), found.num_positions) for job in training]
    steps = sum(again[job.id] + gate.model_tokens(int(n)) for job, n in zip(training, sequences, strict=True)) / len(training)
    evaluations = -(-train.steps // train.eval_every)
    return int(train.steps * train.batch * steps) + evaluations * sum(again[job.id] for job in heldout)


# ---- in words


def recording_facts(found: Outline) -> dict[str, str]:
    """What there is to record, a line by its name."""
    plan, base = found.plan, describe(found.model)
    settings, kinds = plan.settings, Counter(job.kind for job in plan.jobs)
    heads = f"{base.num_layers} evictable layers x {base.num_kv_heads} KV heads of {base.head_dim} dimensions"
    return {
        "model": f"{base.name}, {settings.dtype}, {found.num_weights:,} weights, {heads}",
        "prompts": f"{len(plan.jobs):,} of {len(kinds)} kinds, {len(found.jobs('heldout')):,} of them held out",
        "contexts": f"{plan.num_tokens:,} tokens, at most",
        "disk": f"{size(plan.bytes_new)} at most in {plan.folder} (mode {settings.mode}), {size(plan.bytes_free)} free",
        "recording": work(found, sum(recorded_tokens(job, settings) for job in plan.jobs)),
    }


def training_facts(found: Outline, gate: Gate, train: TrainSettings) -> dict[str, str]:
    """What there is to train, likewise."""
    epochs = train.steps * train.batch / len(found.jobs("train"))
    return {
        "gate": f"{gate.METHOD}, {sum(p.numel() for p in gate.parameters()):,} weights",
        "steps": f"{train.steps:,} of {train.batch} traces, {epochs:.1f} times each",
        "training": work(found, trained_tokens(found, gate, train)),
    }


def work(found: Outline, num_tokens: int) -> str:
    if not num_tokens:
        return "the model does not run"
    return f"{num_tokens:,} tokens through the model, roughly {2 * found.num_weights * num_tokens:.0e} FLOPs (2 x weights x tokens)"


def table(facts: dict[str, str]) -> str:
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())
