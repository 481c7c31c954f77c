"""Blind sheet: answers of the full cache and of a compressed one side by side, in an order that only a key file knows, and their tally."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from scipy.stats import binomtest

from learnkv.evaluation import report
from learnkv.evaluation.report import FULL
from learnkv.evaluation.rows import Row
from learnkv.files import write_atomically
from learnkv.prompts import Prompt
from learnkv.typed import checked

CHOICES = ("A", "B", "tie")
REMAKE = "make the sheet again and judge that one"


@dataclass(frozen=True)
class Item:
    """A question with two answers; `first` is the line that A is of."""

    question: str
    reference: str
    a: str
    b: str
    first: str


@dataclass(frozen=True)
class Sheet:
    """Answers of `line` at a budget beside the full cache's; `same` pairs are left out, whose two texts are equal."""

    line: str
    budget: float
    same: int
    items: list

    @property
    def hash(self) -> str:
        """16 hex digits of what a judge sees, which say nothing of whose an answer is."""
        seen = [[item.question, item.reference, item.a, item.b] for item in self.items]
        return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]

    def save_key(self, folder: Path) -> Path:
        """The key under the sheet's hash, so that a later sheet's does not take its place."""
        path = key_file(folder, self.hash)
        write_atomically(path, lambda to: to.write_text(json.dumps({"sheet": self.hash, **asdict(self)}, indent=1) + "\n"))
        return path


def key_file(folder: Path, name: str) -> Path:
    return folder / f"sheet-{name}.key.json"


def sheet(rows: Sequence[Row], line: str, budget: float, prompts: Mapping[str, Prompt], *, count: int, seed: int) -> Sheet | None:
    """Up to `count` pairs of answers that differ, drawn by `seed`; None where the rows hold no generated answers of the two.

    prompts  id -> prompt; the question and reference of one that is not there stay empty
    """
    own = {(r.prompt, r.question): r for r in rows if r.line == line and r.budget == budget and r.prediction}
    pairs = [(full, own[key]) for full in rows if full.line == FULL and full.prediction and (key := (full.prompt, full.question)) in own]
    if not pairs:
        return None
    rng = Random(f"{seed} {line} {budget}")
    differing = [pair for pair in pairs if pair[0].prediction.strip() != pair[1].prediction.strip()]
    chosen = rng.sample(differing, min(count, len(differing)))
    return Sheet(line, budget, len(pairs) - len(differing), [item(full, other, prompts, rng.random() < 0.5) for full, other in chosen])


def item(full: Row, other: Row, prompts: Mapping[str, Prompt], turned: bool) -> Item:
    asked = prompts[full.prompt].questions[full.question] if full.prompt in prompts else None
    question = f"{asked.text.strip()} {asked.prefix}".strip() if asked else ""
    reference = " / ".join(asked.references or (asked.answer.strip(),)) if asked else ""
    first, second = (other, full) if turned else (full, other)
    return Item(question, reference, first.prediction.strip(), second.prediction.strip(), first.line)


# ---- judged


@dataclass(frozen=True)
class Tally:
    """How often the compressed cache's answer was found better, as good, worse; p is the sign test's, ties left out."""

    line: str
    budget: float
    wins: int
    ties: int
    losses: int
    same: int
    open: int

    @property
    def p(self) -> float:
        decided = self.wins + self.losses
        return float(binomtest(self.wins, decided).pvalue) if decided else 1.0

    def said(self) -> str:
        """One line."""
        judged = f"{self.wins} wins, {self.ties} ties, {self.losses} losses, sign test p = {self.p:.3f}"
        rest = f"; {self.same} pairs of equal texts were not shown" if self.same else ""
        unjudged = f"; {self.open} not judged" if self.open else ""
        return f"{self.line} at {report.show_budget(self.budget)} against the full cache: {judged}{rest}{unjudged}"


def tally(answers: Path, folder: Path) -> Tally:
    """What a judge's answers say, unblinded with the key in the sheet's folder; raises ValueError where the two do not belong together."""
    told = read_json(answers, "answers of a sheet")
    key = key_file(folder, str(told.get("sheet")))
    if not key.is_file():
        there = ", ".join(sorted(path.name for path in folder.glob("sheet-*.key.json"))) or "none"
        raise ValueError(
            f"{answers} is of the sheet {told.get('sheet')}, whose key is not in {folder} (keys there: {there}); give its out="
        )
    made = read_key(key)
    judged = told.get("answers")
    if not isinstance(judged, dict) or set(judged) - {str(i + 1) for i in range(len(made.items))} or set(judged.values()) - {*CHOICES}:
        raise ValueError(
            f"{answers} holds other answers than {', '.join(CHOICES)} to the {len(made.items)} items of its sheet; export it again"
        )
    found = [outcome(made.items[int(number) - 1], choice) for number, choice in judged.items()]
    wins, ties, losses = (found.count(gain) for gain in (1, 0, -1))
    return Tally(made.line, made.budget, wins, ties, losses, made.same, len(made.items) - len(judged))


def outcome(found: Item, choice: str) -> int:
    """1 where the compressed cache's answer was chosen, -1 where the full cache's was, 0 for a tie."""
    if choice == "tie":
        return 0
    return -1 if (choice == "A") == (found.first == FULL) else 1


def read_key(path: Path) -> Sheet:
    """A key whose items are those of its hash."""
    told = read_json(path, "key of a sheet")
    try:
        made = Sheet(told["line"], told["budget"], told["same"], [checked(Item(**each)) for each in told["items"]])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no key of a sheet ({error}); {REMAKE}") from error
    if not made.hash == told["sheet"] == path.name.removeprefix("sheet-").removesuffix(".key.json"):
        raise ValueError(f"{path} was edited: its items have the hash {made.hash}, the sheet {told['sheet']}; {REMAKE}")
    return made


def read_json(path: Path, what: str) -> dict:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as the {what}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no {what}")
    return found
