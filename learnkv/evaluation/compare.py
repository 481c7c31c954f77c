"""Methods x allocators x budgets on the same prompts: every method evicts from one full-cache prefill, then the question is asked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from learnkv.budgets import Ratio, uniform
from learnkv.evaluation import judge
from learnkv.evaluation.choice import BEST, choose_best
from learnkv.evaluation.claims import Primary
from learnkv.evaluation.contenders import WHOLE, Contender, contenders_of, gate_contender
from learnkv.evaluation.report import FULL, summarise, text_table
from learnkv.evaluation.rows import Cell, Row, RowFile, budget_of, read_rows
from learnkv.gates.base import Gate
from learnkv.geometry import max_positions
from learnkv.heuristics.streaming_llm import StreamingLLM
from learnkv.models import BaseModel, PreTrainedModel, describe
from learnkv.names import unknown
from learnkv.policy import Policy
from learnkv.prompts import Encoded, Prompt, Question, encode
from learnkv.prompts.haystack import Split
from learnkv.prompts.kinds import KINDS
from learnkv.prompts.prompt import Tokenizer, asked_inside
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import prefill_many
from learnkv.tasks import TASKS
from learnkv.tasks import named as task_named

ASKED_TOGETHER = 32  # caches that one forward asks
QUICK = ["random", "oracle", "streaming_llm", "key_diff", "key_norm", "snapkv", "h2o"]


@dataclass
class EvaluateSettings:
    """What a comparison runs: methods x budgets on `count` prompts of each size."""

    methods: list[str] = field(default_factory=list)  # name(knob=value)+allocator:gate folder; full cache, random and oracle always run
    budgets: list[float] = field(default_factory=lambda: [0.5, 0.2, 0.1])  # below 1 a fraction of the context, else tokens per KV head
    kinds: list[str] = field(default_factory=list)  # kinds of generated prompts, in turn; the answer's tokens are matched
    tasks: list[str] = field(default_factory=list)  # tasks, `count` prompts of each; answers are generated and judged by the task's metric
    source: str = ""  # folder of NAME.jsonl, for tasks whose prompts are else read from a hub
    floor: float = 0.0  # least mean score of the full cache: what it reaches less in is told, and no method is run on it
    split: Split = "heldout"  # of the kinds: train, dev or heldout
    count: int = 200  # prompts of each size, of the kinds together and of each task
    questions: int = 1  # asked of each prompt; 0 asks all it has
    question: Literal["outside", "inside"] = "outside"  # inside: it is part of what is compressed, all but its last token
    num_tokens: list[int] = field(
        default_factory=lambda: [750]
    )  # sizes: of a kind's context, of a task's prompt and generation together, tokens
    seed: int = 0  # of the prompts
    num_sinks: int = 4  # first tokens that always stay
    num_recent: int = 16  # last tokens that always stay
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of model and cache
    groups: dict[str, list[str]] = field(default_factory=dict)  # name -> kinds that also have a table together
    primary: Primary = field(default_factory=Primary)  # the endpoint that is declared before a run
    choose: str = ""  # rows of a development run: each heuristic in it also runs with its best settings and allocator
    out: str = "data/comparisons/compare"  # folder of rows, tables and plot

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("questions", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"evaluate.{name}={getattr(self, name)} is below {least}; give {least} or more")
        for name in ("budgets", "num_tokens"):
            if not getattr(self, name):
                raise ValueError(f"evaluate.{name} is empty, so there is nothing to compare; give one or more")
        for task in self.tasks:
            task_named(task)
        if not 0 <= self.floor <= 1:
            raise ValueError(f"evaluate.floor={self.floor:g} is a mean score; give a number from 0 to 1")
        for topic in (topic for topics in self.groups.values() for topic in topics):
            if topic not in KINDS and topic not in TASKS:
                raise unknown("prompt kind or task in evaluate.groups:", topic, {**KINDS, **TASKS})
        if self.primary.group and self.primary.group not in self.groups:
            raise unknown("group in evaluate.primary:", self.primary.group, self.groups)


@dataclass(frozen=True)
class Plan:
    """A contender at a budget: one row per question."""

    contender: Contender
    budget: int | Ratio


@dataclass(frozen=True)
class Asked:
    """A row to be: which question of its prompt, by which plan; `first` is the number of the first question of its prefill."""

    cell: Cell
    plan: Plan
    first: int
    question: Question


Work = tuple[list[Encoded], list[Asked]]  # what one prefill serves


def plan(contenders: Sequence[Contender], budgets: Sequence[float]) -> list[Plan]:
    """Every contender at every budget as it was typed, the full cache once; each policy is made once to refuse what it must."""
    plans = [Plan(c, budget_of(b)) for c in contenders if c.scorer != "full" for b in budgets]
    for each in plans:
        replace(each.contender.policy, budget=each.budget)
    return [Plan(c, WHOLE) for c in contenders if c.scorer == "full"] + plans


def plan_chosen(
    rows: Sequence[Row], budgets: Sequence[float], model: PreTrainedModel, tokenizer: Tokenizer, num_sinks: int, num_recent: int
) -> list[Plan]:
    """What the rows of a development run choose: each heuristic at its best settings per budget, and the best of them all."""
    plans = []
    for budget in budgets:
        best = choose_best(rows, budget)
        lines = {f"{scorer} (chosen)": method for scorer, method in best.items()}
        if len(best) > 1:
            lines = {BEST: next(iter(best.values())), **lines}
        opened = {c.method: c for c in contenders_of(list(best.values()), model, tokenizer, num_sinks, num_recent)}
        plans += plan([replace(opened[method], line=line) for line, method in lines.items()], [budget])
    return plans


def compare(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    plans: Sequence[Plan],
    *,
    path: Path | None = None,
    question: Literal["outside", "inside"] = "outside",
    progress: Callable[[list[Work]], Iterable[Work]] = iter,
) -> list[Row]:
    """The rows of every plan on every question of every prompt.

    question  whether what is evicted is chosen before the question is known; inside, each question has a prefill of its own
    path      JSONL file to which each row is appended at once; rows already there are not measured again
    progress  wraps the list of prompts that still have rows to measure, as tqdm does
    returns   rows in the order prompts, questions, plans, those found in the file included
    """
    store = RowFile(path) if path else None
    done = dict(store.done) if store else {}
    bench = Bench(model, tokenizer, describe(model))
    works = works_of(bench, prompts, plans, question)
    for encoded, todo in progress(left_of(works, done)):
        for row in named_rows(bench, encoded, todo):
            done[row.key] = row
            if store:
                store.append(row)
    rows = [replace(done[a.cell.key], **named(a.cell)) for _, asked in works for a in asked]
    if store:
        store.show(rows)
    return rows


def named_rows(bench: Bench, encoded: list[Encoded], asked: list[Asked]) -> Iterator[Row]:
    """The rows of one prompt, which an error names."""
    try:
        yield from bench.rows(encoded, asked)
    except ValueError as error:
        cell = asked[0].cell
        raise ValueError(f"prompt {cell.prompt} ({cell.kind}, {cell.num_tokens} tokens): {error}; or leave that prompt out") from error


@dataclass(frozen=True)
class Estimate:
    """What is left of a comparison, and how long it will take."""

    rows: int
    prompts: int
    seconds: float


def estimate(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    plans: Sequence[Plan],
    *,
    path: Path,
    question: Literal["outside", "inside"] = "outside",
) -> Estimate:
    """Measured on the prompt with the most work, run twice: at first every method is timed as well, which a comparison does once.

    path  rows that are there count as done; nothing is written
    """
    bench = Bench(model, tokenizer, describe(model))
    done = {row.key: row for row in read_rows(path)} if path.exists() else {}
    left = left_of(works_of(bench, prompts, plans, question), done)
    if not left:
        return Estimate(0, 0, 0.0)
    most = max(left, key=work_of)
    first, again = (seconds_of(bench, most) for _ in range(2))
    others = sum(map(work_of, left)) / work_of(most) - 1
    prompted = {asked[0].cell.prompt for _, asked in left}
    return Estimate(sum(len(asked) for _, asked in left), len(prompted), first + again * others)


def seconds_of(bench: Bench, work: Work) -> float:
    began = time.perf_counter()
    for _ in bench.rows(*work):
        pass
    return time.perf_counter() - began


def work_of(work: Work) -> int:
    """What a prompt's time goes with: tokens of its context x rows."""
    encoded, asked = work
    return len(encoded[0].context) * len(asked)


