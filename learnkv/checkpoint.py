"""Gates on disk: gate.safetensors with the weights, gate.json beside it to say what they are.  No pickle.

The weights' header carries the whole gate.json.  Replacing gate.safetensors is thus the one moment at which a new gate takes the
place of an old one: whoever is killed between the two files leaves a folder that loads.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from learnkv import config
from learnkv.files import write_atomically
from learnkv.gates import GATES
from learnkv.gates.base import Gate
from learnkv.models import BaseModel, PreTrainedModel, describe
from learnkv.names import unknown
from learnkv.places import CARD, WEIGHTS
from learnkv.typed import checked
from learnkv.version import __version__

FORMAT_VERSION = 2
AGAIN = "take it from its source again, or train again"


@dataclass(frozen=True)
class Card:
    """What gate.json says.

    method         name in GATES
    config         the gate's knobs
    base_model     whose keys and values it was trained on
    recipe         the resolved recipe of its training
    weights_sha    sha256 over the tensors, so that an edit shows
    train_seconds  what the steps of its training took; None where nobody counted
    """

    method: str
    config: dict[str, object]
    base_model: BaseModel
    recipe: dict[str, object]
    weights_sha: str
    train_seconds: float | None = None
    format_version: int = FORMAT_VERSION
    learnkv_version: str = __version__


def save_gate(gate: Gate, folder: Path, recipe: dict[str, object], train_seconds: float | None = None) -> None:
    """Writes gate.safetensors, then gate.json; the folder holds the old gate or the new one at any moment.

    recipe         the resolved recipe of the training, as plain values
    train_seconds  what its steps took
    """
    tensors = tensors_of(gate)
    card = Card(gate.METHOD, gate.knobs(), gate.base, recipe, weights_sha(tensors), train_seconds)
    text = json.dumps(asdict(card), indent=2, sort_keys=True) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    content = save(tensors, {"card": text})  # not save_file, as in write_shard
    write_atomically(folder / WEIGHTS, lambda to: to.write_bytes(content))
    write_atomically(folder / CARD, lambda to: to.write_text(text))


def tensors_of(gate: Gate) -> dict[str, Tensor]:
    return {name: t.detach().cpu().contiguous() for name, t in gate.state_dict().items()}


def gate_hash(gate: Gate) -> str:
    """16 hex digits of all that decides a gate's scores: its method, knobs and tensors."""
    decides = [gate.METHOD, gate.knobs(), weights_sha(tensors_of(gate))]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def load_gate(path: str | Path, model: PreTrainedModel | None = None) -> Gate:
    """The gate in a folder, ready to score on CPU.

    path   folder with gate.json and gate.safetensors
    model  the base model it shall serve: another geometry is a ValueError, other weights a warning
    """
    return load_with_card(path, model)[0]


def load_with_card(path: str | Path, model: PreTrainedModel | None = None) -> tuple[Gate, Card]:
    """`load_gate`, and what the gate's card says of its training."""
    folder = Path(path)
    card, tensors = read_weights(folder / WEIGHTS)
    check_card(folder / CARD, card)
    gate = build_gate(card, folder)
    load_tensors(gate, tensors, folder / WEIGHTS)
    if model is not None:
        check_model(folder, card.base_model, describe(model))
    return gate.eval().requires_grad_(False), card


def build_gate(card: Card, folder: Path) -> Gate:
    """An untrained gate of the card's method and config."""
    if card.method not in GATES:
        raise ValueError(f"{folder}: {unknown('method', card.method, GATES)}")
    kind = GATES[card.method]
    lacking = [field.name for field in fields(kind.Config) if field.name not in card.config]
    if lacking:
        raise ValueError(f"{folder}: its config lacks {', '.join(lacking)}, so another version of learnkv wrote it; train again")
    knobs: object = config.build(kind.Config, cast(dict, config.plain(card.config)), f"{folder / CARD}: config")
    try:
        return kind(knobs, card.base_model)
    except RuntimeError as error:  # torch's own for sizes that are none
        raise ValueError(f"{folder / CARD} describes no {card.method} gate ({str(error).splitlines()[0]}); {AGAIN}") from error


def load_tensors(gate: Gate, tensors: dict[str, Tensor], path: Path) -> None:
    try:
        gate.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the {gate.METHOD} gate that its header describes ({error}); {AGAIN}") from error


def read_weights(path: Path) -> tuple[Card, dict[str, Tensor]]:
    """(card, tensors) of a complete and unedited weights file."""
    if not path.is_file():
        raise ValueError(f"{path.parent} holds no {WEIGHTS}, so it is no gate; give the folder that train named")
    try:
        with safe_open(path, framework="pt") as opened:
            text = (opened.metadata() or {}).get("card")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} of {path.stat().st_size} bytes is truncated or no safetensors file ({error}); {AGAIN}") from error
    spoilt = [name for name, t in tensors.items() if not t.isfinite().all()]
    if spoilt:
        raise ValueError(f"{path}: {', '.join(spoilt)} hold numbers that are not finite; {AGAIN}")
    if text is None:
        raise ValueError(f"{path} holds tensors but no card of a gate: learnkv did not write it; {AGAIN}")
    card = parse_card(text, path)
    if (found := weights_sha(tensors)) != card.weights_sha:
        raise ValueError(f"{path} was edited: its tensors have sha256 {found[:12]}, its header says {card.weights_sha[:12]}; {AGAIN}")
    return card, tensors


def check_card(path: Path, card: Card) -> None:
    """gate.json says what the weights' header says, or is of an earlier gate whose weights were replaced a moment before a kill."""
    if not path.is_file():
        return
    beside = parse_card(read_text(path), path)
    if beside.weights_sha == card.weights_sha and beside != card:
        changed = [f.name for f in fields(Card) if getattr(beside, f.name) != getattr(card, f.name)]
        raise ValueError(f"{path} was edited: {', '.join(changed)} differs from what {WEIGHTS} was written with; {AGAIN}")


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text file ({error}); {AGAIN}") from error


def parse_card(text: str, path: Path) -> Card:
    """The card out of its json; a missing or additional key, or another format version, is refused."""
    try:
        values = json.loads(text)
        found = values["format_version"]
        if found != FORMAT_VERSION:  # its keys may be others
            raise ValueError(f"{path} has format_version {found}, this learnkv reads {FORMAT_VERSION}; train again")
        return checked(Card(**values | {"base_model": checked(BaseModel(**values["base_model"]))}))
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is truncated or was edited ({error!r}); {AGAIN}") from error


def weights_sha(tensors: dict[str, Tensor]) -> str:
    """sha256 over names, shapes and bytes, in order of name."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].contiguous()
        total.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        total.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


SHAPE = ("num_layers", "num_kv_heads", "num_query_heads", "head_dim", "hidden_size")


def check_model(folder: Path, trained: BaseModel, at_hand: BaseModel) -> None:
    """Another geometry is an error; other weights of the same geometry are worth a warning."""
    wrong = [name for name in SHAPE if getattr(trained, name) != getattr(at_hand, name)]
    if wrong:
        sides = ", ".join(f"{name} {getattr(trained, name)} against {getattr(at_hand, name)}" for name in wrong)
        raise ValueError(f"gate {folder} is for {trained.name}, the model at hand is {at_hand.name}: {sides}; load a gate for this model")
    if trained.weights_hash != at_hand.weights_hash:
        sides = f"weights {trained.weights_hash} of {trained.name}, the model at hand has {at_hand.weights_hash}"
        warnings.warn(f"gate {folder} was trained on {sides}: it may rank badly", stacklevel=3)
