"""METHODS: every eviction method by name; `METHODS["ada_snapkv"](budget=512)` is a Policy ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from learnkv import budgets
from learnkv.budgets import Allocator, PerHead, Ratio, Threshold
from learnkv.checkpoint import load_gate
from learnkv.gates.dms import DMS
from learnkv.gates.duo_attention import DuoAttention
from learnkv.gates.fast_kvzip import FastKVzip
from learnkv.gates.foresight import Foresight
from learnkv.gates.judge_q import JudgeQ
from learnkv.gates.kvp import KVP
from learnkv.gates.kvzap import KVzap
from learnkv.gates.locret import Locret
from learnkv.gates.lookaheadkv import LookaheadKV
from learnkv.gates.trimkv import TrimKV
from learnkv.heuristics.chunkkv import ChunkKV
from learnkv.heuristics.criticalkv import CriticalKV
from learnkv.heuristics.cur import CUR
from learnkv.heuristics.dapq import DapQ
from learnkv.heuristics.expected_attention import ExpectedAttention
from learnkv.heuristics.h2o import H2O
from learnkv.heuristics.keep_digits import KeepDigits
from learnkv.heuristics.keep_rare import KeepRare
from learnkv.heuristics.key_diff import KeyDiff
from learnkv.heuristics.key_norm import KeyNorm
from learnkv.heuristics.kvzip import KVzip
from learnkv.heuristics.lagkv import LagKV
from learnkv.heuristics.oracle import Oracle
from learnkv.heuristics.qfilter import QFilter
from learnkv.heuristics.random import Random
from learnkv.heuristics.recency_hybrid import RecencyHybrid
from learnkv.heuristics.scissorhands import Scissorhands
from learnkv.heuristics.simlayerkv import SimLayerKV
from learnkv.heuristics.snapkv import SnapKV
from learnkv.heuristics.streaming_llm import StreamingLLM
from learnkv.heuristics.tova import TOVA
from learnkv.heuristics.vatp import VATP
from learnkv.names import unknown
from learnkv.observation import Scorer
from learnkv.policy import Policy

POLICY_KNOBS = ("budget", "allocate", "num_sinks", "num_recent", "interval")
READS = {
    "hidden": "hidden",
    "block_input": "hidden",
    "mass": "mass",
    "queries_pre_rope": "queries",
    "all_queries": "queries",
    "token_ids": "token ids",
    "rope_offset": "",
}


@dataclass(frozen=True)
class Method:
    """One line of the registry: a scorer, where it comes from, and how its authors split the budget.

    scorer    class whose dataclass fields are the method's knobs; those without a default must be given
    paper     arXiv id, "" for a control of ours
    allocate  name in budgets.ALLOCATORS, used unless the caller names another
    num_sinks, num_recent  first and last tokens that always stay, unless the caller says otherwise
    """

    trained: ClassVar[bool] = False

    scorer: type[Scorer]
    paper: str = ""
    allocate: str = "uniform"
    num_sinks: int = Policy.num_sinks
    num_recent: int = Policy.num_recent

    def __call__(
        self,
        budget: int | Ratio,
        *,
        allocate: str | Allocator | None = None,
        num_sinks: int | None = None,
        num_recent: int | None = None,
        interval: int = Policy.interval,
        **knobs: object,
    ) -> Policy:
        """A Policy; `allocate` is a name in budgets.ALLOCATORS or an Allocator, `knobs` are the scorer's own fields."""
        scorer = self.build(knobs)
        rule = self.rule(allocate, knobs, scorer)
        sinks = self.num_sinks if num_sinks is None else num_sinks
        recent = self.num_recent if num_recent is None else num_recent
        return Policy(scorer, budget, rule, num_sinks=sinks, num_recent=recent, interval=interval)

    def rule(self, allocate: str | Allocator | None, knobs: Mapping[str, Any], scorer: Scorer) -> Allocator:
        """How the budget is split: as the caller says, else as the authors do."""
        return allocator(self.allocate if allocate is None else allocate)

    @property
    def defaults(self) -> dict[str, object]:
        """Every knob's default, MISSING where it must be given."""
        return {knob.name: knob.default for knob in fields(self.scorer)}  # type: ignore[arg-type]

    @property
    def requires(self) -> tuple[str, ...]:
        """Knobs that have no default."""
        return tuple(name for name, default in self.defaults.items() if default is MISSING)

    @property
    def reads(self) -> str:
        """What the scorer reads beside keys, values and positions, for the table of methods."""
        scorers: list[type[Scorer] | Scorer] = [self.scorer, *(base for base in self.defaults.values() if isinstance(base, Scorer))]
        reads = {READS[need] for scorer in scorers for need in scorer.needs} - {""}
        reads |= {"queries"} if any(scorer.observation_window for scorer in scorers) else set()
        reads |= {"extra passes"} if self.scorer.probe is not Scorer.probe else set()
        return ", ".join(sorted(reads))

    def build(self, knobs: Mapping[str, Any]) -> Scorer:
        """The scorer with these knobs."""
        knobs = {name: named_scorer(value) if isinstance(self.defaults.get(name), Scorer) else value for name, value in knobs.items()}
        self.check(knobs)
        return self.scorer(**knobs)

    def check(self, knobs: Mapping[str, object]) -> None:
        """Refuses a knob of another name or kind, and a missing one."""
        for name, value in knobs.items():
            if name not in self.defaults:
                raise unknown(f"knob of {self.scorer.__name__}", name, (*self.defaults, *POLICY_KNOBS))
            check_kind(self.scorer.__name__, name, value, self.defaults[name])
        missing = [name for name in self.requires if name not in knobs]
        if missing:
            raise ValueError(f"{self.scorer.__name__} has no default for {', '.join(missing)}; pass {missing[0]}=...")


