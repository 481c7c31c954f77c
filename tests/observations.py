"""Observations built by hand, for tests: rows of random tokens, held by each head as told, in one run or in shuffled pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from learnkv.observation import Observation, Slots


@dataclass(frozen=True)
class Row:
    """One sequence of n tokens, of which each head holds `kept[h]`, ascending; the last `num_new` came in this step."""

    keys: Tensor  # [H, n, D]
    values: Tensor  # [H, n, D]
    queries: Tensor  # [Q, n, D] rotated
    before_rope: Tensor  # [Q, n, D]
    token_ids: Tensor  # [n]
    kept: list[list[int]]
    num_new: int
    memory: list[Tensor]  # [len(kept[h]), C] per head

    @property
    def num_seen(self) -> int:
        return self.keys.shape[1]


def make_row(
    n: int, seed: int = 0, *, H: int = 2, G: int = 2, D: int = 8, num_new: int | None = None, share: float = 1.0, C: int = 0
) -> Row:
    """A random row; with `share` below 1 each head lost some of its old tokens, another number in every head."""
    rng = np.random.default_rng([n, seed])
    num_new = n if num_new is None else num_new
    old = n - num_new
    kept = [sorted(rng.permutation(old)[: int(old * share * (h + 1) / H)].tolist()) + list(range(old, n)) for h in range(H)]

    def normal(*shape: int) -> Tensor:
        return torch.tensor(rng.normal(size=shape) * 2, dtype=torch.float32)

    memory = [normal(len(k), C).abs() for k in kept]
    ids = torch.tensor(rng.integers(0, 7, n))
    return Row(normal(H, n, D), normal(H, n, D), normal(H * G, n, D), normal(H * G, n, D), ids, kept, num_new, memory)


def observe(
    rows: list[Row], *, window: int = 0, page: int | None = None, padding: int = 0, layer: int = 0, num_layers: int = 2
) -> Observation:
    """The rows as one left-padded batch with `padding` more pads; `page` slots per page, one page per head without it."""
    B, H, D = len(rows), rows[0].keys.shape[0], rows[0].keys.shape[2]
    T = max(row.num_new for row in rows) + padding
    slots = build_slots(rows, page)
    new_slots = torch.full((B, H, T), -1)
    for b, row in enumerate(rows):
        for h, kept in enumerate(row.kept):
            new_slots[b, h, T - row.num_new :] = torch.arange(len(kept) - row.num_new, len(kept))

    def step(of_row: list[Tensor], junk: float) -> Tensor:  # [*, n, X] -> [B, *, T, X]
        out = of_row[0].new_full((B, *of_row[0].shape[:-2], T, of_row[0].shape[-1]), junk)
        for b, (row, x) in enumerate(zip(rows, of_row, strict=True)):
            out[b, ..., T - row.num_new :, :] = x[..., row.num_seen - row.num_new :, :]
        return out

    queries = torch.zeros(B, rows[0].queries.shape[0], window, D, dtype=rows[0].queries.dtype)
    for b, row in enumerate(rows):
        real = min(window, row.num_seen)
        queries[b, :, window - real :] = row.queries[:, row.num_seen - real :]
    return Observation(
        layer=layer,
        num_layers=num_layers,
        num_seen=torch.tensor([row.num_seen for row in rows]),
        num_new=torch.tensor([row.num_new for row in rows]),
        new_slots=new_slots,
        slots=slots,
        queries=queries,
        num_queries=torch.tensor([min(window, row.num_seen) for row in rows]),
        scale=D**-0.5,
        queries_pre_rope=step([row.before_rope for row in rows], 1e3),
        all_queries=step([row.queries for row in rows], 1e3),
        token_ids=step([row.token_ids[:, None] for row in rows], 3)[..., 0],
        rope_offset=torch.zeros(B, dtype=torch.int64),
    )


def build_slots(rows: list[Row], page: int | None) -> Slots:
    """Pages in shuffled order; what lies past a head's length is NaN, and its position and memory are junk."""
    B, H, D = len(rows), rows[0].keys.shape[0], rows[0].keys.shape[2]
    C = rows[0].memory[0].shape[1]
    P = page or max(max(len(k) for k in row.kept) for row in rows)
    width = max(max(-(-len(k) // P) for k in row.kept) for row in rows)
    order = torch.randperm(B * H * width, generator=torch.Generator().manual_seed(0)).view(B, H, width)
    N = B * H * width
    keys = torch.full((N, P, D), float("nan"), dtype=rows[0].keys.dtype)
    values, positions, memory = keys.clone(), torch.full((N, P), 7, dtype=torch.int32), torch.full((N, P, C), float("nan"))
    table = torch.full((B, H, width), -1, dtype=torch.int32)
    lengths = torch.zeros(B, H, dtype=torch.int32)
    for b, row in enumerate(rows):
        for h, kept in enumerate(row.kept):
            lengths[b, h] = len(kept)
            table[b, h, : -(-len(kept) // P)] = order[b, h, : -(-len(kept) // P)]
            for slot, position in enumerate(kept):
                at = int(table[b, h, slot // P]), slot % P
                keys[at], values[at], positions[at] = row.keys[h, position], row.values[h, position], position
                memory[at] = row.memory[h][slot]
    return Slots(keys, values, positions, memory, table, lengths)


def with_memory(obs: Observation, memory: Tensor) -> Observation:
    """The observation after the runtime stored `memory` [B, H, L, C] beside the tokens."""
    slots = Slots.dense(obs.keys, obs.values, obs.positions, memory)
    return replace(obs, slots=slots)
