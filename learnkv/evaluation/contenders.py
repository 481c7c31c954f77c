"""Contenders of a comparison: entries made into policies, gates loaded, full cache, random and oracle always among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import Tensor

from learnkv import methods
from learnkv.budgets import ALLOCATORS, Allocator, Ratio
from learnkv.calibration import calibration_texts, query_filters
from learnkv.checkpoint import gate_hash, load_with_card
from learnkv.evaluation.entries import Entry, parse_entry
from learnkv.evaluation.report import FULL
from learnkv.evaluation.trained import TWIN, Trained, trained_of
from learnkv.gates import GATES
from learnkv.gates.base import Gate
from learnkv.heuristics.oracle import Oracle
from learnkv.heuristics.streaming_llm import StreamingLLM
from learnkv.methods import METHODS
from learnkv.models import PreTrainedModel
from learnkv.policy import Policy
from learnkv.prompts.prompt import Tokenizer

ALWAYS = ("full", "random", "oracle")
WHOLE = Ratio(1.0)


@dataclass(frozen=True)
class Contender:
    """A method ready to run; its scorer is shared by all its budgets.

    line         the table's line; several training runs of one recipe share theirs
    method       the entry without its path; `scorer` and `allocator` are its parts
    run, gate    folder and hash of a gate; of a file that a knob names the hash alone; "" without either
    policy       scorer and budget rules; budget and, for the oracle, scorer are set per cell
    trained      of a gate that lies in a folder: what is known of its training
    """

    line: str
    method: str
    scorer: str
    allocator: str
    run: str
    gate: str
    policy: Policy
    trained: Trained | None = None

    def at(self, budget: int | Ratio, utility: Tensor | None = None) -> Policy:
        """The policy at a budget; utility [layers, H, n] is what the oracle scores by."""
        if self.scorer != "oracle":
            return replace(self.policy, budget=budget)
        assert utility is not None, "the oracle needs the utilities of its prompt"
        return replace(self.policy, budget=budget, scorer=Oracle(utility))


def contenders_of(
    texts: Sequence[str],
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    num_sinks: int = 4,
    num_recent: int = 16,
    always: Sequence[str] = ALWAYS,
) -> list[Contender]:
    """The contenders that entries name, full cache, random and oracle first unless they were named.

    Raises ValueError with the nearest names for an unknown method, allocator or knob, and for a gate that does not fit the model.
    """
    entries = entries_of(texts)
    named = {entry.name for entry in entries}
    entries = [Entry(name) for name in always if name not in named] + entries
    return [c for entry in dict.fromkeys(entries) for c in open_entry(entry, model, tokenizer, num_sinks, num_recent)]


def entries_of(texts: Sequence[str]) -> list[Entry]:
    """What the texts name, with no model at hand: a mistake should not wait for one.

    Raises ValueError with the nearest names for an unknown method or allocator, and for a gate's folder that is not there.
    """
    names = sorted({"full", "oracle", *METHODS, *GATES})
    entries = [parse_entry(text, names) for text in texts]
    for entry in entries:
        if entry.path and entry.name not in GATES:
            raise ValueError(
                f"method {entry}: {entry.name} has no weights, so it takes no folder; with weights: {', '.join(sorted(GATES))}"
            )
        entry.folders()
    return entries


def open_entry(entry: Entry, model: PreTrainedModel, tokenizer: Tokenizer, num_sinks: int, num_recent: int) -> list[Contender]:
    """One contender, or one per training run."""
    if entry.name in GATES:
        return open_gates(entry, model, num_sinks, num_recent)
    if entry.name in ("full", "oracle"):
        return [control(entry, num_sinks, num_recent)]
    policy = heuristic(entry, model, tokenizer, num_sinks, num_recent)
    filters = dict(entry.knobs).get("filters", "")
    content = sha256(Path(str(filters)).read_bytes()).hexdigest()[:16] if filters else ""
    return [Contender(str(entry), entry.method, entry.name, name_of(policy.allocate), "", content, policy)]


def control(entry: Entry, num_sinks: int, num_recent: int) -> Contender:
    """The full cache, which evicts nothing, or the oracle, whose scorer comes with each prompt."""
    if entry.knobs or (entry.name == "full" and entry.allocator):
        raise ValueError(f"method {entry}: {entry.name} has no settings")
    allocator = entry.allocator or "uniform"
    policy = Policy(StreamingLLM(), WHOLE, ALLOCATORS[allocator], num_sinks, num_recent)
    return Contender(FULL if entry.name == "full" else str(entry), entry.method, entry.name, allocator, "", "", policy)


def heuristic(entry: Entry, model: PreTrainedModel, tokenizer: Tokenizer, num_sinks: int, num_recent: int) -> Policy:
    """The policy that METHODS makes of the entry's knobs, at a budget to be replaced."""
    elsewhere = {"budget", "allocate", "tokenizer"} & dict(entry.knobs).keys()
    if elsewhere:
        raise ValueError(f"method {entry}: {', '.join(sorted(elsewhere))} is no knob of a method; budgets have keys, allocators follow a +")
    knobs: dict[str, object] = {"num_sinks": num_sinks, "num_recent": num_recent, **dict(entry.knobs)}
    requires = METHODS[entry.name].requires
    if "tokenizer" in requires:
        knobs["tokenizer"] = tokenizer
    if "filters" in requires and "filters" not in knobs:
        if model not in CALIBRATED:
            CALIBRATED[model] = query_filters(model, calibration_texts(model, tokenizer))
        knobs["filters"] = CALIBRATED[model]
    try:
        return methods.policy(entry.name, WHOLE, allocate=entry.allocator or None, **knobs)
    except ValueError as error:
        raise ValueError(f"method {entry}: {error}") from error