@dataclass(frozen=True)
class TableMethod(Method):
    """A method that splits the budget by a table of heads: two knobs more, `table`, the file of one, and PerHead's `beta`."""

    @property
    def defaults(self) -> dict[str, object]:
        return {"table": MISSING, "beta": PerHead.beta, **super().defaults}

    def build(self, knobs: Mapping[str, Any]) -> Scorer:
        if not isinstance(knobs.get("table"), str | Path):
            given = f"table={knobs['table']!r} is no file" if "table" in knobs else "no table was given"
            raise ValueError(f"{given}: the budget is split by a table of heads, and none is shipped; pass table=heads.json")
        self.check(knobs)
        return self.scorer(**{name: value for name, value in knobs.items() if name not in ("table", "beta")})

    def rule(self, allocate: str | Allocator | None, knobs: Mapping[str, Any], scorer: Scorer) -> Allocator:
        if allocate is not None:
            raise ValueError(f"allocate={allocate!r} and table={knobs['table']} both split the budget; leave one of them out")
        return PerHead.read(knobs["table"], knobs.get("beta", PerHead.beta))


@dataclass(frozen=True)
class GateMethod(Method):
    """A method with weights.  Its one knob is `gate`: a loaded gate, or the folder of one.

    split  how a gate of it splits the budget, in the place of `allocate`, unless the caller names an allocator
    """

    trained: ClassVar[bool] = True

    split: Callable[[Any], Allocator] | None = None

    def rule(self, allocate: str | Allocator | None, knobs: Mapping[str, Any], scorer: Scorer) -> Allocator:
        return self.split(scorer) if allocate is None and self.split is not None else super().rule(allocate, knobs, scorer)

    @property
    def defaults(self) -> dict[str, object]:
        return {"gate": MISSING}

    def build(self, knobs: Mapping[str, Any]) -> Scorer:
        self.check(knobs)
        gate = knobs["gate"] if isinstance(knobs["gate"], Scorer) else load_gate(knobs["gate"])
        if not isinstance(gate, self.scorer):
            raise ValueError(f"gate={knobs['gate']!r} is a {type(gate).__name__}, not a {self.scorer.__name__}; give a gate of this method")
        return gate


@dataclass(frozen=True)
class ThresholdMethod(GateMethod):
    """A gate whose scores say how many tokens stay: one knob more, `threshold`, the least that a token must score.

    The budget is then the most that a head keeps.  Where `allocate` is named, scores only say which tokens stay, as everywhere.
    """

    threshold: float = -4.0  # kvpress's example for Qwen3-8B; another model has another

    @property
    def defaults(self) -> dict[str, object]:
        return {"threshold": self.threshold, **super().defaults}

    def rule(self, allocate: str | Allocator | None, knobs: Mapping[str, Any], scorer: Scorer) -> Allocator:
        if allocate is None:
            return Threshold(knobs.get("threshold", self.threshold))
        if "threshold" in knobs:
            raise ValueError(f"allocate={allocate!r} and threshold={knobs['threshold']} both say how many stay; leave one of them out")
        return super().rule(allocate, knobs, scorer)


