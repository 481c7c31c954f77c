"""Train a gate: record what is missing, train on the traces, then show it beside the heuristics on held-out prompts.

python -m learnkv.train recipe=kvp
python -m learnkv.train recipe=paper/lookaheadkv dry=true               says what it would take, and ends
python -m learnkv.train recipe=kvp prompts=mine.jsonl name=mine         your own prompts: JSONL with context, question, answer
torchrun --nproc-per-node 2 -m learnkv.train recipe=kvp train.batch=2   two processes share the traces of every step
A stopped run goes on from its last checkpoint when the same command runs again; resume=never starts over.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
import yaml
from torch import distributed

from learnkv import config, reconstruction
from learnkv.capture import evictable_layers
from learnkv.checkpoint import save_gate
from learnkv.evaluation.compare import QUICK, quick_table, served
from learnkv.evaluation.reward import rewards
from learnkv.files import write_atomically
from learnkv.gates import GATES
from learnkv.gates.base import Gate
from learnkv.gates.probe_tokens import ProbeTokens
from learnkv.geometry import max_positions
from learnkv.locks import alone
from learnkv.methods import METHODS
from learnkv.models import DTYPES, BaseModel, PreTrainedModel, describe, load_model, refuse_long_contexts
from learnkv.names import unknown
from learnkv.observation import Scorer
from learnkv.outline import outline, recording_facts, refuse_unwritable, table, training_facts
from learnkv.places import EVENTS, LAST, RECIPE
from learnkv.prompts import Prompt, encode
from learnkv.prompts.prompt import Tokenizer
from learnkv.traces.dataset import TraceDataset
from learnkv.traces.measure import softmax_scales
from learnkv.traces.record import Plan, RecordSettings, make_prompts, place, plan_recording, record_plan, trace_folder
from learnkv.traces.targets import RECONSTRUCTIONS, TARGETS
from learnkv.training import TrainSettings, fit
from learnkv.training.fit import seconds_trained

BUDGETS = (0.5, 0.2, 0.1)  # of the last table
COMPRESSED = {  # what it is of: prompts are asked as they were recorded
    "outside": "compressed before the question is known",
    "inside": "compressed with the question in the prompt, all but its last token (record.question=inside)",
}


@dataclass
class TrainCommand:
    """What `python -m learnkv.train` reads."""

    recipe: str = "kvp"  # a shipped recipe, or a .yaml file
    model: str = "smollm2-135m"  # bundled name, hub id or folder
    method: str = "kvp"  # which gate
    prompts: str = ""  # your own prompts instead of record.kinds: JSONL with context, question, answer, or plain text
    name: str = ""  # of the run's folder in `runs`; the recipe's name without one
    runs: str = "checkpoints/runs"  # folder of the runs
    resume: Literal["auto", "never"] = "auto"  # auto goes on from the run's last checkpoint, never starts over
    table: int = 8  # held-out prompts that are answered for the last table, two questions of each at most; 0 leaves it out
    dry: bool = False  # says what it would take, sizes and counts; no weights are loaded, nothing runs and nothing is written
    record: RecordSettings = field(default_factory=RecordSettings)
    gate: dict[str, Any] = field(default_factory=dict)  # the gate's knobs, see its Config
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        if self.table < 0:
            raise ValueError(f"table={self.table} counts prompts; give 0 or more")
        if not (self.name or self.recipe):
            raise ValueError("a run without a recipe has no name to call its folder by; give name=...")
        if self.name in (".", "..") or Path(self.name).name != self.name:
            raise ValueError(f"name={self.name} is not the name of a folder inside runs={self.runs}; give a plain name")


def run(command: TrainCommand) -> None:
    gate_config = config_of(command)  # a mistake in it should not wait for the model
    refuse_lacking(command)
    command = replace(command, gate=asdict(cast(Any, gate_config)))
    folder = Path(command.runs) / (command.name or name_of(command.recipe))
    if command.dry:
        return dry_run(command, gate_config, folder)
    join_processes()
    if command.resume == "auto":
        refuse_other_recipe(folder, settled(command))
    model, tokenizer = load_model(command.model, DTYPES[command.record.dtype])
    if not command.prompts:
        refuse_long_contexts(model, "record.num_tokens", command.record.num_tokens)
    asked = make_prompts(command.record, tokenizer, command.prompts)
    refuse_one_sided([prompt.split for prompt in asked])
    plan = plan_recording(model, tokenizer, asked, trace_folder(model, command.record), command.record)
    plan.refuse_without_room()
    # opened after all that can be refused: resume=never deletes
    with open_run(command, folder) if place()[0] == 0 else nullcontext():
        if place()[0] == 0:
            announce(command, plan)
        traces = record_plan(plan, model, progress=True).reading(GATES[command.method].READS)
        gate = train(command, gate_config, traces, model, folder)
        if place()[0] == 0:
            save_gate(gate, folder, settled(command), seconds_trained(folder))
            conclude(command, model, tokenizer, asked, traces, gate, folder)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def name_of(recipe: str) -> str:
    """kvp -> kvp, paper/kvp -> paper-kvp, some/where/mine.yaml -> mine."""
    return Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe.replace("/", "-")


def config_of(command: TrainCommand) -> object:
    """The gate's knobs, checked."""
    if command.method not in GATES:
        raise unknown("method", command.method, GATES)
    return config.build(GATES[command.method].Config, command.gate, f"recipe {command.recipe}: gate")


