"""What every method promises under every allocator on every kind of model; methods come from the registry, so new ones are held to it too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from learnkv.budgets import ALLOCATORS, Allocator, PerHead, Threshold
from learnkv.gates import GATES
from learnkv.methods import METHODS
from learnkv.models import BaseModel, describe
from learnkv.observation import Observation
from learnkv.policy import Policy
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
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


# knob without a default -> its value for a method and a model
KNOBS: dict[str, Callable[[str, BaseModel], object]] = {
    "tokenizer": lambda name, base: Letters(),
    "utility": lambda name, base: torch.rand(base.num_layers, base.num_kv_heads, 60, generator=torch.Generator().manual_seed(0)),
    "gate": made_gate,
}
# small sizes, so that 40 tokens are many
SETTINGS: dict[str, dict[str, object]] = {
    "lagkv": dict(lag=8),
    "chunkkv": dict(chunk_size=5),
    "kvzip": dict(chunk_size=25),
    "expected_attention": dict(future=8),
}
GATE_CONFIGS: dict[str, dict[str, object]] = {"kvp": dict(branch_width=6, width=10)}

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
CASES = [
    pytest.param(Case(*combo), id="-".join(combo), marks=[] if combo in FAST else [pytest.mark.slow]) for combo in product(*FACTORS)
]
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
    return METHODS[case.method](budget, allocate=rule, num_sinks=SINKS, num_recent=num_recent, **knobs)


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
            stages.append(Stage(out.logits[:, -1], cache.kept_positions(), torch.cat([*policy.given, torch.zeros(1)])))
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
# likewise, by its key or value: which eviction changes in all layers but the first that evicts
BY_KEY = {"key_norm"}


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


# ---- the table of cases


def test_the_fast_cases_bring_every_two_choices_together():
    met = {pair for combo in FAST for pair in combinations(combo, 2)}
    assert met == {pair for a, b in combinations(FACTORS, 2) for pair in product(a, b)}


def test_a_method_whose_knob_nobody_makes_is_named(monkeypatch):
    monkeypatch.delitem(KNOBS, "utility")
    with pytest.raises(AssertionError, match=r"oracle has no default for utility: say in KNOBS of .*test_contract"):
        policy_of(Case("oracle", "uniform", "llama"))
