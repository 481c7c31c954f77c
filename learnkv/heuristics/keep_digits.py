"""Keep digits: a lexical control without attention, keys or weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from learnkv.observation import Observation, Scorer


class Tokenizer(Protocol):
    """What this control asks of a tokenizer."""

    def __len__(self) -> int: ...

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]: ...


@dataclass(frozen=True, eq=False)
class KeepDigits(Scorer):
    """score_j = 1 where token j holds a digit, else 0; of equal ones the latest stay.  A control of ours: number prompts reward it."""

    tokenizer: Tokenizer

    memory_size = 1
    needs = frozenset({"token_ids"})

    @cached_property
    def digit_ids(self) -> Tensor:
        """int64 ids of the tokens whose text holds a digit; special tokens have no text."""
        texts = self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))], skip_special_tokens=True)
        return torch.tensor([i for i, text in enumerate(texts) if any(c.isdigit() for c in text)], dtype=torch.int64)

    def remember(self, obs: Observation) -> Tensor:
        assert obs.token_ids is not None
        digit = torch.isin(obs.token_ids, self.digit_ids.to(obs.token_ids.device))  # [B, T]
        return obs.write_new(digit[:, None, :, None].expand(*obs.new_slots.shape, 1))

    def score(self, obs: Observation) -> Tensor:
        return obs.memory[..., 0]
