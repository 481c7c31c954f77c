"""What RULER's tasks are made of, read at run time from the wheels of NVIDIA's evaluation (asset `ruler`) and of wonderwords.

Templates, essays, SQuAD and HotpotQA belong to others and are not part of this project.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from learnkv import assets


def folder() -> Path:
    """Where the original generators and their data lie."""
    return assets.fetch("ruler") / "long_context_eval" / "data" / "synthetic"


def literal(script: str, name: str) -> object:
    """What a script of the original assigns to `name`, wherever in it, as a literal; nothing of the script is run."""
    for node in ast.walk(ast.parse((folder() / script).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Constant | ast.Dict):
            return ast.literal_eval(node.value)
    raise ValueError(f"{folder() / script} assigns no literal to {name}; remove the folder and let it be fetched again")


@dataclass(frozen=True)
class Template:
    """How a task puts its prompt: what stands before the context, what follows it, and how the answer begins; with {slots}."""

    head: str
    tail: str
    prefix: str

    def replaced(self, old: str, new: str) -> Template:
        return Template(*(part.replace(old, new) for part in (self.head, self.tail, self.prefix)))

    def filled(self, context: str, **slots: str) -> Worded:
        """The prompt's parts; the blanks between context and question belong to the context."""
        tail = self.tail.format(**slots)
        question = tail.lstrip()
        blanks = tail[: len(tail) - len(question)]
        return Worded(self.head.format(**slots) + context + blanks, question, self.prefix.format(**slots).removeprefix(" "))


@dataclass(frozen=True)
class Worded:
    """A prompt's parts in their final words; `text` is what the original writes as its input."""

    context: str
    question: str
    prefix: str

    @property
    def text(self) -> str:
        return f"{self.context}{self.question} {self.prefix}"


@cache
def template(task: str) -> Template:
    """The template of one of the original's five families."""
    tasks = literal("constants.py", "TASKS")
    assert isinstance(tasks, dict)
    head, _, tail = tasks[task]["template"].partition("{context}")
    return Template(head, tail, tasks[task]["answer_prefix"])


@cache
def text(script: str, name: str) -> str:
    """A sentence or format that a script of the original assigns to `name`."""
    return str(literal(script, name))


@cache
def essays() -> list[str]:
    """The words of Paul Graham's essays."""
    whole = json.loads((folder() / "json" / "PaulGrahamEssays.json").read_text(encoding="utf-8"))["text"]
    return re.sub(r"\s+", " ", whole).split(" ")


def sentences(text: str) -> list[str]:
    """The sentences of a text with single blanks.

    Differs: the original takes nltk's punkt, whose data can't be had here.  Joined again they are the same text; only the place of a
    needle may be another where a full stop ends no sentence.
    """
    return re.split(r"(?<=[.!?]) (?=\S)", text.strip()) if text.strip() else []


@cache
def vocabulary(*lists: str) -> list[str]:
    """The words of wonderwords' lists, as in vocabulary("noun", "verb"), in the order of the lists."""
    places = [assets.fetch("wonderwords") / "wonderwords" / "assets" / f"{name}list.txt" for name in lists]
    return [line.rstrip() for place in places for line in place.read_text(encoding="utf-8").splitlines()]


class WordPairs(Sequence[str]):
    """Every adjective-noun once, in alphabetical order: 6 million, of which few are held."""

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        groups: list[list[str]] = []
        for head in sorted({f"{adjective}-" for adjective in adjectives}):
            if groups and head.startswith(groups[-1][0]):  # the pairs of blue- and blue-eyed- lie among each other
                groups[-1].append(head)
            else:
                groups.append([head])
        nouns = sorted(set(nouns))
        self.runs = [(first, nouns if not others else merged(first, others, nouns)) for first, *others in groups]
        self.ends = list(accumulate(len(rest) for _, rest in self.runs))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        run = bisect_right(self.ends, index)
        head, rest = self.runs[run]
        return head + rest[index - self.ends[run]]


def merged(first: str, others: list[str], nouns: list[str]) -> list[str]:
    """What follows `first` in the pairs of it and of heads that begin with it, in order."""
    return sorted({*nouns, *(head.removeprefix(first) + noun for head in others for noun in nouns)})


@cache
def word_pairs() -> WordPairs:
    """The words that keys of needles are made of."""
    return WordPairs(vocabulary("adjective"), vocabulary("noun"))


@dataclass(frozen=True)
class Asked:
    """A question about documents: the texts that answer it, the documents it was made from, and others of the same article, by number."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Library:
    """Documents, and what is asked about them."""

    documents: tuple[str, ...]
    questions: tuple[Asked, ...]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of SQuAD with its answerable questions: (question, answers)."""

    text: str
    questions: tuple[tuple[str, tuple[str, ...]], ...]


@cache
def articles() -> list[list[Paragraph]]:
    """SQuAD's articles (arXiv:1806.03822, the dev set): 35 of them, of 1,204 paragraphs."""
    data = json.loads((folder() / "json" / "squad.json").read_text(encoding="utf-8"))["data"]
    return [[Paragraph(p["context"], answerable(p["qas"])) for p in article["paragraphs"]] for article in data]


def answerable(asked: list[dict]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((q["question"], tuple(a["text"] for a in q["answers"])) for q in asked if not q["is_impossible"])


@cache
def squad() -> Library:
    """SQuAD's paragraphs as documents; those of a question's article are related to it."""
    documents = sorted({p.text for article in articles() for p in article})
    number = {document: i for i, document in enumerate(documents)}
    questions = []
    for article in articles():
        own = [number[p.text] for p in article]
        for p in article:
            related = tuple(i for i in own if i != number[p.text])
            questions += [Asked(question, answers, (number[p.text],), related) for question, answers in p.questions]
    return Library(tuple(documents), tuple(questions))


@cache
def hotpotqa() -> Library:
    """HotpotQA's documents (arXiv:1809.09600, dev set with distractors), ten for each of 7,405 questions."""
    rows = hotpotqa_rows()
    documents = sorted({document for row in rows for document in row.documents})
    number = {document: i for i, document in enumerate(documents)}
    questions = [Asked(row.question, (row.answer,), tuple(number[d] for d in row.documents)) for row in rows]
    return Library(tuple(documents), tuple(questions))


@dataclass(frozen=True)
class HotpotQuestion:
    """A question of HotpotQA: `kind` is bridge or comparison; its documents, each a title and text, and which of them tell the answer."""

    question: str
    answer: str
    kind: str
    documents: tuple[str, ...]
    telling: tuple[str, ...]

    @property
    def distracting(self) -> list[str]:
        return [document for document in self.documents if document not in self.telling]


@cache
def hotpotqa_rows() -> list[HotpotQuestion]:
    data = json.loads((folder() / "json" / "hotpotqa.json").read_text(encoding="utf-8"))
    return [hotpot_question(row) for row in data]


def hotpot_question(row: dict) -> HotpotQuestion:
    titled = {title: f"{title}\n{''.join(parts)}" for title, parts in row["context"]}
    telling = dict.fromkeys(titled[title] for title, _ in row["supporting_facts"])
    return HotpotQuestion(row["question"], row["answer"], row["type"], tuple(titled.values()), tuple(telling))