def dry_run(command: TrainCommand, gate_config: object, folder: Path) -> None:
    """What recording and training would take; refuses what they would refuse."""
    if command.resume == "auto":
        refuse_other_recipe(folder, settled(command))
    refuse_unwritable(folder)
    found = outline(command.model, command.record, command.prompts)
    refuse_one_sided([job.split for job in found.plan.jobs])
    with torch.device("meta"):
        gate = new_gate(command, gate_config, describe(found.model))
    gate.meet(found.model)
    print(table(recording_facts(found) | training_facts(found, gate, command.train)))
    found.plan.refuse_without_room()


def refuse_lacking(command: TrainCommand) -> None:
    """Refuses a recipe whose traces lack what the method or the cuts read."""
    if command.train.cut == "recorded" and not command.record.cuts:
        raise ValueError("train.cut=recorded trains on cuts, which record.cuts=0 leaves out; give record.cuts=4")
    other = sorted(GATES[command.method].READS & (TARGETS.keys() | set(RECONSTRUCTIONS)))
    if command.train.cut == "recorded" and other:
        raise ValueError(
            f"train.cut=recorded knows of an earlier end what its tokens' utility was, {command.method} learns {', '.join(other)}; "
            "give train.cut=none or uniform"
        )
    lacking = sorted(GATES[command.method].READS - set(command.record.holds))
    if command.record.mode == "ids":  # what hangs on how the model is asked to repeat a context can't be recomputed without it
        lacking = [name for name in lacking if name in RECONSTRUCTIONS]
    if lacking:
        raise ValueError(
            f"{command.method} trains on {', '.join(lacking)}, which recipe {command.recipe} does not record (record.also="
            f"{command.record.also}); add it there, or take recipe={command.method}"
        )


def join_processes() -> None:
    """Meets the other processes where torchrun started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # the faster process waits at the end for the slower one's last prompts
        distributed.init_process_group(timeout=timedelta(days=1))


def settled(command: TrainCommand) -> dict[str, Any]:
    """The resolved recipe as plain values, without what has no part in the result."""
    values = cast(dict, yaml.safe_load(config.dump(command)))
    return {key: value for key, value in values.items() if key not in ("resume", "runs", "name", "table", "dry")}


def refuse_other_recipe(folder: Path, wanted: dict[str, Any]) -> None:
    """Refuses a folder whose checkpoint is another recipe's."""
    if not (folder / LAST).exists():
        return
    path = folder / RECIPE
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, FileNotFoundError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is missing, truncated or was edited, so {LAST} beside it can't be gone on from; resume=never starts over")
    there, asked = config.flat(found), config.flat(wanted)
    for key in sorted(asked | {key: None for key in there if key.startswith("gate.")}):
        if there.get(key) != asked.get(key):
            raise ValueError(
                f"{path} has {key}={there.get(key)}, this run {key}={asked.get(key)}; give another name=..., or resume=never to start over"
            )


@contextmanager
def open_run(command: TrainCommand, folder: Path) -> Iterator[None]:
    """The run's folder with its recipe, held for this run; without what an earlier one left to go on from, where this one starts over."""
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder, "training into"):
        if command.resume == "auto":
            refuse_other_recipe(folder, settled(command))  # another run may have ended here meanwhile
        if command.resume == "never":
            for stale in (folder / LAST, folder / RECIPE):
                refuse_folder(stale)
                stale.unlink(missing_ok=True)
            shutil.rmtree(folder / EVENTS, ignore_errors=True)
        write_atomically(folder / RECIPE, lambda to: to.write_text(config.dump(command)))
        yield


def refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder, where this command keeps a file; move it away, or give another name=...")


def refuse_one_sided(sides: list[str]) -> None:
    """Said before an hour of recording, not after it."""
    for split in ("train", "heldout"):
        if split not in sides:
            raise ValueError(
                f"none of the {len(sides)} prompts is of the {split} side, and training needs both: give record.train and record.heldout "
                "1 or more, or 10 or more prompts of your own, of which every tenth is held out"
            )


def announce(command: TrainCommand, plan: Plan) -> None:
    print(f"model: {command.model}, {command.record.dtype}")
    print(f"traces: {plan.folder}, {len(plan.jobs) - len(plan.missing)} there, {len(plan.missing)} to record", flush=True)


