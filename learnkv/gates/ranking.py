"""Losses that rank a head's tokens by their utility: Plackett-Luce (arXiv:2602.10238) and the paper's supervised ablations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from learnkv import ops
from learnkv.gates.base import Batch

LEAST_REWARD = -200.0  # authors' clamp
PROTECTED = 4, 16  # sinks and recent tokens of `Policy` and of our recipes; where a reward is reported, their order is left out
LEAST_COST = 1e-8  # authors' clamp: a head that nothing attends to gets reward 0


@dataclass(frozen=True)
class Items:
    """What is ranked: the first `lengths[b]` tokens of every head of every trace.

    utility      [l, H, B, n] float32, 0 on padding, which lies at the tail
    lengths      [B] int64
    batch        the step, for its randomness; trace b is batch.traces[b]
    first_layer  which layer row 0 is: layers draw apart, so that working through them in chunks changes nothing
    """

    utility: Tensor
    lengths: Tensor
    batch: Batch
    first_layer: int = 0

    @property
    def filled(self) -> Tensor:
        """[B, n] bool, False on padding."""
        return torch.arange(self.utility.shape[-1], device=self.utility.device) < self.lengths[:, None]

    def mean(self, per_token: Tensor) -> Tensor:
        """[..., B] mean over the filled tokens of [..., B, n]."""
        return per_token.masked_fill(~self.filled, 0).sum(-1) / self.lengths


class RankingLoss(Protocol):
    """(loss, reward), both [l, H, B]: what to minimise per head and trace, and the normalised reward on the way, detached."""

    def __call__(self, scores: Tensor, items: Items, permutations: int) -> tuple[Tensor, Tensor]:
        """scores [l, H, B, n] float32, any value on padding; permutations drawn per item where the loss draws any."""
        ...


def plackett_luce(scores: Tensor, items: Items, permutations: int) -> tuple[Tensor, Tensor]:
    """REINFORCE over K permutations of the same item, leave-one-out baseline over them (arXiv:2602.10238, Alg. 1).

    The log-probability is averaged over the picks (authors' code), advantages are standardised and clipped to [-2, 2].
    """
    if permutations < 2:
        raise ValueError(f"permutations={permutations} leaves nothing to compare with; give 2 or more, or loss=plackett_luce_batch")
    order = sample(scores.detach(), items, permutations)  # [K, l, H, B, n]
    reward = order_reward(order, items)  # [K, l, H, B]
    gain = standardised(reward, 0)
    return -(gain * order_logprob(scores, order, items)).mean(0), reward.mean(0)


def plackett_luce_batch(scores: Tensor, items: Items, permutations: int) -> tuple[Tensor, Tensor]:
    """The authors' batch form: one permutation per item, baseline over the other items of the batch; `permutations` is not used."""
    if len(items.lengths) < 2:
        raise ValueError(f"loss=plackett_luce_batch compares the traces of a batch, this one holds {len(items.lengths)}; raise train.batch")
    order = sample(scores.detach(), items, 1)
    reward = order_reward(order, items)
    gain = standardised(reward, -1)
    return -(gain * order_logprob(scores, order, items))[0], reward[0]


def listnet(scores: Tensor, items: Items, permutations: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy between the shares of utility and the softmax of the scores (ListNet, top-1 form)."""
    share = items.utility / items.utility.sum(-1, keepdim=True).clamp(min=LEAST_COST)
    logprob = scores.masked_fill(~items.filled, float("-inf")).log_softmax(-1).masked_fill(~items.filled, 0)
    return -(share * logprob).sum(-1), normalised_reward(scores.detach(), items)


def listnet_model(scores: Tensor, items: Items, permutations: int) -> tuple[Tensor, Tensor]:
    """`listnet` with one softmax over the tokens of all heads and layers: what heads owe each other is learned too.

    The mean over heads stays that of `listnet`, so that one learning rate serves both.
    """
    layers, H = scores.shape[:2]
    share = items.utility / items.utility.sum((0, 1, 3), keepdim=True).clamp(min=LEAST_COST)
    total = scores.masked_fill(~items.filled, float("-inf")).logsumexp((0, 1, 3), keepdim=True)
    logprob = (scores - total).masked_fill(~items.filled, 0)
    return -(share * logprob).sum(-1) * (layers * H), normalised_reward(scores.detach(), items)


def log_mse(scores: Tensor, items: Items, permutations: int) -> tuple[Tensor, Tensor]:
    """Squared error to the logarithm of the utility, both centred over the item: a constant decides nothing within a head."""
    target = (items.utility + UTILITY_FLOOR).log()
    error = (scores - items.mean(scores)[..., None]) - (target - items.mean(target)[..., None])
    return items.mean(error.square()), normalised_reward(scores.detach(), items)


def soft_rank(scores: Tensor, items: Items, permutations: int) -> tuple[Tensor, Tensor]:
    """Squared error between differentiable ranks and the oracle's, as fractions of the item's length.

    Differs: ranks are sums of pairwise sigmoids, in blocks; the paper projects onto the permutahedron (Blondel et al.).
    """
    masked = scores.masked_fill(~items.filled, -1e9)  # finite: padding compared with padding must not be NaN
    blocks = torch.arange(scores.shape[-1], device=scores.device).split(PAIR_ROWS)
    ranks = torch.cat([checkpoint(rank_of_rows, masked, rows, use_reentrant=False) for rows in blocks], -1)
    error = (ranks - ranks_of(oracle_order(items))) / items.lengths[:, None]
    return items.mean(error.square()), normalised_reward(scores.detach(), items)


LOSSES: dict[str, RankingLoss] = {
    "plackett_luce": plackett_luce,
    "plackett_luce_batch": plackett_luce_batch,
    "listnet": listnet,
    "listnet_model": listnet_model,
    "log_mse": log_mse,
    "soft_rank": soft_rank,
}

OVER_ALL_HEADS = frozenset({"listnet_model"})  # losses whose scores compare across heads as they are

UTILITY_FLOOR = 1e-4  # attention below this is noise to a logarithm
PAIR_ROWS = 64  # rows of the n x n comparison held at once


# ---- drawing and judging orders; an order lists tokens from the last to be evicted to the first, padding at its tail


def sample(scores: Tensor, items: Items, permutations: int) -> Tensor:
    """K draws from the Plackett-Luce distribution by sorting scores + Gumbel noise: [l, H, B, n] -> [K, l, H, B, n] int64."""
    noise = torch.stack([gumbel(items, b, scores, permutations) for b in range(len(items.lengths))], 3)
    return (scores + noise).masked_fill(~items.filled, float("-inf")).argsort(-1, descending=True)


def gumbel(items: Items, b: int, scores: Tensor, permutations: int) -> Tensor:
    """[K, l, H, n] Gumbel(0, 1) noise of trace b: what it gets does not depend on padding, chunk or neighbours."""
    layers, H, _, n = scores.shape
    trace, length = items.batch.traces[b], int(items.lengths[b])
    out = scores.new_zeros(permutations, layers, H, n)
    for i in range(layers):
        generator = items.batch.generator(trace, f"gumbel/{items.first_layer + i}", scores.device)
        uniform = torch.rand(permutations, H, length, generator=generator, device=scores.device)
        out[:, i, :, :length] = uniform.clamp_(min=torch.finfo(torch.float32).tiny).log_().neg_().log_().neg_()
    return out


def order_logprob(scores: Tensor, order: Tensor, items: Items) -> Tensor:
    """[K, l, H, B] log-probability of each order, mean over its picks; differentiable in scores [l, H, B, n]."""
    picked = scores.expand(order.shape).gather(-1, order).masked_fill(~items.filled, float("-inf"))
    return ops.pl_logprob(picked).sum(-1) / items.lengths


def order_reward(order: Tensor, items: Items) -> Tensor:
    """[K, l, H, B] reward of each order over all budgets, normalised so that the oracle order has -1 (arXiv:2602.10238, section 3.1.1)."""
    best = ops.budget_reward(items.utility.sort(-1, descending=True).values)
    reached = ops.budget_reward(items.utility.expand(order.shape).gather(-1, order))
    return (-reached / best.clamp(max=-LEAST_COST)).clamp(min=LEAST_REWARD)


def normalised_reward(scores: Tensor, items: Items) -> Tensor:
    """[l, H, B] reward of the order that the scores themselves give; of equal scores the later token stays."""
    n = scores.shape[-1]
    late_first = scores.masked_fill(~items.filled, float("-inf")).flip(-1)
    return order_reward(n - 1 - late_first.argsort(dim=-1, descending=True, stable=True), items)


def reward_of(scores: Tensor, utility: Tensor, *, num_sinks: int = 0, num_recent: int = 0) -> Tensor:
    """Normalised reward of any scorer on one trace: both [layers, H, n] -> [layers, H]; -1 is the oracle's.

    num_sinks, num_recent  first and last tokens that a policy keeps anyway; their order says nothing and is left out
    """
    length = torch.tensor([scores.shape[-1]], device=scores.device)
    items = Items(utility.float()[:, :, None], length, Batch((), seed=0, step=0))
    return normalised_reward(*unprotected(scores.float()[:, :, None], items, num_sinks, num_recent))[..., 0]


def unprotected(scores: Tensor, items: Items, num_sinks: int, num_recent: int) -> tuple[Tensor, Items]:
    """Scores [l, H, B, n] and items without what a policy keeps anyway.

    Of a context that is protected as a whole one token is left, which any order ranks alike.
    """
    first = min(num_sinks, scores.shape[-1] - 1)
    lengths = (items.lengths - num_sinks - num_recent).clamp(min=1)
    rest = replace(items, utility=items.utility[..., first:], lengths=lengths)
    return scores[..., first:], replace(rest, utility=rest.utility.masked_fill(~rest.filled, 0))


def standardised(reward: Tensor, dim: int) -> Tensor:
    """Advantage over the mean of the others along `dim`, in units of their spread, clipped to [-2, 2]."""
    count = reward.shape[dim]
    others = (reward.sum(dim, keepdim=True) - reward) / (count - 1)
    gain = reward - others
    return (gain / (gain.std(dim, keepdim=True) + 1e-6)).clamp(-2, 2)


# ---- ranks


def rank_of_rows(scores: Tensor, rows: Tensor) -> Tensor:
    """Soft ranks [..., rows], 1 for the highest, of the tokens `rows` among all of scores [..., n]."""
    others = scores[..., None, :] - scores[..., rows, None]  # [..., rows, n]
    return others.sigmoid().sum(-1) + 0.5  # a token against itself gives the other half


def oracle_order(items: Items) -> Tensor:
    """[l, H, B, n] the order by utility, padding at the tail."""
    return items.utility.masked_fill(~items.filled, -1).argsort(dim=-1, descending=True, stable=True)


def ranks_of(order: Tensor) -> Tensor:
    """[..., n] float32 rank of each token in an order, 1 for the first."""
    rank = torch.arange(1, order.shape[-1] + 1, device=order.device, dtype=torch.float32)
    return torch.empty(order.shape, device=order.device).scatter_(-1, order, rank.expand(order.shape))
