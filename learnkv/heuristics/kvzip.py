"""KVzip (arXiv:2505.23416): tokens that the model looks at when it repeats its context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from learnkv import ops
from learnkv.observation import Observation, Probe, ProbeScorer

WHOLE = "\n\nWrite out the text above again, word for word:\n\n"
ONWARD = "\n\nWrite out the text above again, word for word, from where it says:\n\n"


class Tokenizer(Protocol):
    """What KVzip asks of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class KVzip(ProbeScorer):
    """score_j = largest attention on token j while the model is made to repeat the prompt (arXiv:2505.23416, section 3.2).

    The prompt is cut in chunks.  Per chunk an instruction to repeat it, for later chunks with the last tokens of the chunk
    before, and the chunk itself run after the prompt.  Softmax over [first tokens | chunk | these rows]; the maximum over
    rows and query group.  It costs about one more prefill.  The paper's budget is one over all heads: allocate="adaptive_global".

    Differs: the instruction is in our words, without a chat template; the paper never evicts the system prompt, here the policy's
    sinks and pins say what stays; tokens generated later are not scored and stay before scored ones.
    """

    tokenizer: Tokenizer
    chunk_size: int = 2048  # tokens; official code 2,000, kvpress 2,048
    overlap: int = 8  # tokens of the chunk before, in the instruction
    num_prefix: int = 4  # first tokens of the prompt in every softmax

    def __post_init__(self) -> None:
        if self.chunk_size < 1 or self.overlap < 0 or self.num_prefix < 0:
            raise ValueError(
                f"chunk_size={self.chunk_size}, overlap={self.overlap}, num_prefix={self.num_prefix} count tokens; give at least 1, 0, 0"
            )

    def probe(self, token_ids: Tensor) -> list[Probe]:
        n = len(token_ids)
        return [self.repeat(token_ids, start, min(start + self.chunk_size, n)) for start in range(0, n, self.chunk_size)]

    def repeat(self, token_ids: Tensor, start: int, stop: int) -> Probe:
        """The rows that repeat tokens start..stop - 1."""
        instruction = torch.tensor(self.tokenizer.encode(ONWARD if start else WHOLE, add_special_tokens=False), dtype=torch.int64)
        before = token_ids[max(0, start - self.overlap) : start]
        rows = torch.cat([instruction.to(token_ids.device), before, token_ids[start:stop]])
        return Probe(rows, start, stop, position=len(token_ids))

    def absorb(self, obs: Observation, probe: Probe, queries: Tensor, keys: Tensor) -> Tensor:
        R = keys.shape[2]
        chunk = (obs.positions >= probe.start) & (obs.positions < probe.stop)  # [1, H, L]
        seen = chunk | (obs.filled & (obs.positions < self.num_prefix))
        columns = seen.flatten(0, 1).any(0).nonzero()[:, 0]  # slots that some head looks at
        ahead = torch.arange(1, R + 1, device=keys.device)  # a row sees all slots at 0, itself and the rows before
        at = torch.cat([seen[..., columns].int() - 1, ahead.expand(*keys.shape[:2], R)], 2)
        mass = ops.column_mass(
            queries, torch.cat([obs.keys[:, :, columns], keys], 2), ahead[None], at, obs.scale, over_group="max", over_queries="max"
        )
        learnt = torch.zeros_like(obs.memory[..., 0]).index_copy(2, columns, mass[..., : len(columns)])
        return torch.where(chunk, learnt, obs.memory[..., 0])[..., None]
