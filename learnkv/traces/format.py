"""What a trace is, and how traces lie on disk: safetensors shards, a parquet manifest, one json of settings."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from learnkv.files import write_atomically
from learnkv.models import BaseModel
from learnkv.places import CONFIG, MANIFEST, SHARDS
from learnkv.typed import checked
from learnkv.version import __version__

FORMAT_VERSION = 2
AGAIN = "delete it and record again"


@dataclass(frozen=True)
class Continuation:
    """What followed the context once: token ids of one question, its given answer and the model's own greedy response.

    question, answer, response  [n] int64, empty where there is none
    span                        token range of the context that holds the answer, or None
    """

    question: Tensor
    answer: Tensor
    response: Tensor
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Trace:
    """One full-cache pass over a context and what was asked about it.  A field that was not recorded is None.

    id         the prompt's id
    kind       its generator
    split      "train" or "heldout"
    ids        [n] int64 tokens of the context: what may be evicted
    repeat_whole, repeat_onward  [*] int64 what asks the model to repeat it, see `learnkv.reconstruction`; only where a target hangs on it
    questions  one Continuation per question
    keys       [layers, H, n, D] rotated
    values     [layers, H, n, D]
    hidden     [layers, n, M] input of self-attention
    block_input  [layers, n, M] input of the decoder layer
    queries    [layers, Q, n, D] rotated, of the context's tokens
    queries_pre_rope  [layers, Q, n, D] likewise, before rotation
    window     [layers, Q, W, D] the last W of them; W = min(n, 32)
    mass       [layers, H, n] float32 attention that the context pays to itself, summed over queries and query group
    targets    by name, float32: "utility" [layers, H, n], and those of `learnkv.traces.measure.ALSO` that the recipe asks for;
               with cuts also "utility_cuts" [C, layers, H, n] and "cut_positions" [C] int64
    """

    id: str
    kind: str
    split: str
    ids: Tensor
    questions: list[Continuation]
    keys: Tensor | None = None
    values: Tensor | None = None
    hidden: Tensor | None = None
    block_input: Tensor | None = None
    queries: Tensor | None = None
    queries_pre_rope: Tensor | None = None
    window: Tensor | None = None
    mass: Tensor | None = None
    targets: dict[str, Tensor] = field(default_factory=dict)
    repeat_whole: Tensor | None = None
    repeat_onward: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Trace:
        """The same trace with keys, values, hidden states and queries in `dtype`; mass and targets stay float32."""
        names = ("keys", "values", "hidden", "block_input", "queries", "queries_pre_rope", "window")
        taken = {name: getattr(self, name) for name in names}
        return replace(self, **{name: t.to(dtype) for name, t in taken.items() if t is not None})


@dataclass(frozen=True)
class TraceConfig:
    """What all traces of one folder share, and what must fit before two recipes may share a folder.

    rope      rope parameters of the base model's config
    settings  what of the recipe decides the content of a trace
    """

    base_model: BaseModel
    rope: dict[str, object]
    settings: dict[str, object]
    format_version: int = FORMAT_VERSION
    learnkv_version: str = __version__


# ---- one trace as named tensors


TENSORS = (
    *("ids", "repeat_whole", "repeat_onward"),
    *("keys", "values", "hidden", "block_input", "queries", "queries_pre_rope", "window", "mass"),
)
PARTS = ("question", "answer", "response")


def tensors_of(trace: Trace) -> dict[str, Tensor]:
    """Every tensor of a trace by its name in a shard, without the trace's id."""
    named = {name: getattr(trace, name) for name in TENSORS if getattr(trace, name) is not None}
    named |= {f"targets.{name}": t for name, t in trace.targets.items()}
    for i, asked in enumerate(trace.questions):
        named |= {f"questions.{i}.{part}": getattr(asked, part) for part in PARTS}
    return {name: t.detach().cpu().contiguous() for name, t in named.items()}


