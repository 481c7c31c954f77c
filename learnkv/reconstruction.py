"""KVzip's reconstruction (arXiv:2505.23416): rows that make a model repeat its context, and the attention that they pay to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from learnkv import ops
from learnkv.observation import Probe

WHOLE = "\n\nWrite out the text above again, word for word:\n\n"
ONWARD = "\n\nWrite out the text above again, word for word, from where it says:\n\n"
CHUNK_SIZE = 2048  # tokens repeated at once; official code 2,000, kvpress 2,048
OVERLAP = 8  # tokens of the chunk before, in the instruction
NUM_PREFIX = 4  # first tokens of the context in every softmax
BLOCK = 64  # rows at once


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def instructions(tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Token ids [*] int64 of WHOLE and of ONWARD."""
    whole, onward = (torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64) for text in (WHOLE, ONWARD))
    return whole, onward


def repetitions(token_ids: Tensor, whole: Tensor, onward: Tensor, chunk_size: int = CHUNK_SIZE, overlap: int = OVERLAP) -> list[Probe]:
    """The rows that repeat the context token_ids [n], one probe per chunk: the instruction to do so, then the chunk itself.

    whole   [*] int64 the instruction for the first chunk
    onward  [*] int64 the one for later chunks, which the last `overlap` tokens of the chunk before follow
    """
    n, found = len(token_ids), []
    for start in range(0, n, chunk_size):
        stop, instruction = min(start + chunk_size, n), onward if start else whole
        rows = torch.cat([instruction.to(token_ids.device), token_ids[max(0, start - overlap) : stop]])
        found.append(Probe(rows, start, stop, position=n))
    return found


def repeated(positions: Tensor, probe: Probe, num_prefix: int = NUM_PREFIX) -> tuple[Tensor, Tensor]:
    """Which slots a probe's rows repeat, and which their softmax spans; positions [B, H, L] are -1 where empty, both are bool likewise."""
    chunk = (positions >= probe.start) & (positions < probe.stop)
    return chunk, chunk | ((positions >= 0) & (positions < num_prefix))


@dataclass(frozen=True)
class Rows:
    """Rows that ran after a context, and what one layer shows of them and of it.

    queries  [B, Q, R, D] of the rows, rotated
    own      [B, H, R, D] keys of the rows, rotated
    keys     [B, H, L, D] of the context, rotated
    seen     [B, H, L] bool, the slots of the context that the softmax spans
    scale    of the softmax
    """

    queries: Tensor
    own: Tensor
    keys: Tensor
    seen: Tensor
    scale: float

    @cached_property
    def columns(self) -> Tensor:
        """[C] the slots that some head sees."""
        return self.seen.flatten(0, 1).any(0).nonzero()[:, 0]

    @cached_property
    def all_keys(self) -> Tensor:
        """[B, H, C + R, D] keys of those slots and of the rows."""
        return torch.cat([self.keys[:, :, self.columns], self.own], 2)

    @cached_property
    def positions(self) -> Tensor:
        """[R] a row sees all seen slots, which stand at 0, itself, and the rows before it."""
        return torch.arange(1, self.own.shape[2] + 1, device=self.own.device)

    @cached_property
    def key_positions(self) -> Tensor:
        """[B, H, C + R] of `all_keys`, -1 where not seen."""
        return torch.cat([self.seen[..., self.columns].int() - 1, self.positions.expand(self.own.shape[:3])], 2)

    def spread(self, found: Tensor) -> Tensor:
        """[B, H, L] what was found [B, H, C] of the slots that some head sees, 0 elsewhere."""
        return found.new_zeros(self.seen.shape).index_copy(2, self.columns, found)


def attention(rows: Rows) -> Tensor:
    """[B, H, L] float32 largest attention that the rows pay to each slot: softmax over [seen slots | rows up to this one], maximum over
    rows and query group."""
    at = rows.positions.expand(len(rows.own), -1)
    mass = ops.column_mass(rows.queries, rows.all_keys, at, rows.key_positions, rows.scale, over_group="max", over_queries="max")
    return rows.spread(mass[..., : len(rows.columns)])


def attention_plus(rows: Rows, hidden: Tensor, norms: Tensor) -> Tensor:
    """KVzip+ (arXiv:2601.07891): as `attention`, each weight times ||W_O v|| of the slot over ||h|| of the row before the maximum.

    hidden   [B, R, M] the rows' input of self-attention, after the input layernorm as in the authors' code
    norms    [B, Q, L] ||W_O v|| of each slot by each query head
    """
    H, C = rows.own.shape[1], len(rows.columns)
    keys, queries = rows.all_keys[:, :, None].float(), rows.queries.unflatten(1, (H, -1)).float() * rows.scale
    at = rows.key_positions[:, :, None, None]  # [B, H, 1, 1, C + R]
    best = queries.new_zeros(*queries.shape[:3], C)  # [B, H, G, C]
    for block in rows.positions.split(BLOCK):
        q, h = queries[:, :, :, block - 1], hidden[:, None, None, block - 1].float()
        unseen = (at < 0) | (at > block[:, None])
        weights = (q @ keys.mT).masked_fill(unseen, float("-inf")).softmax(-1)[..., :C] / h.norm(dim=-1, keepdim=True)
        best = torch.maximum(best, weights.amax(3))
    return rows.spread((best * norms.unflatten(1, (H, -1))[..., rows.columns]).amax(2))
