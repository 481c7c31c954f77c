"""What every method promises under every allocator on every kind of model; methods are the registry's, so new ones are held to it too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from learnkv.budgets import ALLOCATORS, Allocator, PerHead, Threshold
from learnkv.gates import GATES
from learnkv.methods import METHODS
from learnkv.models import BaseModel, describe
from learnkv.observation import Observation, Scorer
from learnkv.policy import Policy
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from learnkv.runtime.pages import Pages
from learnkv.runtime.step import Target
from tests.tiny_models import generate, left_padded, masked_logits, prompt, tiny

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


# ---- how each method is made: a new one that needs a knob gets a line in KNOBS, one that needs a long prompt a line in SETTINGS


class Letters:
    """A tokenizer of 97 tokens whose text is their number."""

    def __len__(self) -> int:
        return 97

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return [" ".join("abcdefg1"[i % 8] for i in ids) for ids in sequences]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [2 + ord(letter) % 90 for letter in text[:3]]


def made_gate(name: str, base: BaseModel) -> object:
    torch.manual_seed(0)
    gate = GATES[name]
    return gate(gate.Config(**GATE_CONFIGS.get(name, {})), base).eval()


@cache
def table_of(num_layers: int, num_heads: int) -> str:
    """The file of a table of heads that are worth more and more."""
    path = Path(mkdtemp()) / "heads.json"
    path.write_text(json.dumps([[1 + layer + head for head in range(num_heads)] for layer in range(num_layers)]))
    return str(path)


# knob without a default -> its value for a method and a model
KNOBS: dict[str, Callable[[str, BaseModel], object]] = {
    "tokenizer": lambda name, base: Letters(),
    "utility": lambda name, base: torch.rand(base.num_layers, base.num_kv_heads, 60, generator=torch.Generator().manual_seed(0)),
    "gate": made_gate,
    "filters": lambda name, base: torch.randn(
        base.num_layers, base.num_kv_heads, base.head_dim, generator=torch.Generator().manual_seed(0)
    ),
    "table": lambda name, base: table_of(base.num_layers, base.num_kv_heads),
}
# small sizes, so that 40 tokens are many
SETTINGS: dict[str, dict[str, object]] = {
    "lagkv": dict(lag=8),
    "chunkkv": dict(chunk_size=5),
    "kvzip": dict(chunk_size=25),
    "dapq": dict(num_tokens=6),
    "expected_attention": dict(future=8),
    "simlayerkv": dict(first=2, recent=6, threshold=0.3),
}
GATE_CONFIGS: dict[str, dict[str, object]] = {
    "kvp": dict(branch_width=6, width=10),
    "fast_kvzip": dict(width=4, num_sinks=3),
    "foresight": dict(width=6, inner_width=4),
    "kvzap": dict(width=6),
    "locret": dict(width=6),
    "trimkv": dict(width=6),
    "dms": dict(window=4),
    "lookaheadkv": dict(num_tokens=5, rank=2),
    "judge_q": dict(num_tokens=5),
}

SPLITS: dict[str, Callable[[BaseModel], Allocator]] = {
    **{name: lambda base, rule=rule: rule for name, rule in ALLOCATORS.items()},
    "per_head": lambda base: PerHead(tuple(tuple(1.0 + h + i for h in range(base.num_kv_heads)) for i in range(base.num_layers)), beta=1.5),
    "threshold": lambda base: Threshold(0.02),
}
MODELS = ("llama", "qwen3", "gemma3")
BUDGET, SINKS, RECENT = 14, 2, 4
ALL = 10_000


class Case(NamedTuple):
    method: str
    allocate: str
    model: str


def all_pairs(*factors: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Combinations in which each value of a factor meets each value of every other: the next is the one with most new meetings."""
    meetings = {combo: set(combinations(enumerate(combo), 2)) for combo in product(*factors)}
    left, chosen = set().union(*meetings.values()), []
    while left:
        chosen.append(max(meetings, key=lambda combo: len(meetings[combo] & left)))
        left -= meetings[chosen[-1]]
    return chosen


FACTORS = (tuple(METHODS), tuple(SPLITS), MODELS)
FAST = set(all_pairs(*FACTORS))
CASES = [pytest.param(Case(*combo), id="-".join(combo), marks=[] if combo in FAST else [pytest.mark.slow]) for combo in product(*FACTORS)]
every_case = pytest.mark.parametrize("case", CASES)


@cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny(name, dtype=dtype)


@cache
def base_of(name: str) -> BaseModel:
    return describe(model_of(name))


