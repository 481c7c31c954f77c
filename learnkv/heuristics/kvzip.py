"""KVzip (arXiv:2505.23416): tokens that the model looks at when it repeats its context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learnkv import reconstruction
from learnkv.observation import Observation, Probe, ProbeScorer
from learnkv.reconstruction import Tokenizer


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
    chunk_size: int = reconstruction.CHUNK_SIZE  # tokens
    overlap: int = reconstruction.OVERLAP  # tokens of the chunk before, in the instruction
    num_prefix: int = reconstruction.NUM_PREFIX  # first tokens of the prompt in every softmax

    def __post_init__(self) -> None:
        if self.chunk_size < 1 or self.overlap < 0 or self.num_prefix < 0:
            raise ValueError(
                f"chunk_size={self.chunk_size}, overlap={self.overlap}, num_prefix={self.num_prefix} count tokens; give at least 1, 0, 0"
            )

    def probe(self, token_ids: Tensor) -> list[Probe]:
        whole, onward = reconstruction.instructions(self.tokenizer)
        return reconstruction.repetitions(token_ids, whole, onward, self.chunk_size, self.overlap)

    def absorb(self, obs: Observation, probe: Probe, queries: Tensor, keys: Tensor) -> Tensor:
        chunk, seen = reconstruction.repeated(obs.positions, probe, self.num_prefix)
        learnt = reconstruction.attention(reconstruction.Rows(queries, keys, obs.keys, seen, obs.scale))
        return torch.where(chunk, learnt, obs.memory[..., 0])[..., None]