def train(command: TrainCommand, gate_config: object, traces: TraceDataset, model: PreTrainedModel, folder: Path) -> Gate:
    """The trained gate."""
    gate = new_gate(command, gate_config, describe(model))
    gate.meet(model)
    training, heldout = traces.split("train"), traces.split("heldout")
    if gate.LEARNS_FROM_IDS and command.train.cut != "recorded":
        training = training.ids_only()
    if place()[0] == 0:
        size = sum(p.numel() for p in gate.parameters())
        print(f"gate: {command.method}, {size:,} weights, {command.train.steps} steps of {command.train.batch} traces")
        print(f"split: {len(training)} training and {len(heldout)} held-out traces")
        print(f"watch: tensorboard --logdir {folder}", flush=True)
    began = time.monotonic()
    gate = fit(gate, training, heldout, folder, command.train, resume=command.resume == "auto")
    if place()[0] == 0:
        print(f"trained in {time.monotonic() - began:.0f} s", flush=True)
    return gate


def new_gate(command: TrainCommand, gate_config: object, base: BaseModel) -> Gate:
    """A gate with fresh weights; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(command.train.seed)
        try:
            return GATES[command.method](gate_config, base)
        except RuntimeError as error:  # torch's own for what memory can't hold
            why = str(error).splitlines()[0]
            raise ValueError(f"a {command.method} gate of these sizes can't be made ({why}); give smaller ones") from error


def conclude(
    command: TrainCommand,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    asked: list[Prompt],
    traces: TraceDataset,
    gate: Gate,
    folder: Path,
) -> None:
    """The held-out tables, where everything lies, and what comes next."""
    gate = gate.bind(model)
    print("\n" + reward_table(gate, traces.split("heldout"), model) + "\n", flush=True)
    heldout = [prompt for prompt in asked if prompt.split == "heldout" and repeatable(prompt, tokenizer, model, gate)][: command.table]
    prompts = [replace(prompt, questions=prompt.questions[:2]) for prompt in heldout]
    if command.table and not prompts:
        print("no table of answers: each held-out prompt is too long to be repeated, which kvzip in it does\n")
    if prompts:
        kinds = Counter(prompt.kind for prompt in prompts)
        print(f"answers to {len(prompts)} held-out prompts ({', '.join(kinds)}), {COMPRESSED[command.record.question]}", flush=True)
        print(quick_table(model, tokenizer, prompts, gate, BUDGETS, command.record.question) + "\n")
    print(f"gate: {folder}\ntraces: {traces.folder}\nTensorBoard: tensorboard --logdir {folder}")
    print(f"next: python -m {next_command(command, gate, folder)}")


def repeatable(prompt: Prompt, tokenizer: Tokenizer, model: PreTrainedModel, gate: Gate) -> bool:
    """Whether the model has positions for what runs after a prompt in the table: KVzip's passes, and the gate's own rows."""
    encoded = encode(tokenizer, prompt, prompt.questions[0])
    ids = torch.cat([encoded.context, encoded.question])
    passes = reconstruction.repetitions(ids, *reconstruction.instructions(tokenizer))
    rows = max(*(len(probe.rows) for probe in passes), len(gate.tokens) if isinstance(gate, ProbeTokens) else 0)
    return len(ids) + rows <= max_positions(model)


def next_command(command: TrainCommand, gate: Gate, folder: Path) -> str:
    """What shows the gate at work: asked as it was recorded, with the budget split as its method is served."""
    if command.record.question == "inside":
        return f"learnkv.evaluate model={command.model} gate={folder} evaluate.question=inside evaluate.count=20"
    rule = "+adaptive" if served(gate)[0].allocator == "uniform" else ""
    return f"learnkv.generate model={command.model} method={gate.METHOD}{rule}:{folder} compare=true"


def reward_table(gate: Gate, heldout: TraceDataset, model: PreTrainedModel) -> str:
    """One line per method: mean normalised reward over heads and held-out traces."""
    scorers: dict[str, Scorer] = {gate.METHOD: gate}
    scorers |= {name: METHODS[name].build({}) for name in QUICK if name != "oracle"}
    scales = softmax_scales(model, evictable_layers(model))
    found = {name: float(reward.mean()) for name, reward in rewards(scorers, heldout, scales).items()}
    found["oracle"] = -1.0
    width = max(len(name) for name in found)
    lines = [f"{name:<{width}}  {value:8.2f}" for name, value in sorted(found.items(), key=lambda item: -item[1])]
    return "\n".join([f"normalised reward on {len(heldout)} held-out traces, mean over heads (the oracle's is -1)", *lines])


if __name__ == "__main__":
    sys.exit(config.main(run, TrainCommand))