def works_of(bench: Bench, prompts: Sequence[Prompt], plans: Sequence[Plan], question: str) -> list[Work]:
    """What every prefill of a comparison serves."""
    encoded = ((prompt, encode_prompt(bench.model, bench.tokenizer, prompt)) for prompt in prompts)
    return [work for prompt, asked in encoded for work in bench.works(prompt, asked, plans, question == "inside")]


def left_of(works: Sequence[Work], done: Mapping[str, Row]) -> list[Work]:
    """The measurements that are not done, each once whatever lines show it."""
    return [(encoded, todo) for encoded, asked in works if (todo := unique([a for a in asked if not is_done(a.cell, done)]))]


def is_done(cell: Cell, done: Mapping[str, Row]) -> bool:
    """A prompt whose tokens are others than when it was measured, through another chat template, is not."""
    row = done.get(cell.key)
    return row is not None and (row.tokens == cell.tokens or not row.tokens)


def quick_table(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    gate: Gate,
    budgets: Sequence[float],
    question: Literal["outside", "inside"] = "outside",
) -> str:
    """A gate beside the full cache, random, the oracle, heuristics and a lexical rule, as a text table; nothing is written.

    The gate splits the budget as its method is served, and by one more rule.
    """
    contenders = [*served(gate), *contenders_of([*QUICK, "kvzip", "keep_digits"], model, tokenizer)]
    return text_table(summarise(compare(model, tokenizer, prompts, plan(contenders, budgets), question=question)))