def trace_of(row: Mapping, tensors: Mapping[str, Tensor]) -> Trace:
    """The trace back from its row and its named tensors."""
    asked = []
    for i, span in enumerate(json.loads(row["spans"])):
        question, answer, response = (tensors[f"questions.{i}.{part}"] for part in PARTS)
        asked.append(Continuation(question, answer, response, tuple(span) if span else None))
    targets = {name.removeprefix("targets."): t for name, t in tensors.items() if name.startswith("targets.")}
    whole = {name: tensors[name] for name in TENSORS if name in tensors}
    return Trace(row["id"], row["kind"], row["split"], questions=asked, targets=targets, **whole)


def row_of(trace: Trace) -> dict[str, object]:
    """The trace's line in the manifest, but for the shard.

    num_tokens of the context, num_future of all its questions, answers and responses; checksum is a crc32 of the tensors in order
    of name; prompt_hash is a crc32 of the context's ids, spans a json list of token ranges.
    """
    named = tensors_of(trace)
    return {
        "id": trace.id,
        "kind": trace.kind,
        "split": trace.split,
        "num_tokens": len(trace.ids),
        "num_questions": len(trace.questions),
        "num_future": sum(len(q.question) + len(q.answer) + len(q.response) for q in trace.questions),
        "prompt_hash": f"{checksum({'ids': named['ids']}):08x}",
        "spans": json.dumps([q.span for q in trace.questions]),
        "bytes": sum(t.nbytes for t in named.values()),
        "checksum": checksum(named),
    }


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """crc32 over names and bytes."""
    total = 0
    for name in sorted(tensors):
        t = tensors[name]
        total = zlib.crc32(t.reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(f"{name} {t.dtype} {tuple(t.shape)}".encode(), total))
    return total


# ---- files


def write_trace(path: Path, trace: Trace) -> None:
    """A shard that holds one trace."""
    write_shard(path, [row_of(trace)], {f"{trace.id}.{name}": t for name, t in tensors_of(trace).items()})


def write_shard(path: Path, rows: list[dict], tensors: Mapping[str, Tensor]) -> None:
    """rows go into the header under one key, since several would be written in random order."""
    # not save_file: it writes through a temporary file of its own, which a kill leaves behind, and which only its owner may read
    content = save(dict(tensors), {"rows": json.dumps(rows)})
    write_atomically(path, lambda to: to.write_bytes(content))


def pack(parts: Iterable[Path], path: Path) -> None:
    """One shard out of several, in order."""
    rows: list[dict] = []
    tensors: dict[str, Tensor] = {}
    for part in parts:
        with open_shard(part) as shard:
            rows += rows_of(shard, part)
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 (not a mapping)
    write_shard(path, rows, tensors)


