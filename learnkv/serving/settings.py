"""The `plan` section: a server, a cache policy, requests, and what to sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from learnkv.serving.requests import Session
from learnkv.serving.trace_file import read_trace
from learnkv.serving.victims import Victim
from learnkv.serving.workload import Arrivals, Lengths, Load, draw

Goal = Literal["throughput", "latency", "memory", "accuracy"]
Kind = Literal["full", "evict", "offload", "quantise"]


@dataclass
class Sweep:
    """Values instead of the one that plan has; every combination is run."""

    model: list[str] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    budget: list[float] = field(default_factory=list)


@dataclass
class PlanSettings:
    """What is planned."""

    model: str = "llama3-8b"  # a name above, a hub id, or a folder with a config.json
    weight_bits: int = 16  # of a weight
    card: str = "h100-80gb"  # a name above, or the .json that `learnkv.bench kernels` leaves
    cards: int = 1  # that share the model evenly, at no cost
    memory_gb: float | None = None  # of a card, 1e9 bytes, instead of the data sheet's
    memory_share: float = 0.9  # of that for weights and pages, vLLM's gpu_memory_utilization
    host_gb: float = 256.0  # of the host for offloaded keys and values, 1e9 bytes
    step_ms: float = 0.0  # that a step takes on the host besides; the roofline knows none
    policies: list[str] = field(default_factory=lambda: ["full", "evict", "offload", "quantise"])  # that are compared
    budget: float = 0.2  # of evict: tokens per KV head, below 1 a fraction of the prompt
    interval: int = 1  # of evict: decode steps between evictions
    prefill: float = 1.05  # of evict: time of a prefill in a full cache's, as `learnkv.bench overhead` measures it
    fetched: float = 0.2  # of offload: share of the tokens that a step fetches, InfiniGen's cap
    bits: int = 4  # of quantise
    rate: float = 4.0  # requests a second
    requests: int = 1000  # in all
    arrivals: Arrivals = "poisson"  # poisson, gamma (see cv), even, or a burst at 0
    cv: float = 1.0  # of arrivals=gamma: coefficient of variation of the gaps
    prompt: int = 2048  # tokens that a request adds, mean
    output: int = 256  # tokens of an answer, mean
    lengths: Lengths = "lognormal"  # fixed, lognormal (see sigma) or geometric
    sigma: float = 1.0  # of lengths=lognormal: standard deviation of the logarithm
    turns: int = 1  # of a session; each prompt begins with all turns before
    think_s: float = 10.0  # seconds between an answer and the next turn, exponential, mean
    trace: str = ""  # .jsonl or .csv with arrival (seconds), prompt and output (tokens), instead of all that is drawn
    seed: int = 0  # of what is drawn
    step_tokens: int = 2048  # of a step at most, vLLM's max_num_batched_tokens
    batch: int = 256  # requests that run at once, vLLM's max_num_seqs
    victim: Victim = "newest"  # who is preempted: newest, lru or shortest
    refill: Literal["recompute", "swap"] = "recompute"  # how a preempted request comes back
    goal: Goal = "throughput"  # what the recommendation looks at
    ttft_s: float | None = None  # seconds to the first token that 95% of the requests must stay within
    tpot_s: float | None = None  # likewise seconds per token
    sweep: Sweep = field(default_factory=Sweep)

    def __post_init__(self) -> None:
        for name in ("weight_bits", "cards", "interval", "bits", "requests", "prompt", "output", "turns", "step_tokens", "batch"):
            self.refuse(name, getattr(self, name) < 1, "1 or more")
        for name in ("rate", "cv", "budget", "memory_gb", "ttft_s", "tpot_s"):
            self.refuse(name, (value := getattr(self, name)) is not None and value <= 0, "more than 0")
        for name in ("memory_share", "fetched"):
            self.refuse(name, not 0 < getattr(self, name) <= 1, "more than 0, up to 1")
        for name in ("host_gb", "step_ms", "sigma", "think_s", "seed"):
            self.refuse(name, getattr(self, name) < 0, "0 or more")
        self.refuse("prefill", self.prefill < 1, "1 or more")
        self.refuse("step_tokens", self.step_tokens < self.batch, f"batch={self.batch} or more: each request that runs takes a token")
        self.refuse_policies()

    def refuse(self, name: str, bad: bool, wanted: str) -> None:
        """Raises a ValueError for a value that makes no sense."""
        if bad:
            raise ValueError(f"plan.{name}={getattr(self, name):g} must be {wanted}")

    def refuse_policies(self) -> None:
        known = list(Kind.__args__)  # type: ignore[attr-defined]
        for name in self.policies:
            if name not in known:
                raise ValueError(f"plan.policies names {name!r}; there are {', '.join(known)}")
        if not self.policies:
            raise ValueError("plan.policies is empty; name one of full, evict, offload, quantise")
        for name in ("rate", "budget"):
            if any(value <= 0 for value in getattr(self.sweep, name)):
                raise ValueError(f"plan.sweep.{name}={getattr(self.sweep, name)} must be more than 0 throughout")
        if self.trace and self.sweep.rate:
            raise ValueError(f"plan.sweep.rate has no meaning beside plan.trace={self.trace}, which says when requests arrive")

    def sessions(self) -> list[Session]:
        """The requests."""
        if self.trace:
            return read_trace(Path(self.trace))
        load = Load(
            requests=self.requests,
            rate=self.rate,
            prompt=self.prompt,
            output=self.output,
            arrivals=self.arrivals,
            cv=self.cv,
            lengths=self.lengths,
            sigma=self.sigma,
            turns=self.turns,
            think_s=self.think_s,
        )
        return draw(load, self.seed)
