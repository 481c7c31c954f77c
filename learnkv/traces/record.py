"""Recording: prompts in, a folder of traces out; stopped at any moment it goes on at the next prompt to the same bytes."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import distributed
from tqdm import tqdm

from learnkv import prompts, reconstruction
from learnkv.counts import size
from learnkv.geometry import max_positions
from learnkv.locks import alone
from learnkv.models import DTYPES, PreTrainedModel, describe
from learnkv.names import unknown
from learnkv.places import PARTS
from learnkv.prompts import Prompt
from learnkv.prompts.haystack import Split
from learnkv.prompts.kinds import TRAIN_KINDS
from learnkv.prompts.prompt import Encoded, Tokenizer, asked_inside, encode
from learnkv.traces import format
from learnkv.traces.dataset import TraceDataset
from learnkv.traces.format import Continuation, Trace, TraceConfig
from learnkv.traces.measure import ALSO, WINDOW, measure, respond
from learnkv.traces.targets import RECONSTRUCTIONS, TARGETS, Future, OverQuestions

FULL = ("queries", "hidden")  # what mode=full means


@dataclass
class RecordSettings:
    """Which prompts are recorded, and what of them."""

    folder: str = "data/traces"  # each model and choice of settings gets a folder of its own in it
    kinds: list[str] = field(default_factory=lambda: list(TRAIN_KINDS))  # kinds of prompts, in turn
    train: int = 160  # training prompts of each size
    heldout: int = 32  # held-out prompts of each size
    num_tokens: list[int] = field(default_factory=lambda: [750])  # sizes of the contexts, tokens
    seed: int = 0  # of the prompts
    mode: Literal["ids", "targets", "full"] = (
        "targets"  # stored: token ids (rest recomputed when read), + K, V, targets, + queries, hidden states
    )
    future: Future = (
        "question_answer"  # whose attention is the utility: question_answer, answer (its rows alone), response (the model's own)
    )
    also: list[str] = field(default_factory=list)  # what else a trace holds: names in learnkv.traces.measure.ALSO
    question: Literal["outside", "inside"] = "outside"  # inside: the one question is part of the context, all but its last token
    over_questions: OverQuestions = "sum"  # of one context's several questions: their utilities added, or the largest of them
    max_new_tokens: int = 64  # length of the model's own response, for future=response
    cuts: int = 0  # earlier ends of the context that get a utility too (arXiv:2602.10238, Alg. 1)
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the model while it is recorded
    shard_mib: int = 256  # a shard is closed once it holds as much

    def __post_init__(self) -> None:
        for name, least in (("train", 0), ("heldout", 0), ("max_new_tokens", 1), ("cuts", 0), ("shard_mib", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"record.{name}={getattr(self, name)} is below {least}; give {least} or more")
        for name in ("kinds", "num_tokens"):
            if not getattr(self, name):
                raise ValueError(f"record.{name} is empty, so there is nothing to record; give one or more")
        if self.train + self.heldout == 0:
            raise ValueError("record.train=0 and record.heldout=0 leave nothing to record; give 1 or more of one of them")
        for name in self.also:
            if name not in ALSO:
                raise unknown("record.also", name, ALSO)

    def content(self) -> dict[str, object]:
        """What decides the content of a trace, given its prompt and model: recipes that agree here share traces."""
        some: dict[str, object] = {"max_new_tokens": self.max_new_tokens} if self.future == "response" else {}
        some |= {"question": self.question} if self.question != "outside" else {}
        some |= {"also": self.holds} if self.holds else {}
        return some | {
            "mode": self.mode,
            "future": self.future,
            "over_questions": self.over_questions,
            "cuts": self.cuts,
            "dtype": self.dtype,
            "targets": ["utility"],
        }

    @property
    def holds(self) -> list[str]:
        """Names in ALSO of what each trace holds."""
        return sorted({*self.also, *(FULL if self.mode == "full" else ())})

    @property
    def repeats(self) -> bool:
        """Whether a recording has the model repeat each context."""
        return not set(RECONSTRUCTIONS).isdisjoint(self.holds)


# ---- which prompts, and where


def make_prompts(settings: RecordSettings, tokenizer: Tokenizer, path: str = "") -> list[Prompt]:
    """The recipe's generated prompts, training ones first; or those of the user's file, every tenth context of them held out.

    With the question inside the context, each question makes a prompt of its own.
    """
    made = own_prompts(path) if path else generated_prompts(settings, tokenizer)
    return made if settings.question == "outside" else one_by_one(made)


def one_by_one(made: list[Prompt]) -> list[Prompt]:
    """A prompt of its own for each question."""
    return [replace(prompt, questions=(asked,)) for prompt in made for asked in prompt.questions]


def own_prompts(path: str) -> list[Prompt]:
    """The prompts of a user's file; equal contexts stay on one side."""
    own = prompts.load_prompts(path)
    contexts = {context: i for i, context in enumerate(dict.fromkeys(prompt.context for prompt in own))}
    return [replace(prompt, split="heldout" if contexts[prompt.context] % 10 == 9 else "train") for prompt in own]