def policy_of(case: Case, budget: int = BUDGET, num_recent: int = RECENT) -> Policy:
    base = base_of(case.model)
    unknown = [knob for knob in METHODS[case.method].requires if knob not in KNOBS]
    assert not unknown, f"{case.method} has no default for {', '.join(unknown)}: say in KNOBS of {__file__} how to make one"
    knobs = {knob: KNOBS[knob](case.method, base) for knob in METHODS[case.method].requires} | SETTINGS.get(case.method, {})
    rule = Threshold(-float("inf")) if (case.allocate, budget) == ("threshold", ALL) else SPLITS[case.allocate](base)
    made = METHODS[case.method](budget, num_sinks=SINKS, num_recent=num_recent, **knobs)
    return replace(made, allocate=rule)  # of the method's own rule too, which may lie in a table


class Stage(NamedTuple):
    """After one forward: logits [B, V] of the last column, per layer [B, H, L] the positions held, and [*] all scores that were given."""

    logits: Tensor
    held: list[Tensor]
    scores: Tensor

    def lengths(self, row: int) -> Tensor:
        """[layers, H]"""
        return torch.stack([(positions[row] >= 0).sum(-1) for positions in self.held])


@dataclass(frozen=True)
class Noting(Policy):
    """A policy that notes the scores it is given."""

    given: list[Tensor] = field(default_factory=list)

    def mask(self, scores: Tensor, obs: Observation, pinned: Tensor) -> Tensor:
        self.given.append(scores[obs.filled].flatten())
        return super().mask(scores, obs, pinned)


ROWS = (prompt(40, seed=3)[0], prompt(23, seed=4)[0])


def run(case: Case, rows: tuple[Tensor, ...], dtype: torch.dtype = torch.float32, decoded: int = 2) -> list[Stage]:
    """A prefill of rows in one batch, then steps of one token, each of which evicts."""
    model, policy = model_of(case.model, dtype), Noting(**vars(policy_of(case)))
    ids, mask = left_padded(list(rows))
    stages = []
    with attach(model):
        cache = EvictionCache(policy, model)
        for step in range(1 + decoded):
            rope = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = model(ids, attention_mask=mask, position_ids=rope, cache=cache)
            stages.append(Stage(out.logits[:, -1], cache.kept_positions(), torch.cat(policy.given)))
            ids = prompt(1, seed=step).expand(len(rows), 1)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
    return stages


@cache
def batch_run(case: Case) -> list[Stage]:
    with torch.no_grad():
        return run(case, ROWS)


@cache
def plain_generation(name: str) -> Tensor:
    ids, mask = left_padded(list(ROWS))
    with torch.no_grad():
        return generate(model_of(name), ids, n=5, attention_mask=mask)


# ---- the contract


@every_case
def test_a_full_budget_is_the_plain_model_token_for_token(case):
    ids, mask = left_padded(list(ROWS))
    model = model_of(case.model)
    with attach(model):
        got = generate(model, ids, EvictionCache(policy_of(case, ALL), model), n=5, attention_mask=mask)
    assert torch.equal(got, plain_generation(case.model))


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_cache_inside_attach_is_the_plain_model_token_for_token(name):
    model, (ids, mask) = model_of(name), left_padded(list(ROWS))
    with attach(model):
        got = generate(model, ids, DynamicCache(config=model.config), n=5, attention_mask=mask)
    assert torch.equal(got, plain_generation(name))


@every_case
def test_what_is_evicted_is_as_if_masked(case):
    model, ids, new = model_of(case.model), prompt(40), prompt(6, seed=2)
    with attach(model):
        cache = EvictionCache(policy_of(case), model)
        model(ids, cache=cache)
        held, cache.frozen = cache.kept_positions(), True
        got = torch.cat([model(part, cache=cache).logits for part in new.split([1, 5], 1)], 1)
    assert any((positions >= 0).sum() < positions.shape[1] * 40 for positions in held)
    torch.testing.assert_close(got, masked_logits(model, ids, new, held), atol=1e-5, rtol=0)


@every_case
def test_a_left_padded_row_is_that_row_alone(case):
    for b, row in enumerate(ROWS):
        for together, alone in zip(batch_run(case), run(case, (row,)), strict=True):
            for mine, own in zip(together.held, alone.held, strict=True):
                assert torch.equal(mine[b, :, : own.shape[2]], own[0]) and (mine[b, :, own.shape[2] :] == -1).all()
            torch.testing.assert_close(together.logits[b], alone.logits[0], atol=1e-5, rtol=0)


