"""DapQ: pseudo queries at the positions to come stand in for those of the answer (arXiv:2603.11564)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from learnkv import ops
from learnkv.names import unknown
from learnkv.observation import Observation, Probe, ProbeScorer, pooled, refuse_kernel

Place = Literal["next", "start"]


@dataclass(frozen=True)
class DapQ(ProbeScorer):
    """score_j = pool_j(mean over pseudo tokens and query group of their attention on j) (arXiv:2603.11564).

    Some tokens run after the prompt at the positions that the answer will take, and are dropped.  The paper finds that their position
    decides and their content hardly matters; `content` and `place` are there to see that.

    Differs: mean over the pseudo tokens, where the paper adds up, in the same order; pseudo tokens are taken from the prompt itself in
    each `content`; that the last tokens of the prompt stay is left to the policy.
    """

    num_tokens: int = 32  # pseudo tokens; the paper's best are 32 to 64
    kernel_size: int = 7  # slots of the max-pooling, odd; 0 or 1 for none
    content: str = "edges"  # edges: the prompt's first and last tokens; random: some of it; fixed: its first token each time
    place: Place = "next"  # position of the first pseudo token: next after the prompt, or start, where it does not belong
    seed: int = 0  # of content=random

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens={self.num_tokens} counts pseudo tokens; give 1 or more")
        refuse_kernel(self.kernel_size)
        if self.content not in CONTENTS:
            raise unknown("content", self.content, CONTENTS)
        if self.place not in get_args(Place):
            raise unknown("place", self.place, get_args(Place))

    def probe(self, token_ids: Tensor) -> list[Probe]:
        n = len(token_ids)
        rows = CONTENTS[self.content](token_ids, self.num_tokens, self.seed)
        return [Probe(rows, 0, n, position=n if self.place == "next" else 0)]

    def absorb(self, obs: Observation, probe: Probe, queries: Tensor, keys: Tensor) -> Tensor:
        R = keys.shape[2]
        ahead = torch.arange(1, R + 1, device=keys.device)  # a row sees all slots at 0, itself and the rows before
        at = torch.cat([obs.filled.int() - 1, ahead.expand(*keys.shape[:2], R)], 2)
        both = torch.cat([obs.keys, keys], 2)
        mass = ops.column_mass(queries, both, ahead[None], at, obs.scale, over_group="mean", over_queries="mean")
        return mass[..., :-R, None]

    def score(self, obs: Observation) -> Tensor:
        return pooled(super().score(obs), obs.positions, self.kernel_size)


def edges(ids: Tensor, count: int, seed: int) -> Tensor:
    """The first and the last tokens, half of `count` each."""
    return torch.cat([ids[: count - count // 2], ids[len(ids) - min(count // 2, len(ids)) :]])


def random(ids: Tensor, count: int, seed: int) -> Tensor:
    """Tokens drawn with repetition."""
    drawn = torch.randint(len(ids), (count,), generator=torch.Generator().manual_seed(seed))
    return ids[drawn.to(ids.device)]


def fixed(ids: Tensor, count: int, seed: int) -> Tensor:
    """The first token, `count` times."""
    return ids[:1].expand(count)


CONTENTS: dict[str, Callable[[Tensor, int, int], Tensor]] = {"edges": edges, "random": random, "fixed": fixed}