def generated_prompts(settings: RecordSettings, tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts of the recipe's kinds and sizes."""
    return [
        prompt
        for split, count, size in wanted(settings)
        for prompt in prompts.make(settings.kinds, split=split, count=count, num_tokens=size, tokenizer=tokenizer, seed=settings.seed)
    ]


def wanted(settings: RecordSettings) -> list[tuple[Split, int, int]]:
    """(split, prompts, tokens of the context) of each batch of generated prompts."""
    counts: list[tuple[Split, int]] = [("train", settings.train), ("heldout", settings.heldout)]
    return [(split, count, size) for split, count in counts for size in settings.num_tokens]


def trace_config(model: PreTrainedModel, settings: RecordSettings) -> TraceConfig:
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return TraceConfig(describe(model), dict(rope), settings.content())


def trace_folder(model: PreTrainedModel, settings: RecordSettings) -> Path:
    """Where the traces of this model with these settings lie, whichever recipe asked for them: <folder>/<model>-<mode>-<hash>.

    A folder that is there already and holds all that these settings ask for, and more, is as good.
    """
    config = trace_config(model, settings)
    own = own_folder(config, settings)
    if (own / format.CONFIG).exists():
        return own
    others = sorted(path.parent for path in Path(settings.folder).glob(f"*/{format.CONFIG}"))
    return next((folder for folder in others if covers(folder, config)), own)


def covers(folder: Path, wanted: TraceConfig) -> bool:
    """Whether the folder's traces hold what these settings would record, and more."""
    try:
        found = format.read_config(folder)
    except ValueError:  # another format, or edited: not ours to judge here
        return False
    return same_model(found, wanted) and not lacks(found.settings, wanted.settings)


def same_model(found: TraceConfig, wanted: TraceConfig) -> bool:
    return replace(found.base_model, name=wanted.base_model.name) == wanted.base_model and found.rope == wanted.rope


def lacks(found: dict, wanted: dict) -> list[tuple[str, object, object]]:
    """(name, found, wanted) of the settings that differ; traces that hold more than is asked for do not."""
    both = settings_side_by_side(found, wanted)
    same = [holds_all(there or [], asked or []) if name == "also" else there == asked for name, there, asked in both]
    return [each for each, is_same in zip(both, same, strict=True) if not is_same]


def holds_all(there: object, asked: object) -> bool:
    """Whether a list out of a file holds all of another; one that was edited into something else holds nothing."""
    return isinstance(asked, list) and isinstance(there, list) and all(name in there for name in asked)


def own_folder(config: TraceConfig, settings: RecordSettings) -> Path:
    """Where traces of these very settings lie."""
    name = re.sub(r"[^\w.-]+", "-", config.base_model.name).strip("-.") or "model"
    key = json.dumps([config.base_model.weights_hash, config.rope, config.settings, config.format_version], sort_keys=True)
    return Path(settings.folder) / f"{name}-{settings.mode}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


# ---- the plan: everything that can be known, and refused, before the model runs


@dataclass(frozen=True)
class Plan:
    """What is to be recorded, and what is there already.

    jobs         one Trace per prompt, token ids only
    missing      ids of those that no complete shard or part holds yet
    bytes_new    what they will take on disk, the copy that is made while a shard is packed included
    bytes_free   what the disk has
    """

    folder: Path
    config: TraceConfig
    settings: RecordSettings
    jobs: list[Trace]
    missing: frozenset[str]
    bytes_new: int
    bytes_free: int

    @property
    def num_tokens(self) -> int:
        """Context tokens still to run."""
        return sum(len(job.ids) for job in self.jobs if job.id in self.missing)

    def refuse_without_room(self) -> None:
        if self.bytes_new > self.bytes_free:
            need, free = size(self.bytes_new), size(self.bytes_free)
            advice = "free some, record fewer, or use record.mode=ids"
            raise ValueError(f"{len(self.missing)} traces need {need} in {self.folder}, its disk has {free} free; {advice}")


def plan_recording(
    model: PreTrainedModel, tokenizer: Tokenizer, asked: Iterable[Prompt], folder: str | Path, settings: RecordSettings
) -> Plan:
    """Tokens of every prompt, checked, and what of them is missing in `folder`; runs and writes nothing."""
    folder, config = Path(folder), trace_config(model, settings)
    if str(model.dtype) != str(DTYPES[settings.dtype]):
        raise ValueError(f"record.dtype={settings.dtype}, but the model was loaded in {model.dtype}; load it in the recipe's type")
    if (folder / format.CONFIG).exists():
        found = format.read_config(folder)
        check_same(folder, found, config)
        config, settings = found, replace(settings, also=cast(list, found.settings.get("also", [])))
    limit = max_positions(model)
    jobs = {
        prompt.id: bare_trace(tokenizer, prompt, f"prompt {i} (id {prompt.id}, kind {prompt.kind})", settings, limit)
        for i, prompt in enumerate(asked)
    }
    there = {row["id"] for row in format.shard_rows(folder)} | {path.stem for path in (folder / PARTS).glob("*.safetensors")}
    missing = frozenset(jobs) - there
    sizes = [trace_bytes(config, settings, job) for job in jobs.values() if job.id in missing]
    return Plan(folder, config, settings, list(jobs.values()), missing, bytes_needed(sizes, settings), free_bytes(folder))


def bytes_needed(sizes: list[int], settings: RecordSettings) -> int:
    """On disk by traces of these sizes, while they are packed."""
    return sum(sizes) + min(sum(sizes), (settings.shard_mib << 20) + max(sizes, default=0))


def check_same(folder: Path, found: TraceConfig, wanted: TraceConfig) -> None:
    """Raises ValueError where the folder's traces are not what these settings would record."""
    format.check_model(folder, found.base_model, wanted.base_model)
    rope = [("rope", found.rope, wanted.rope)] if found.rope != wanted.rope else []
    for what, there, asked in (*rope, *lacks(found.settings, wanted.settings)):
        raise ValueError(f"{folder} holds traces with {what}={there}, this recipe asks for {what}={asked}; record into another folder")


def settings_side_by_side(found: dict, wanted: dict) -> list[tuple[str, object, object]]:
    return [(name, found.get(name), wanted.get(name)) for name in sorted(found.keys() | wanted.keys())]


def bare_trace(tokenizer: Tokenizer, prompt: Prompt, record: str, settings: RecordSettings, limit: float) -> Trace:
    """The prompt's tokens as a trace without tensors; what can't be recorded is refused, `record` saying which one it is."""
    encoded = encode_questions(tokenizer, prompt, record, settings)
    if not prompt.context.strip() or len(encoded[0].context) < 2:
        raise ValueError(f"{record} has a context of {len(encoded[0].context)} tokens; recording needs text of 2 tokens or more")
    after = [len(e.question) + (settings.max_new_tokens if settings.future == "response" else len(e.answer)) for e in encoded]
    refuse_beyond(limit, record, len(encoded[0].context), max(after))
    if settings.future != "response" and not all(len(e.answer) for e in encoded):
        raise ValueError(f"{record} has no answer, which future={settings.future} needs; add one, or record future=response")
    trace = asked(prompt, encoded)
    if not settings.repeats:
        return trace
    whole, onward = reconstruction.instructions(tokenizer)
    repeats = reconstruction.repetitions(trace.ids, whole, onward)
    refuse_beyond(limit, record, len(trace.ids), max(len(probe.rows) for probe in repeats))
    return replace(trace, repeat_whole=whole, repeat_onward=onward)


def encode_questions(tokenizer: Tokenizer, prompt: Prompt, record: str, settings: RecordSettings) -> list[Encoded]:
    """The prompt's questions as `settings.question` puts them, one at least."""
    encoded = [encode(tokenizer, prompt, question) for question in prompt.questions]
    if not encoded:
        raise ValueError(f"{record} asks no question, so its tokens have no future; give it one")
    if settings.question == "outside":
        return encoded
    if len(encoded) > 1:
        raise ValueError(f"{record} asks {len(encoded)} questions, record.question=inside takes one; record it with question=outside")
    return [asked_inside(encoded[0])]


def refuse_beyond(limit: float, record: str, num_context: int, num_after: int) -> None:
    """Refuses what ends past the model's positions."""
    if num_context + num_after > limit:
        total = f"{num_context} tokens of context and {num_after} after it"
        raise ValueError(f"{record} has {total}, the model has {limit} positions; shorten it")


def asked(prompt: Prompt, encoded: list[Encoded]) -> Trace:
    """The prompt as a trace without tensors, of the model's own responses neither."""
    none = torch.empty(0, dtype=torch.int64)
    questions = [Continuation(e.question.long(), e.answer.long(), none, e.span) for e in encoded]
    return Trace(prompt.id, prompt.kind, prompt.split, encoded[0].context, questions)


def trace_bytes(config: TraceConfig, settings: RecordSettings, job: Trace) -> int:
    """What one trace will take on disk, its file's header left out."""
    base, n = config.base_model, len(job.ids)
    response = settings.max_new_tokens if settings.future == "response" else 0
    repeat = sum(len(instruction) for instruction in (job.repeat_whole, job.repeat_onward) if instruction is not None)
    ids = 8 * (n + repeat + sum(len(q.question) + len(q.answer) + response for q in job.questions))
    if settings.mode == "ids":
        return ids
    holds = settings.holds
    query_rows = min(n, WINDOW) + n * len({"queries", "queries_pre_rope"} & set(holds))
    hidden = n * base.hidden_size * len({"hidden", "block_input"} & set(holds))
    bfloat16 = 2 * n * base.num_kv_heads * base.head_dim + query_rows * base.num_query_heads * base.head_dim + hidden
    heads = {"kv": base.num_kv_heads, "query": base.num_query_heads}
    more = sum(heads[TARGETS[name].heads] for name in holds if name in TARGETS)
    more += base.num_kv_heads * len(set(RECONSTRUCTIONS) & set(holds))
    float32 = n * ((2 + settings.cuts) * base.num_kv_heads + more)
    return ids + base.num_layers * (2 * bfloat16 + 4 * float32)


def free_bytes(folder: Path) -> int:
    """Free space on the disk that will hold `folder`, which need not exist yet."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(there).free


# ---- the recording


def record_traces(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    asked: Iterable[Prompt],
    folder: str | Path,
    settings: RecordSettings,
    *,
    progress: bool = False,
) -> TraceDataset:
    """The traces of these prompts, those that `folder` lacks recorded first.

    Several processes of one torch.distributed group share the work by prompt index.  Raises ValueError before anything runs for a
    prompt that can't be recorded, a folder of other traces, or a disk without room.
    """
    return record_plan(plan_recording(model, tokenizer, asked, folder, settings), model, progress=progress)


def record_plan(plan: Plan, model: PreTrainedModel, *, progress: bool = False) -> TraceDataset:
    """Runs a plan; every trace is on disk before the next one begins."""
    plan.refuse_without_room()
    rank = place()[0]
    with prepared(plan) if rank == 0 else nullcontext():
        wait()
        record_share(plan, model, progress=progress and rank == 0)
        wait()
        if rank == 0:
            finish(plan.folder)
        wait()
    ids = [job.id for job in plan.jobs]
    return TraceDataset(plan.folder, ids=ids, base_model=plan.config.base_model, model=model if plan.settings.mode == "ids" else None)


def record_share(plan: Plan, model: PreTrainedModel, *, progress: bool) -> None:
    """The shards of this process."""
    rank, world = place()
    own = plan.jobs[rank::world]
    packer = Packer(plan.folder, rank, plan.settings.shard_mib << 20)
    total = sum(len(job.ids) for job in own if job.id in plan.missing)
    with tqdm(total=total, desc="recording", unit=" tokens", unit_scale=True, disable=not (progress and total)) as bar:
        for job in own:
            part = packer.part(job)
            if part is None:
                continue
            if not part.exists():
                format.write_trace(part, finite(record_one(model, job, plan.settings)))
                bar.update(len(job.ids))
            packer.add(part)
    packer.close()


def finite(trace: Trace) -> Trace:
    """The trace itself; refused where the model gave numbers that nothing can be learned from."""
    for name, values in format.tensors_of(trace).items():
        if not values.isfinite().all():
            where = f"prompt {trace.id} ({trace.kind})"
            raise ValueError(f"{where}: the model's {name} are not all finite; look at its weights, or at the prompt")
    return trace


def record_one(model: PreTrainedModel, job: Trace, settings: RecordSettings) -> Trace:
    """What is stored of one prompt."""
    if settings.mode == "ids":
        return respond(model, job, settings.max_new_tokens) if settings.future == "response" else job
    return measure(
        model,
        job,
        future=settings.future,
        over_questions=settings.over_questions,
        max_new_tokens=settings.max_new_tokens,
        cuts=settings.cuts,
        also=settings.holds,
    )


class Packer:
    """Packs the parts of one process into shards, in order of the prompts: which trace goes where depends on nothing else.

    folder       of the traces
    rank         whose shards these are: no two processes write one file
    shard_bytes  a shard is closed once it holds as much
    """

    def __init__(self, folder: Path, rank: int, shard_bytes: int) -> None:
        self.folder, self.rank, self.shard_bytes = folder, rank, shard_bytes
        self.packed = {row["id"] for row in format.shard_rows(folder)}
        self.waiting: list[Path] = []

    def part(self, job: Trace) -> Path | None:
        """Where the trace waits for its shard; None when a shard has it."""
        path = self.folder / PARTS / f"{job.id}.safetensors"
        if job.id in self.packed:
            path.unlink(missing_ok=True)  # the last run stopped between packing and clearing up
            return None
        return path

    def add(self, part: Path) -> None:
        self.waiting.append(part)
        if sum(path.stat().st_size for path in self.waiting) >= self.shard_bytes:
            self.close()

    def close(self) -> None:
        """Writes what waits as one shard."""
        if self.waiting:
            format.pack(self.waiting, self.next_shard())
        for path in self.waiting:
            path.unlink()
        self.waiting = []

    def next_shard(self) -> Path:
        taken = [int(path.stem.rpartition("-")[2]) for path in self.folder.glob(f"traces-{self.rank:02d}-*.safetensors")]
        return self.folder / f"traces-{self.rank:02d}-{max(taken, default=-1) + 1:05d}.safetensors"


@contextmanager
def prepared(plan: Plan) -> Iterator[None]:
    """The folder with its settings, without what a killed run left half written, and closed to other recordings for the while."""
    (plan.folder / PARTS).mkdir(parents=True, exist_ok=True)
    with alone(plan.folder, "recording into"):
        for path in [*plan.folder.glob("*.tmp"), *(plan.folder / PARTS).glob("*.tmp")]:
            path.unlink()
        if not (plan.folder / format.CONFIG).exists():
            format.write_config(plan.folder, plan.config)
        yield


def finish(folder: Path) -> None:
    """The manifest of all shards; parts of another, unfinished recording stay."""
    format.write_manifest(folder)
    if not any((folder / PARTS).iterdir()):
        (folder / PARTS).rmdir()


def place() -> tuple[int, int]:
    """(rank, processes) of the torch.distributed group, (0, 1) outside one."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def wait() -> None:
    """Until every process is here."""
    if place()[1] > 1:
        distributed.barrier()