def served(gate: Gate) -> list[Contender]:
    """The gate by its method's own rule, and by one budget over all heads, or by uniform where that is its own."""
    own = gate_contender(gate, run="", line=gate.METHOD)
    other = "uniform" if own.allocator == "adaptive_global" else "adaptive_global"
    return [own, gate_contender(gate, run="", line=f"{gate.METHOD}+{other}", allocator=other)]


def batched(asked: Sequence[Asked], size: int) -> Iterator[list[Asked]]:
    """Runs of at most `size`."""
    rest = iter(asked)
    while run := list(islice(rest, size)):
        yield run


def unique(asked: Sequence[Asked]) -> list[Asked]:
    """One of each measurement, whatever lines show it."""
    return list({a.cell.key: a for a in asked}.values())


def named(cell: Cell) -> dict:
    """A cell's fields: rows found in the file take on the lines of this run."""
    return {f.name: getattr(cell, f.name) for f in fields(Cell)}


def encode_prompt(model: PreTrainedModel, tokenizer: Tokenizer, prompt: Prompt) -> list[Encoded]:
    """Each question of a prompt as tokens on the model's device; a question without tokens borrows the context's last one.

    Raises ValueError for what cannot be run: no answer, a context of fewer than 2 tokens, more tokens than the model has positions.
    """
    encoded = [encode(tokenizer, prompt, question) for question in prompt.questions]
    borrowed = int(any(len(e.question) == 0 for e in encoded))
    context = encoded[0].context[: len(encoded[0].context) - borrowed]
    device, found = model.device, []
    for e in encoded:
        question = torch.cat([e.context[len(context) :], e.question])
        found.append(replace(e, context=context.to(device), question=question.long().to(device), answer=e.answer.long().to(device)))
    refuse_unusable(prompt, found, max_positions(model))
    return found


def refuse_unusable(prompt: Prompt, encoded: Sequence[Encoded], max_tokens: float) -> None:
    where = f"prompt {prompt.id} ({prompt.kind}, {prompt.context[:40]!r}...)"
    longest = TASKS[prompt.task].max_new_tokens if prompt.task else 0
    for e in encoded:
        total = len(e.context) + len(e.question) + max(len(e.answer), longest)
        if len(e.context) < 2:
            raise ValueError(f"{where}: its context is {len(e.context)} tokens; there is nothing to evict from fewer than 2")
        if len(e.answer) == 0:
            raise ValueError(f"{where}: its answer has no tokens, so there is nothing to compare; give an answer")
        if total > max_tokens:
            raise ValueError(f"{where}: {total} tokens with question and answer, the model has {max_tokens} positions; shorten the context")


def hash_of(encoded: Encoded) -> str:
    """8 hex digits of the tokens that the model sees."""
    ids = [part.tolist() for part in (encoded.context, encoded.question, encoded.answer)]
    return sha256(json.dumps(ids).encode()).hexdigest()[:8]


