"""The registry: every line builds a Policy that runs, and every mistake names what was meant."""

from __future__ import annotations

import re
from dataclasses import is_dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learnkv import methods
from learnkv.budgets import ALLOCATORS, Adaptive, PerHead, Ratio, adaptive, uniform
from learnkv.heuristics.snapkv import SnapKV
from learnkv.methods import METHODS, TableMethod
from learnkv.policy import Policy
from tests.observations import make_row, observe, with_memory

HEURISTICS = [name for name, method in METHODS.items() if not method.trained]


class Words:
    """A tokenizer of ten digits."""

    def __len__(self) -> int:
        return 10

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return ["".join(map(str, ids)) for ids in sequences]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1, 2]


TABLE = Path(__file__).parent / "data" / "heads-2x2.json"
REQUIRED = {"tokenizer": Words(), "utility": torch.rand(2, 2, 30), "table": TABLE, "filters": torch.rand(2, 2, 8)}


SHAPE = {"vocab_size": 17, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
MODEL = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2))  # what a scorer is bound to


def make(name: str, budget: int | Ratio = 24, **knobs: object) -> Policy:
    given = {knob: REQUIRED[knob] for knob in METHODS[name].requires}
    return methods.policy(name, budget, **{"num_recent": 16, **given, **knobs})


RULES = [(name, rule) for name in HEURISTICS for rule in ([None] if isinstance(METHODS[name], TableMethod) else ALLOCATORS)]


@pytest.mark.parametrize(("name", "allocate"), RULES)
def test_every_heuristic_runs_under_every_allocator_and_keeps_the_budget(name, allocate):
    policy = make(name, allocate=allocate)
    scorer = policy.scorer.bind(MODEL)
    layers = []
    for layer in range(2):
        obs = observe([make_row(30, C=scorer.memory_size)], window=scorer.observation_window, layer=layer)
        if "mass" in scorer.needs:
            object.__setattr__(obs, "mass", torch.rand(obs.positions.shape))
        layers.append(with_memory(obs, scorer.remember(obs)) if scorer.memory_size else obs)
    keeps = replace(policy, scorer=scorer).select(layers)
    assert sum(int(keep.sum()) for keep in keeps) == 2 * 2 * 24


@pytest.mark.parametrize("name", METHODS)
def test_every_method_names_its_paper_in_the_scorers_docstring_or_is_a_control(name):
    method = METHODS[name]
    assert re.fullmatch(r"(\d{4}\.\d{5})?", method.paper)
    rule = PerHead if isinstance(method, TableMethod) else type(ALLOCATORS[method.allocate])
    source = (method.scorer.__doc__ or "") + (rule.__doc__ or "")
    assert method.paper in source


@pytest.mark.parametrize("name", HEURISTICS)
def test_scorers_are_frozen_dataclasses_in_a_file_of_their_own(name):
    scorer = METHODS[name].scorer
    assert is_dataclass(scorer) and scorer.__dataclass_params__.frozen
    assert scorer.__module__.startswith("learnkv.heuristics.")


def test_every_file_of_heuristics_is_registered():
    files = {path.stem for path in (Path(methods.__file__).parent / "heuristics").glob("*.py")} - {"__init__"}
    assert files == {METHODS[name].scorer.__module__.rpartition(".")[2] for name in HEURISTICS}


def test_a_method_takes_policy_rules_and_scorer_knobs():
    policy = METHODS["snapkv"](budget=64, num_sinks=2, num_recent=8, interval=4, observation_window=16, kernel_size=5)
    assert policy == Policy(SnapKV(16, 5), 64, uniform, 2, 8, 4)


def test_a_method_uses_its_authors_allocator_unless_told_otherwise():
    rule = Adaptive(floor=0.5)
    assert METHODS["ada_snapkv"](64).allocate == adaptive
    assert METHODS["ada_snapkv"](64, allocate="uniform").allocate == uniform
    assert METHODS["snapkv"](64, allocate=rule).allocate == rule


def test_headkv_is_snapkv_with_the_budget_split_by_a_table():
    policy = METHODS["headkv"](64, table=str(TABLE), beta=2.0, kernel_size=5)
    assert policy == Policy(SnapKV(kernel_size=5), 64, PerHead(((2.0, 1.0), (1.0, 3.0)), beta=2.0))
    assert METHODS["headkv"](64, table=TABLE).allocate == PerHead(((2.0, 1.0), (1.0, 3.0)))


def test_policy_defaults_are_said_in_one_place():
    assert METHODS["random"](64) == Policy(METHODS["random"].scorer(), 64)


@pytest.mark.parametrize(
    ("name", "knobs", "text"),
    [
        ("snapkb", {}, "unknown method 'snapkb'.*snapkv"),
        ("snapkv", {"kernal_size": 5}, "unknown knob of SnapKV 'kernal_size'.*kernel_size"),
        ("snapkv", {"num_sink": 5}, "num_sinks"),
        ("snapkv", {"allocate": "adaptiv"}, "unknown allocator 'adaptiv'.*adaptive"),
        ("snapkv", {"kernel_size": "7"}, "SnapKV: kernel_size='7' is of type str; give int"),
        ("snapkv", {"kernel_size": 7.0}, "kernel_size=7.0 is of type float"),
        ("snapkv", {"kernel_size": True}, "kernel_size=True is of type bool"),
        ("snapkv", {"kernel_size": 6}, "kernel_size=6"),
        ("oracle", {}, "Oracle has no default for utility; pass utility="),
        ("headkv", {}, "no table was given: .* pass table=heads.json"),
        ("headkv", {"table": 5}, "table=5 is no file"),
        ("headkv", {"table": "missing.json"}, "missing.json is no file"),
        ("headkv", {"table": str(TABLE), "beta": 0.5}, "^beta=0.5 divides"),
        ("headkv", {"table": str(TABLE), "kernal_size": 5}, "unknown knob of SnapKV 'kernal_size'.*kernel_size"),
        ("headkv", {"table": str(TABLE), "allocate": "adaptive"}, "allocate='adaptive' and table=.* both split the budget"),
        ("qfilter", {}, "QFilter has no default for filters; pass filters="),
        ("kvp", {}, "KVP has no default for gate; pass gate="),
        ("kvp", {"gates": "folder"}, "unknown knob of KVP 'gates'.*gate"),
        ("kvp", {"gate": SnapKV()}, "is a SnapKV, not a KVP"),
    ],
)
def test_a_mistake_names_what_was_meant(name, knobs, text):
    with pytest.raises(ValueError, match=text):
        methods.policy(name, 64, **knobs)


def test_an_int_is_taken_where_a_float_is_meant():
    assert METHODS["expected_attention"](64, epsilon=1).scorer.epsilon == 1


def test_the_table_has_a_row_per_method_that_says_what_it_reads():
    rows = {row[0]: row[1:] for row in methods.table()}
    assert list(rows) == list(METHODS)
    assert rows["snapkv"] == ("arXiv:2404.14469", "queries", "no")
    assert rows["h2o"] == ("arXiv:2306.14048", "mass", "no")
    assert rows["keep_rare"] == ("", "token ids", "no")
    assert rows["qfilter"] == ("arXiv:2503.02812", "", "no")
    assert rows["kvzip"] == ("arXiv:2505.23416", "extra passes", "no")
    assert rows["kvp"][2] == "yes"
