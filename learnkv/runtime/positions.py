"""Renumbered positions: keys turned on by RoPE as if evicted tokens had never been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learnkv.geometry import removable_frequencies
from learnkv.observation import Scorer, Slots
from learnkv.rope import changes_with_length, renumbered

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RenumberedSlots(Slots):
    """Slots that follow each other up to the last token, in the order of their positions, which stay what they are.

    Between a query and a key lie as many positions as tokens that are held (StreamingLLM, arXiv:2309.17453, section 3.2), so distances
    never pass the budget however long the stream.

    Differs: the official code keeps keys without RoPE and turns all of them at every step; here those behind an evicted token are
    turned on from how they were born, which is the same but for rounding and leaves StreamingLLM its sinks to turn.

    num_seen     [B] int64 real tokens so far
    frequencies  [R / 2] float32 of the model's RoPE
    """

    num_seen: Tensor
    frequencies: Tensor

    @classmethod
    def of(cls, slots: Slots, num_seen: Tensor, frequencies: Tensor) -> RenumberedSlots:
        """The same slots, renumbered."""
        return cls(**{field.name: getattr(slots, field.name) for field in fields(slots)}, num_seen=num_seen, frequencies=frequencies)

    @cached_property
    def keys(self) -> Tensor:
        """[B, H, L, D] ascending in position, 0 where empty; those that nothing after them was evicted from are as they were born."""
        first = self.num_seen[:, None] - self.lengths  # [B, H] where the first slot moves to
        moved = first[..., None] + torch.arange(self.max_length, device=first.device) - self.positions
        return renumbered(self.gathered(self.key_pages), moved.masked_fill(~self.filled, 0), self.frequencies)


def frequencies_for(model: PreTrainedModel, scorers: Sequence[Scorer]) -> Tensor:
    """[R / 2] the model's frequencies; raises ValueError where it or a scorer can't do with renumbered positions."""
    frequencies = removable_frequencies(model)
    if not frequencies or changes_with_length(model):
        problem = "whose RoPE hangs on the length" if frequencies else "where RoPE is missing, interleaved, or not in all layers"
        raise ValueError(f'positions="renumbered" turns keys by one RoPE, and this is {type(model).__name__}, {problem}; use "original"')
    for scorer in scorers:
        if "rope_offset" in scorer.needs or type(scorer).probe is not Scorer.probe:
            raise ValueError(f'{type(scorer).__name__} reads keys as they were born; use it with positions="original"')
    return torch.tensor(frequencies)
