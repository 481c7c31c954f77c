"""Judge Q: learned rows without an adapter foresee what the response will attend to (arXiv:2509.10798)."""

from __future__ import annotations

from torch import Tensor

from learnkv.gates.probe_tokens import ProbeTokens, ProbeTokensConfig


class JudgeQ(ProbeTokens):
    """Embeddings alone, trained so that the rows' attention to the prompt is that of the model's own response (arXiv:2509.10798).

    loss = mean over layers and query heads of the squared distance between the rows' mean attention and the response's.
    LookaheadKV without its adapter.

    Differs: squares are added up over the prompt, where a mean would shrink the gradient to Adam's epsilon on long ones.
    """

    METHOD = "judge_q"
    Config = ProbeTokensConfig

    def distance(self, target: Tensor, shares: Tensor) -> Tensor:
        return (shares - target).square().sum(-1).mean()
