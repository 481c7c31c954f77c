"""What a folder or file of learnkv's is, as facts by name: read with the readers that serve the commands, and nothing is ever unpickled."""

from __future__ import annotations

import ast
import base64
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import yaml
from safetensors import SafetensorError, deserialize, safe_open

from learnkv import config, inventory
from learnkv.checkpoint import Card, check_card, read_weights
from learnkv.counts import size
from learnkv.evaluation import report
from learnkv.evaluation.rows import read_rows
from learnkv.gates.base import describe_geometry
from learnkv.models import BaseModel
from learnkv.places import CARD, CONFIG, EVENTS, LAST, MANIFEST, RECIPE, ROWS, RUNS_FOLDER, WEIGHTS
from learnkv.presses.bundle import MARK
from learnkv.traces.format import open_shard, read_config, read_manifest, rows_of

Facts = dict[str, str]
DEFAULT_MODEL = "smollm2-135m"  # the one that commands take without being told


def facts(path: Path) -> Facts:
    """What lies at `path`; a ValueError in one line for what is not learnkv's, or is damaged."""
    if path.is_dir():
        return folder_facts(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; learnkv ls says what is there")
    return file_facts(path)


def folder_facts(path: Path) -> Facts:
    if (path / CONFIG).exists():
        return trace_facts(path)
    if any((path / name).exists() for name in (LAST, EVENTS)):
        return run_facts(path)
    if (path / WEIGHTS).exists():
        return gate_facts(path)
    if (path / RECIPE).exists():
        return run_facts(path)
    if (path / ROWS).exists():
        return row_facts(path / ROWS)
    raise unknown_thing(path)


def file_facts(path: Path) -> Facts:
    if path.name in (CARD, CONFIG, MANIFEST, RECIPE, LAST):  # a checkpoint is a pickle, and stays closed
        return folder_facts(path.parent)
    if path.suffix == ".safetensors":
        return tensor_facts(path)
    if path.suffix == ".jsonl":
        return row_facts(path)
    if path.suffix == ".py" and path.read_bytes().startswith(MARK.encode()):
        return press_facts(path)
    raise unknown_thing(path)


def unknown_thing(path: Path) -> ValueError:
    known = "a folder of traces, a shard, a gate, a run, a file of comparison rows or an exported press"
    return ValueError(f"{path} is none of learnkv's: give {known}")


def tensor_facts(path: Path) -> Facts:
    try:
        told = inventory.metadata(path)
    except SafetensorError as error:
        raise ValueError(f"{path} of {path.stat().st_size} bytes is truncated or no safetensors file ({error})") from error
    if "rows" in told:
        return shard_facts(path)
    if "card" in told and path.name == WEIGHTS:
        return gate_facts(path.parent)
    raise unknown_thing(path)


# ---- gates and runs


def gate_facts(folder: Path) -> Facts:
    card, tensors = read_weights(folder / WEIGHTS)
    check_card(folder / CARD, card)
    numbers = sum(t.numel() for t in tensors.values())
    held = size((folder / WEIGHTS).stat().st_size)
    found = {"gate": f"{card.method}, {numbers:,} numbers, {held}, unchanged since it was saved"} | base_facts(card.base_model)
    if (reward := inventory.heldout_reward(folder / EVENTS)) is not None:
        found["held-out reward"] = f"{reward:.2f} (the oracle's is -1)"
    found["made by"] = f"{training_of(folder)}; learnkv {card.learnkv_version}"
    if card.train_seconds is not None:
        found["made by"] += f", {card.train_seconds:.0f} s of training"
    if (folder / "README.md").exists():
        found["card"] = f"{folder / 'README.md'}"
    found["knobs"] = pairs(card.config)
    return found | shapes({name: (f"{t.dtype}".removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}) | uses(folder, card)


def base_facts(base: BaseModel) -> Facts:
    geometry = describe_geometry(base.num_layers, base.num_kv_heads, base.head_dim)
    return {"model": f"{base.name}, {geometry}, {base.num_query_heads} query heads, weights {base.weights_hash or 'unknown'}"}


def training_of(folder: Path) -> str:
    """The command that trains such a gate again, and what its recipe was resolved from."""
    recipe = folder / RECIPE
    if not recipe.is_file():
        return "python -m learnkv.train, its recipe is in the file"
    first = recipe.read_text().partition("\n")[0].removeprefix("# ")
    return f"python -m learnkv.train {shlex.quote(f'recipe={recipe}')}" + (f" ({first})" if first.startswith("resolved from ") else "")


def uses(folder: Path, card: Card) -> Facts:
    """What may be done with a gate: it is asked as it was recorded."""
    model = f" model={shlex.quote(card.base_model.name)}" if card.base_model.name != DEFAULT_MODEL else ""
    gate = shlex.quote(f"gate={folder}")
    record = card.recipe.get("record")
    inside = " evaluate.question=inside" if isinstance(record, dict) and record.get("question") == "inside" else ""
    commands = [f"evaluate{model} {gate}{inside} evaluate.count=20", f"export {gate}"]
    return {
        "next": "\n".join(f"python -m learnkv.{command}" for command in [f"generate{model} {gate} compare=true", *commands][bool(inside) :])
    }


def run_facts(folder: Path) -> Facts:
    recipe = read_yaml(folder / RECIPE)
    method, *rest = inventory.run(folder)
    if not rest:
        raise ValueError(f"{folder}: its recipe or its checkpoint is {method}; give another run")
    home = "" if folder.parent == Path(RUNS_FOLDER) else f" {shlex.quote(f'runs={folder.parent}')}"
    again = f"python -m learnkv.train {shlex.quote(f'recipe={folder / RECIPE}')} {shlex.quote(f'name={folder.name}')}{home}"
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    found = {
        "run": f"{method}, {', '.join(rest)}, {size(held)}",
        "model": f"{recipe.get('model', DEFAULT_MODEL)}",
        "made by": again,
        "watch": f"tensorboard --logdir {shlex.quote(str(folder))}",
    }
    if not (folder / WEIGHTS).exists():
        return found | {"next": again}
    gate = gate_facts(folder)
    return found | gate | {"made by": again, "next": gate["next"] if rest[-1].startswith("trained") else again}


def read_yaml(path: Path) -> dict:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is missing, truncated or was edited ({config.one_line(error)})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no keys and values, so {path.parent} is no run")
    return found


# ---- traces


def trace_facts(folder: Path) -> Facts:
    found, rows = read_config(folder), read_manifest(folder)
    splits, kinds = (Counter(str(row[name]) for row in rows) for name in ("split", "kind"))
    tokens = sorted(row["num_tokens"] for row in rows)
    told = {
        "traces": f"{counts(splits)}, {size(sum(row['bytes'] for row in rows))} in {len({row['shard'] for row in rows})} shards",
        "kinds": counts(kinds),
        "tokens": f"{sum(tokens):,} of context, {tokens[0]:,} to {tokens[-1]:,} each" if tokens else "none",
    }
    told |= base_facts(found.base_model) | {
        "made by": f"python -m learnkv.record with {pairs(found.settings, 'record.')}; learnkv {found.learnkv_version}"
    }
    if rows:
        told |= trace_shapes(folder / rows[0]["shard"], rows[0]["id"])
    return told | {"next": "python -m learnkv.train with a recipe whose record section says the same; then nothing is recorded again"}


def shard_facts(path: Path) -> Facts:
    with open_shard(path) as shard:
        rows = rows_of(shard, path)
    told = {
        "shard": f"{len(rows)} traces, {size(path.stat().st_size)}",
        "traces": ", ".join(f"{row['id']} ({row['kind']}, {row['split']}, {row['num_tokens']} tokens)" for row in rows),
        "made by": "python -m learnkv.record",
    }
    folder = next((folder for folder in path.absolute().parents if (folder / CONFIG).exists()), None)
    if folder is not None:
        told |= base_facts(read_config(folder).base_model)
    told |= trace_shapes(path, rows[0]["id"]) if rows else {}
    return told | {"next": f"python -m learnkv.inspect {shlex.quote(str(path.parent))}"}


def trace_shapes(path: Path, name: str) -> Facts:
    """What one trace of a shard consists of."""
    prefix = f"{name}."
    with safe_open(path, framework="np") as opened:
        slices = {key.removeprefix(prefix): opened.get_slice(key) for key in opened.keys() if key.startswith(prefix)}  # noqa: SIM118
        return {"one trace": name} | shapes({key: (found.get_dtype(), found.get_shape()) for key, found in slices.items()})


# ---- comparisons and presses


def row_facts(path: Path) -> Facts:
    rows = read_rows(path)
    if not rows:
        raise ValueError(f"{path} holds no row of a comparison yet")
    return {
        "comparison": f"{len(rows):,} rows, {len({row.prompt for row in rows})} prompts, {size(path.stat().st_size)}",
        "methods": ", ".join(dict.fromkeys(row.line for row in rows)),
        "budgets": ", ".join(f"{budget:g}" for budget in sorted({row.budget for row in rows})),
        "protocol": report.protocol(rows),
        "made by": f"python -m learnkv.evaluate {shlex.quote(f'evaluate.out={path.parent}')}",
        "next": f"the same command goes on from here; evaluate.choose={shlex.quote(str(path))} runs heuristics at what was best in it",
    }


def press_facts(path: Path) -> Facts:
    """Out of the file's text, which is not run."""
    try:
        learned = press_of(path.read_text())
        base = {name: learned["base"][name] for name in ("name", "num_layers", "num_kv_heads", "head_dim")}
        tensors = {name: (found["dtype"], found["shape"]) for name, found in deserialize(base64.b64decode(learned["encoded"]))}
    except (SyntaxError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(
            f"{path} begins as an exported press and is truncated or was edited ({config.one_line(error)}); export again"
        ) from error
    version = path.read_text().removeprefix(MARK).partition(":")[0]
    geometry = describe_geometry(base["num_layers"], base["num_kv_heads"], base["head_dim"])
    return (
        {"press": f"for kvpress: {learned['method']}, {size(path.stat().st_size)}", "model": f"{base['name']}, {geometry}"}
        | {
            "made by": f"python -m learnkv.export gate=... {shlex.quote(f'to={path}')}; learnkv {version}",
            "knobs": pairs(learned["config"]),
        }
        | shapes(tensors)
        | {"next": f"where kvpress is installed: from {path.stem} import Press; with Press(compression_ratio=0.5)(model): ..."}
    )


def press_of(text: str) -> dict:
    """The arguments of Learned in the class Press."""
    (press,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Press"]
    (call,) = [node.value for node in press.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


# ---- in words


def shapes(tensors: Mapping[str, tuple[str, list[int]]]) -> Facts:
    """One line per tensor: (dtype, shape) by name."""
    width = max(map(len, tensors), default=0)
    lines = [f"{name:<{width}}  {DTYPES.get(dtype, dtype)} {list(shape)}" for name, (dtype, shape) in sorted(tensors.items())]
    return {"tensors": "\n".join(lines)}


DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32"}  # as safetensors calls them


def pairs(values: Mapping[str, object], prefix: str = "") -> str:
    """As they would be typed."""
    return " ".join(f"{prefix}{key}={config.inline(value)}" for key, value in sorted(values.items()))


def counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