@dataclass
class Bench:
    """A model on which prompts are run, and the seconds that a prefill took with each method (measured once)."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    base: BaseModel
    costs: dict[str, float] = field(default_factory=dict)

    def works(self, prompt: Prompt, encoded: list[Encoded], plans: Sequence[Plan], inside: bool) -> Iterator[Work]:
        """What one prefill serves: every question by every plan, or one question that is inside by every plan."""
        for first, asked in [(q, [asked_inside(e)]) for q, e in enumerate(encoded)] if inside else [(0, encoded)]:
            size = len(asked[0].context)
            hashes = [hash_of(e) for e in asked]
            cells = [(self.cell(prompt, first + q, size, p, inside, tokens), p) for q, tokens in enumerate(hashes) for p in plans]
            yield asked, [Asked(cell, p, first, prompt.questions[cell.question]) for cell, p in cells]

    def cell(self, prompt: Prompt, question: int, num_tokens: int, plan: Plan, inside: bool, tokens: str) -> Cell:
        contender, budget = plan.contender, plan.budget
        return Cell(
            prompt=prompt.id,
            kind=prompt.kind,
            split=prompt.split,
            question=question,
            num_tokens=num_tokens,
            line=contender.line,
            method=contender.method,
            scorer=contender.scorer,
            allocator=contender.allocator,
            run=contender.run,
            gate=contender.gate,
            budget=budget.kept if isinstance(budget, Ratio) else float(budget),
            budget_form="ratio" if isinstance(budget, Ratio) else "tokens",
            question_in_prefix=inside,
            prefill="one-shot",
            num_sinks=contender.policy.num_sinks,
            num_recent=contender.policy.num_recent,
            model=self.base.name,
            weights_hash=self.base.weights_hash,
            rope=self.base.rope_hash,
            dtype=str(self.model.dtype).removeprefix("torch."),
            task=prompt.task,
            tokens=tokens,
        )

    @torch.no_grad()
    def rows(self, encoded: Sequence[Encoded], asked: Sequence[Asked]) -> Iterator[Row]:
        """The rows of one prompt: one prefill for all policies, then each question put to ASKED_TOGETHER caches at once."""
        context = encoded[0].context[None]
        plans = list(dict.fromkeys(a.plan for a in asked))
        known = judge.oracle_utility(self.model, encoded) if any(p.contender.scorer == "oracle" for p in plans) else None
        policies = [p.contender.at(p.budget, known) for p in plans]
        with attach(self.model):
            costs = [self.cost(p.contender, policy, context) for p, policy in zip(plans, policies, strict=True)]
            caches = prefill_many(self.model, context, policies, pins=encoded[0].pins)
            of_plan = dict(zip(plans, zip(caches, costs, strict=True), strict=True))
            for same in batched(sorted(asked, key=lambda a: a.cell.question), ASKED_TOGETHER):
                held = [of_plan[a.plan][0] for a in same]
                questions = [(encoded[a.cell.question - a.first], a.question) for a in same]
                judged = judge.judged(self.model, self.tokenizer, held, questions, same[0].cell.task)
                for a, figures in zip(same, judged, strict=True):
                    prefill, extra = of_plan[a.plan][1]
                    yield Row(**named(a.cell), **figures, prefill_seconds=prefill, extra_seconds=extra)

    def cost(self, contender: Contender, policy: Policy, context: Tensor) -> tuple[float, float]:
        """Seconds of one full-cache prefill, and what the contender's passes, scoring and eviction add; seen once, on the first prompt.

        The least of a few tries: whatever else the machine does can only add.
        """
        if FULL not in self.costs:
            plain = replace(policy, scorer=StreamingLLM(), budget=WHOLE, allocate=uniform)
            self.costs[FULL] = min(self.prefill_seconds(plain, context) for _ in range(3))
        if contender.method not in self.costs:
            self.costs[contender.method] = min(self.prefill_seconds(policy, context) for _ in range(2))
        extra = self.costs[contender.method] - self.costs[FULL]
        return self.costs[FULL], 0.0 if contender.scorer == "full" else max(0.0, extra)

    def prefill_seconds(self, policy: Policy, context: Tensor) -> float:
        start = time.perf_counter()
        (cache,) = prefill_many(self.model, context, [policy])
        cache.lengths().sum().item()  # waits for the device
        return time.perf_counter() - start
