"""Record traces: full-cache passes over prompts, with the attention that each cached token received later.

python -m learnkv.record recipe=kvp
python -m learnkv.record recipe=kvp dry=true                    says what it would take, and ends
python -m learnkv.record recipe=kvp prompts=mine.jsonl          your own prompts: JSONL with context, question, answer, or plain text
torchrun --nproc-per-node 2 -m learnkv.record recipe=kvp        two processes share the prompts
A stopped recording goes on at the next prompt when the same command runs again.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

from torch import distributed

from learnkv import config
from learnkv.counts import size
from learnkv.models import DTYPES, load_model, refuse_long_contexts
from learnkv.outline import outline, recording_facts, table
from learnkv.traces.dataset import TraceDataset
from learnkv.traces.record import Plan, RecordSettings, make_prompts, place, plan_recording, record_plan, trace_folder


@dataclass
class RecordCommand:
    """What `python -m learnkv.record` reads."""

    recipe: str = "kvp"  # a shipped recipe, or a .yaml file
    model: str = "smollm2-135m"  # bundled name, hub id or folder
    prompts: str = ""  # your own prompts instead of record.kinds: JSONL with context, question, answer, or plain text
    dry: bool = False  # says what it would take, sizes and counts; no weights are loaded, nothing runs and nothing is written
    record: RecordSettings = field(default_factory=RecordSettings)


def run(command: RecordCommand) -> None:
    if command.dry:
        return dry_run(command)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # the faster process waits at the end for the slower one's last prompts
        distributed.init_process_group("gloo", timeout=timedelta(days=1))
    settings = command.record
    model, tokenizer = load_model(command.model, DTYPES[settings.dtype])
    if not command.prompts:
        refuse_long_contexts(model, "record.num_tokens", settings.num_tokens)
    asked = make_prompts(settings, tokenizer, command.prompts)
    plan = plan_recording(model, tokenizer, asked, trace_folder(model, settings), settings)
    if place()[0] == 0:
        announce(command, plan)
    traces = record_plan(plan, model, progress=True)
    if place()[0] == 0:
        conclude(command, traces)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def dry_run(command: RecordCommand) -> None:
    """What recording would take; refuses what it would refuse."""
    found = outline(command.model, command.record, command.prompts)
    print(table(recording_facts(found)))
    found.plan.refuse_without_room()


def announce(command: RecordCommand, plan: Plan) -> None:
    """What will run, and what it will take."""
    kinds = Counter(job.kind for job in plan.jobs)
    print(f"model: {command.model}, {command.record.dtype}")
    print(f"prompts: {len(plan.jobs)} of {len(kinds)} kinds ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})")
    print(f"folder: {plan.folder}")
    print(f"there already: {len(plan.jobs) - len(plan.missing)} traces")
    print(f"to record: {len(plan.missing)} traces, {plan.num_tokens} context tokens, mode {command.record.mode}")
    print(f"disk: {size(plan.bytes_new)} at most, {size(plan.bytes_free)} free; time: the bar says it after the first trace", flush=True)


def conclude(command: RecordCommand, traces: TraceDataset) -> None:
    """Where the result lies, and what comes next."""
    splits = Counter(str(row["split"]) for row in traces.rows)
    counts = ", ".join(f"{count} {split}" for split, count in sorted(splits.items()))
    print(f"recorded: {counts}, {size(sum(row['bytes'] for row in traces.rows))}")
    print(f"traces: {traces.folder}")
    print(f"next: python -m learnkv.train {config.arguments(command)}")


if __name__ == "__main__":
    sys.exit(config.main(run, RecordCommand))
