"""Example: which tokens of one prompt several methods kept, by layer and head and over its text; a model makes it, a file keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from learnkv.evaluation.compare import encode_prompt
from learnkv.evaluation.contenders import Contender
from learnkv.evaluation.diagnosis import diagnose
from learnkv.evaluation.judge import oracle_utility
from learnkv.evaluation.rows import Row, budget_of
from learnkv.files import write_atomically
from learnkv.models import PreTrainedModel, PreTrainedTokenizerBase, describe
from learnkv.policy import Policy
from learnkv.prompts import Prompt
from learnkv.prompts.prompt import asked_inside
from learnkv.typed import checked


@dataclass(frozen=True)
class Kept:
    """What one line kept.

    retention  [layers][H] share of the context's tokens
    shares     [n] per token, the share of all heads of all layers that kept it
    """

    line: str
    retention: list
    shares: list


@dataclass(frozen=True)
class Example:
    """One prompt as several lines left it.

    tokens         of the context, as text
    span           tokens [start, stop) that hold the answer, None where it is not known
    weights_hash   of the model that was run
    question_in_prefix, budget, num_sinks, num_recent    what the lines ran under
    """

    prompt: str
    kind: str
    question: str
    answer: str
    tokens: list
    span: list | None
    model: str
    weights_hash: str
    question_in_prefix: bool
    budget: float
    num_sinks: int
    num_recent: int
    kept: list

    def save(self, path: Path) -> None:
        write_atomically(path, lambda to: to.write_text(json.dumps(asdict(self)) + "\n"))


def load(path: Path) -> Example:
    try:
        values = json.loads(path.read_text())
        return checked(Example(**(values | {"kept": [checked(Kept(**kept)) for kept in values["kept"]]})))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is truncated or was edited ({error}); delete it, or make it again with examples=") from error


def refuse_other(example: Example, row: Row, path: Path) -> None:
    """Raises a ValueError for an example of another model than the rows', or of another protocol."""
    if example.weights_hash != row.weights_hash:
        both = f"{example.model}, weights {example.weights_hash}; the rows are of {row.model}, weights {row.weights_hash}"
        raise ValueError(f"{path} is of {both}; delete it, or make it again with examples=")
    if example.question_in_prefix != row.question_in_prefix:
        raise ValueError(
            f"{path} has the question inside or outside, the rows have it the other way; delete it, or make it again with examples="
        )


def look(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, contenders: Sequence[Contender], budget: float, like: Row
) -> Example:
    """What each contender keeps of a prompt whose first question is asked.

    like  a row of the comparison: the question inside or outside, and the protected tokens
    """
    name, base, first = prompt.id, describe(model), prompt.questions[0]
    prompt = replace(prompt, questions=(first,))
    (encoded, *_) = encode_prompt(model, tokenizer, prompt)
    asked = asked_inside(encoded) if like.question_in_prefix else encoded
    utility = oracle_utility(model, [asked])
    found = [of_line(model, tokenizer, prompt, c, c.at(budget_of(budget), utility), like) for c in contenders]
    tokens = [str(tokenizer.decode([token])) for token in asked.context.tolist()]
    return Example(
        name, prompt.task or prompt.kind, f"{first.text} {first.prefix}".strip(), first.answer.strip(), tokens,
        list(asked.span) if asked.span else None, base.name, base.weights_hash, like.question_in_prefix, budget, like.num_sinks,
        like.num_recent, found,
    )  # fmt: skip


def of_line(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, contender: Contender, policy: Policy, like: Row
) -> Kept:
    found = diagnose(model, tokenizer, [prompt], policy, question="inside" if like.question_in_prefix else "outside")
    shares = found.texts[0].kept.round(4).tolist()
    return Kept(contender.line, found.retention[0].round(4).tolist(), shares)