CALIBRATED: WeakKeyDictionary[PreTrainedModel, Tensor] = WeakKeyDictionary()  # filters of the models at hand, some seconds' work each


def open_gates(entry: Entry, model: PreTrainedModel, num_sinks: int, num_recent: int) -> list[Contender]:
    """A gate per folder; without a path the shipped one for the bundled model."""
    if entry.knobs:
        raise ValueError(f"method {entry}: the settings of {entry.name} were fixed in training; give a folder instead, {entry.name}:folder")
    folders = entry.folders() or [shipped_gate(entry.name)]
    loaded = [open_gate(folder, entry, model, num_sinks, num_recent) for folder in folders]
    for contender in loaded:
        if contender.scorer != entry.name:
            kind = contender.scorer
            raise ValueError(f"method {entry}: the gate in {contender.run} is a {kind}; write {kind}:{contender.run}")
    return loaded


def open_gate(folder: str, entry: Entry, model: PreTrainedModel, num_sinks: int, num_recent: int) -> Contender:
    """The gate in a folder; one that was trained on shuffled targets has a line of its own."""
    gate, card = load_with_card(folder, model)
    trained = trained_of(gate, card)
    line = f"{entry}{TWIN if trained.shuffled else ''}"
    return replace(gate_contender(gate, folder, line, entry.allocator, num_sinks, num_recent), trained=trained)


def shipped_gate(name: str) -> str:
    """The folder of the gate that this repository ships for the bundled model."""
    folder = f"checkpoints/{name}-smollm2-135m"
    if not Path(folder).is_dir():
        raise ValueError(
            f"method {name} names no gate, and the shipped one, {folder}, is looked for in the working folder, {Path.cwd()}, which has "
            f"none; run in a clone of learnkv, or give a folder: {name}:folder"
        )
    return folder


def gate_contender(gate: Gate, run: str, line: str, allocator: str = "", num_sinks: int = 4, num_recent: int = 16) -> Contender:
    """A loaded gate as a contender; without an allocator's name by its method's own rule."""
    make = METHODS[gate.METHOD]
    policy = make(WHOLE, allocate=allocator or None, num_sinks=num_sinks, num_recent=num_recent, gate=gate)
    own_rule = make(WHOLE, gate=gate).allocate
    method = gate.METHOD if policy.allocate == own_rule else f"{gate.METHOD}+{allocator}"
    return Contender(line, method, gate.METHOD, name_of(policy.allocate), run, gate_hash(gate), policy)


def name_of(allocate: Allocator) -> str:
    """The allocator's name, or its settings where it has none."""
    return next((name for name, known in ALLOCATORS.items() if known == allocate), repr(allocate))