@every_case
def test_kept_counts_are_what_the_allocator_promises(case):
    base = base_of(case.model)
    spans = SPLITS[case.allocate](base).spans
    for step, stage in enumerate(batch_run(case)):
        for b, row in enumerate(ROWS):
            lengths, each = stage.lengths(b), min(BUDGET, len(row) + step)
            if spans == "nothing":
                assert (lengths <= each).all()
            elif spans == "layer":
                assert lengths.sum(1).tolist() == [base.num_kv_heads * each] * base.num_layers
            else:
                assert lengths.sum() == base.num_layers * base.num_kv_heads * each


@every_case
def test_sinks_and_the_recent_window_stay_through_prefill_and_decode(case):
    for step, stage in enumerate(batch_run(case)):
        for b, row in enumerate(ROWS):
            n = len(row) + step
            for head in [head for positions in stage.held for head in positions[b].tolist()]:
                assert {*range(SINKS), *range(n - RECENT, n)} <= set(head)


@every_case
def test_a_second_run_keeps_the_same_and_says_the_same(case):
    for first, second in zip(batch_run(case), run(case, ROWS), strict=True):
        assert torch.equal(first.logits, second.logits)
        assert all(torch.equal(a, b) for a, b in zip(first.held, second.held, strict=True))


HIGHEST = {"expected_attention"}  # its docstring puts the first tokens above all others, which it says with +inf


@every_case
def test_scores_are_numbers_in_full_and_half_precision(case):
    for stage in (batch_run(case)[-1], run(case, ROWS, torch.float16, decoded=1)[-1]):
        assert stage.scores.isfinite().all() or case.method in HIGHEST
        assert not (stage.scores.isnan() | (stage.scores == -float("inf"))).any()


# a token's score is decided when it is born and by nothing that eviction changes: its position, its id
BY_TOKEN = {"streaming_llm", "sliding_window", "random", "oracle", "keep_digits"}
# likewise, by its key, value or hidden state: which eviction changes in all layers but the first that evicts
BY_KEY = {"key_norm", "fast_kvzip", "kvzap", "locret"}


@pytest.mark.parametrize("case", [param for param in CASES if param.values[0].method in BY_TOKEN | BY_KEY])
def test_a_chunked_prefill_keeps_what_one_prefill_keeps_where_scores_never_change(case):
    """Without a recent window, whose tokens displace others for a while; with chunks of one token, which are decode steps."""
    model, ids = model_of(case.model), prompt(40)
    with attach(model):
        held = []
        for sizes in ([40], [9, 1, 17, 1, 1, 11]):
            cache = EvictionCache(policy_of(case, num_recent=0), model)
            for chunk in ids.split(sizes, 1):
                model(chunk, cache=cache)
            held.append(cache.kept_positions())
    alike = range(len(held[0])) if case.method in BY_TOKEN else [] if case.allocate == "adaptive_global" else [0]
    assert all(torch.equal(held[0][layer], held[1][layer]) for layer in alike)


# ---- input at the edge of what there is


def method_policy(method: str, budget: int, **rules: int) -> Policy:
    """A method on the tiny Llama, each head with the same budget."""
    return replace(policy_of(Case(method, "uniform", "llama"), ALL), budget=budget, **rules)