def open_shard(path: Path) -> safe_open:
    """The shard, memory-mapped."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ValueError(f"shard {path} is named in the manifest but is not there; delete {MANIFEST} and record again") from error
    except SafetensorError as error:
        raise ValueError(f"shard {path} of {path.stat().st_size} bytes is truncated or no safetensors file ({error}); {AGAIN}") from error


def rows_of(shard: safe_open, path: Path) -> list[dict]:
    """The manifest rows that a shard carries in its header."""
    try:
        return [dict(**row) for row in json.loads(shard.metadata()["rows"])]
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"shard {path} holds tensors but no trace rows: learnkv did not write it, or it was edited; {AGAIN}") from error


def shard_rows(folder: Path) -> list[dict]:
    """The rows of every complete shard in `folder`, with its name, in order of name."""
    rows = []
    for path in sorted(folder.glob(SHARDS)):
        with open_shard(path) as shard:
            rows += [row | {"shard": path.name} for row in rows_of(shard, path)]
    return rows


def read_trace(folder: Path, row: Mapping, *, verify: bool = True) -> Trace:
    """The trace of a manifest row, memory-mapped: its bytes are read when they are used (by `verify` at once)."""
    path, prefix = folder / row["shard"], row["id"] + "."
    with open_shard(path) as shard:
        if verify and dict(row) not in [found | {"shard": path.name} for found in rows_of(shard, path)]:
            raise ValueError(
                f"manifest {folder / MANIFEST} was edited: trace {row['id']} is described otherwise in {path.name}; "
                "delete it and run record: shards are reused"
            )
        names = [name for name in shard.keys() if name.startswith(prefix)]  # noqa: SIM118
        tensors = {name.removeprefix(prefix): shard.get_tensor(name) for name in names}
    if verify and checksum(tensors) != row["checksum"]:
        found, wanted = checksum(tensors), row["checksum"]
        raise ValueError(
            f"trace {row['id']} in {path} has checksum {found:08x}, the manifest says {wanted:08x}: the shard was edited; {AGAIN}"
        )
    return trace_of(row, tensors)


SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("shard", pa.string()),
        ("kind", pa.string()),
        ("split", pa.string()),
        ("num_tokens", pa.int64()),
        ("num_questions", pa.int64()),
        ("num_future", pa.int64()),
        ("prompt_hash", pa.string()),
        ("spans", pa.string()),
        ("bytes", pa.int64()),
        ("checksum", pa.int64()),
    ]
)


def write_manifest(folder: Path) -> None:
    """The manifest of the shards that lie in `folder`, by split, kind and id: whoever wrote them."""
    rows = sorted(shard_rows(folder), key=lambda row: (row["split"], row["kind"], row["id"]))
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    write_atomically(folder / MANIFEST, lambda to: pq.write_table(table, to))


def read_manifest(folder: Path) -> list[dict]:
    """One row per trace."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} holds no {MANIFEST}: nothing was recorded there, or the recording was stopped; run record (again)")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"manifest {path} is truncated or no parquet file ({error}); delete it and run record: shards are reused"
        ) from error
    if not table.schema.equals(SCHEMA):
        found, wanted = ([f"{f.name}: {f.type}" for f in schema] for schema in (table.schema, SCHEMA))
        raise ValueError(f"manifest {path} has columns {found}, not {wanted}; delete it and run record: shards are reused")
    rows = table.to_pylist()
    if any(None in row.values() for row in rows):
        raise ValueError(f"manifest {path} was edited: it has empty cells; delete it and run record: shards are reused")
    return rows


def write_config(folder: Path, config: TraceConfig) -> None:
    text = json.dumps(asdict(config), indent=2, sort_keys=True) + "\n"
    write_atomically(folder / CONFIG, lambda to: to.write_text(text))


def read_config(folder: Path) -> TraceConfig:
    """The settings of a folder of traces, of this format version."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no {CONFIG}, so it is no folder of traces; give the folder that record named")
    try:
        values = json.loads(path.read_text())
        found = values["format_version"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is truncated or was edited ({error!r}); delete {folder} and record again") from error
    if found != FORMAT_VERSION:
        raise ValueError(f"{path} has format_version {found}, this learnkv reads {FORMAT_VERSION}; record again into another folder")
    return config_of(path, values)


def config_of(path: Path, values: dict) -> TraceConfig:
    """The dataclass out of the file's values; a missing or additional key is an edit, but for what earlier versions did not write."""
    want = {f.name for f in fields(TraceConfig)}, {f.name for f in fields(BaseModel)}
    base = values.get("base_model")
    later = {f.name for f in fields(BaseModel) if not f.compare}
    have = set(values), set(base) | later if isinstance(base, dict) else set()
    if have != want:
        raise ValueError(f"{path} was edited: it has the keys {sorted(have[0] | have[1])}, not {sorted(want[0] | want[1])}; record again")
    try:
        return checked(TraceConfig(**values | {"base_model": checked(BaseModel(**(base or {})))}))
    except TypeError as error:
        raise ValueError(f"{path} was edited: {error}; record again") from error


def check_model(folder: Path, found: BaseModel, wanted: BaseModel) -> None:
    """Traces serve the model they were recorded from, whatever it was called then, and no other."""
    if replace(found, name=wanted.name) != wanted:
        raise ValueError(f"{folder} holds traces of {found}, the model at hand is {wanted}; record into another folder")