def named_scorer(base: object) -> object:
    """The scorer of a method that is given by name, with its usual knobs; anything else as it is."""
    if not isinstance(base, str):
        return base
    if base not in METHODS:
        raise unknown("method", base, METHODS)
    return METHODS[base].build({})


def check_kind(scorer: str, name: str, value: object, default: object) -> None:
    """Refuses a knob's value whose type is not its default's; an int passes where a float is meant."""
    kind = (int, float) if isinstance(default, float) else Scorer if isinstance(default, Scorer) else type(default)
    if default is not MISSING and (isinstance(value, bool) != isinstance(default, bool) or not isinstance(value, kind)):
        raise ValueError(
            f"{scorer}: {name}={value!r} is of type {type(value).__name__}; give {type(default).__name__}, as in {name}={default!r}"
        )


def allocator(allocate: str | Allocator) -> Allocator:
    """An Allocator by its name in budgets.ALLOCATORS, or as it is."""
    if not isinstance(allocate, str):
        return allocate
    if allocate not in budgets.ALLOCATORS:
        raise unknown("allocator", allocate, budgets.ALLOCATORS)
    return budgets.ALLOCATORS[allocate]


METHODS: dict[str, Method] = {
    "random": Method(Random),
    "oracle": Method(Oracle),
    "streaming_llm": Method(StreamingLLM, "2309.17453"),
    "sliding_window": Method(StreamingLLM, num_sinks=0),
    "h2o": Method(H2O, "2306.14048"),
    "scissorhands": Method(Scissorhands, "2305.17118"),
    "vatp": Method(VATP, "2406.12335"),
    "recency_hybrid": Method(RecencyHybrid),
    "tova": Method(TOVA, "2401.06104"),
    "snapkv": Method(SnapKV, "2404.14469"),
    "pyramidkv": Method(SnapKV, "2406.02069", allocate="pyramid"),
    "ada_snapkv": Method(SnapKV, "2407.11550", allocate="adaptive"),
    "headkv": TableMethod(SnapKV, "2410.19258"),
    "chunkkv": Method(ChunkKV, "2502.00299"),
    "criticalkv": Method(CriticalKV, "2502.03805"),
    "simlayerkv": Method(SimLayerKV, "2410.13846", allocate="adaptive_global"),
    "key_norm": Method(KeyNorm, "2406.11430"),
    "key_diff": Method(KeyDiff, "2504.15364"),
    "lagkv": Method(LagKV, "2504.04704"),
    "cur": Method(CUR, "2509.15038"),
    "expected_attention": Method(ExpectedAttention, "2510.00636"),
    "qfilter": Method(QFilter, "2503.02812"),
    "kvzip": Method(KVzip, "2505.23416", allocate="adaptive_global"),
    "dapq": Method(DapQ, "2603.11564"),
    "keep_digits": Method(KeepDigits),
    "keep_rare": Method(KeepRare),
    "kvp": GateMethod(KVP, "2602.10238"),
    "foresight": GateMethod(Foresight, allocate="adaptive_global"),
    "fast_kvzip": GateMethod(FastKVzip, "2601.17668", allocate="adaptive_global"),
    "kvzap": ThresholdMethod(KVzap, "2601.07891", allocate="adaptive_global", num_recent=128),
    "locret": GateMethod(Locret, "2410.01805"),
    "trimkv": GateMethod(TrimKV, "2512.03324"),
    "dms": GateMethod(DMS, "2506.05345", split=lambda gate: Threshold(0.0)),
    "duo_attention": GateMethod(DuoAttention, "2410.10819", split=lambda gate: PerHead(gate.table, beta=1.0)),
    "lookaheadkv": GateMethod(LookaheadKV, "2603.10899"),
    "judge_q": GateMethod(JudgeQ, "2509.10798"),
}


def policy(name: str, budget: int | Ratio, **knobs: object) -> Policy:
    """METHODS[name](budget, **knobs), with the nearest names where there is no such method."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name](budget, **knobs)  # type: ignore[arg-type]


def table() -> list[tuple[str, str, str, str]]:
    """Rows of the README's table of methods: name, paper, what it reads beside keys, values and positions, trained or not."""
    return [(name, f"arXiv:{m.paper}" if m.paper else "", m.reads, "yes" if m.trained else "no") for name, m in METHODS.items()]