@pytest.mark.parametrize(
    "rules", [dict(num_sinks=0, num_recent=0), dict(num_sinks=0, num_recent=1), dict(num_sinks=1, num_recent=0)], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_a_budget_of_one_token_is_held(method, rules):
    model = model_of("llama")
    with attach(model):
        cache = EvictionCache(method_policy(method, 1, **rules), model)
        generate(model, prompt(20), cache, n=3)
    assert cache.lengths().sum() == cache.lengths().numel()


@pytest.mark.parametrize("method", METHODS)
def test_prompts_shorter_than_any_window_under_a_full_budget_are_the_plain_models(method):
    model, policy = model_of("llama"), method_policy(method, ALL)
    for n in (1, 2, 5):
        with attach(model):
            got = generate(model, prompt(n), EvictionCache(policy, model), n=3)
        assert torch.equal(got, generate(model, prompt(n), n=3))


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_that_comes_token_by_token_is_held_within_its_budget_at_each(method):
    model = model_of("llama")
    with attach(model):
        cache = EvictionCache(method_policy(method, 6, num_recent=2), model)
        for n, token in enumerate(prompt(12).split(1, 1), 1):
            assert model(token, cache=cache).logits.isfinite().all()
            assert cache.lengths().sum() == cache.lengths().numel() * min(n, 6)


@pytest.mark.parametrize("method", METHODS)
def test_a_row_of_padding_only_holds_nothing_and_disturbs_no_other(method):
    model, policy = model_of("llama"), method_policy(method, 12, num_recent=RECENT)
    ids, mask = prompt(20, rows=2), torch.ones(2, 20, dtype=torch.int64)
    mask[0] = 0
    with attach(model):
        both, alone = EvictionCache(policy, model), EvictionCache(policy, model)
        model(ids, attention_mask=mask, cache=both)
        model(ids[1:], cache=alone)
        got = model(ids[:, :3], attention_mask=torch.cat([mask, mask[:, :3]], 1), cache=both).logits
        want = model(ids[1:, :3], cache=alone).logits
    assert both.lengths()[:, 0].sum() == 0 and got.isfinite().all()
    torch.testing.assert_close(got[1:], want, atol=1e-5, rtol=0)


# ---- what is protected, over a thousand evictions


@dataclass(frozen=True, eq=False)
class Dice(Scorer):
    """Another random score each time."""

    generator: torch.Generator

    def score(self, obs: Observation) -> Tensor:
        return torch.randn(obs.positions.shape, generator=self.generator)


PINS = [(0, 10, 14), (2, 0, 3), (2, 100, 103), (1, 7, 8)]


def protected(row: int, n: int) -> set[int]:
    pinned = {p for b, start, stop in PINS if b == row for p in range(start, min(stop, n))}
    return {*range(min(SINKS, n)), *range(max(0, n - RECENT), n), *pinned}


def test_protected_tokens_survive_a_thousand_random_evictions_of_pages():
    dice, rules = torch.Generator().manual_seed(0), (ALLOCATORS["uniform"], ALLOCATORS["adaptive"], ALLOCATORS["adaptive_global"])
    seen, tokens = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, 1, 4)
    pages = Pages.empty(torch.ones(3, 2, dtype=torch.int64), tokens, tokens, 0)
    for step in range(1000):
        new = torch.randint(0, 4, (3,), generator=dice)
        positions = torch.where(torch.arange(3) < new[:, None], seen[:, None] + torch.arange(3), -1)
        pages.append(tokens.expand(3, 2, 3, 4), tokens.expand(3, 2, 3, 4), positions)
        seen += new
        policy = Policy(Dice(dice), 20, rules[step % 3], num_sinks=SINKS, num_recent=RECENT)
        slots = pages.slots()
        obs = Observation(0, 1, seen, new, torch.empty(0), slots, torch.empty(0), new, 1.0)
        target = Target([], policy, 0, torch.full((3,), 20), PINS, [])
        pages.compact(slots.as_stored(policy.select([obs], [target.pinned(obs)])[0]), step % 7)
        for row, heads in enumerate(pages.slots().positions.tolist()):
            assert all(protected(row, int(seen[row])) <= set(head) for head in heads)
        assert (pages.lengths.sum(1) <= 2 * seen.clamp(max=20)).all()


def test_protected_tokens_survive_random_evictions_of_a_cache_at_intervals():
    model, rows = model_of("gemma3"), [prompt(n, seed=n)[0] for n in (30, 12, 21)]
    ids, mask = left_padded(rows)
    policy = Policy(Dice(torch.Generator().manual_seed(0)), 20, ALLOCATORS["adaptive"], num_sinks=SINKS, num_recent=RECENT, interval=3)
    with attach(model):
        cache = EvictionCache(policy, model)
        for pin in PINS:
            cache.pin(*pin)
        for step in range(100):
            model(ids, attention_mask=mask, cache=cache)
            for positions in cache.kept_positions():
                for row, heads in enumerate(positions.tolist()):
                    assert all(protected(row, len(rows[row]) + step) <= set(head) for head in heads)
            ids = prompt(1, rows=3, seed=step)
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)


# ---- the table of cases


def test_the_fast_cases_bring_every_two_choices_together():
    met = {pair for combo in FAST for pair in combinations(combo, 2)}
    assert met == {pair for a, b in combinations(FACTORS, 2) for pair in product(a, b)}


def test_a_method_whose_knob_nobody_makes_is_named(monkeypatch):
    monkeypatch.delitem(KNOBS, "utility")
    with pytest.raises(AssertionError, match=r"oracle has no default for utility: say in KNOBS of .*test_contract"):
        policy_of(Case("oracle", "uniform", "llama"))
