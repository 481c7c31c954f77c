"""What a token turns out to be worth: attention that the future pays to it, in row blocks, never S x S."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from learnkv import ops
from learnkv.traces.format import Continuation

Future = Literal["question_answer", "answer", "response"]
OverQuestions = Literal["sum", "max"]
ROWS = 64  # context rows at once: a block then skips the keys after its last row, and fits a core's cache


def future_rows(asked: Continuation, future: Future) -> tuple[Tensor, int]:
    """The tokens that run after the context, and from which of them on attention counts.

    question_answer  the question and its given answer, all rows
    answer           the same tokens, the answer's rows only
    response         the question and the model's own response, the response's rows only
    """
    after = asked.response if future == "response" else asked.answer
    return torch.cat((asked.question, after)), 0 if future == "question_answer" else len(asked.question)


def utility(queries: Tensor, keys: Tensor, num_tokens: int, scale: float) -> Tensor:
    """Future utility (arXiv:2602.10238, section 3.1): attention that later rows pay to each context token, maximum over the query
    group, sum over the rows.  The keys of the rows themselves stay in the softmax.

    queries     [B, Q, T, D] rotated, the last T of the sequence
    keys        [B, H, S, D] rotated, of the whole sequence: context, then what followed
    num_tokens  int          n tokens of context
    returns     [B, H, n] float32
    """
    T, S = queries.shape[2], keys.shape[2]
    return mass_of_rows(queries, keys, range(S - T, S), scale, "max")[..., :num_tokens]


def attention(queries: Tensor, keys: Tensor, num_tokens: int, scale: float) -> Tensor:
    """What LookaheadKV and Judge Q imitate (arXiv:2603.10899, section 2): attention of later rows, mean over the rows, per query head.

    Shapes as in `utility`, but it returns [B, Q, n].  A row's shares of the context do not add up to 1: later keys stay in the softmax.
    """
    B, Q, T, D = queries.shape
    H, S = keys.shape[1:3]
    per_head = keys[:, :, None].expand(B, H, Q // H, S, D).reshape(B, Q, S, D)
    return mass_of_rows(queries, per_head, range(S - T, S), scale, "sum")[..., :num_tokens] / T


def peak_logit(queries: Tensor, keys: Tensor, num_tokens: int, scale: float) -> Tensor:
    """What Locret imitates (arXiv:2410.01805): largest attention logit of later rows, over the rows and the query group.

    Shapes as in `utility`.
    """
    B, Q, T, D = queries.shape
    H = keys.shape[1]
    rows = queries.float().reshape(B, H, Q // H * T, D) * scale  # all rows come after all tokens: no mask
    blocks = [(block @ keys[:, :, :num_tokens].float().mT).amax(2) for block in rows.split(ROWS, 2)]
    return torch.stack(blocks).amax(0)


@dataclass(frozen=True)
class Target:
    """A number per token that the future decides.

    of              queries [B, Q, T, D] of later rows, keys [B, H, S, D] of all, n, scale -> [B, heads, n] float32
    heads           "kv": per KV head; "query": per query head
    over_questions  how the questions of one context are joined, whatever the recipe says; None leaves it to the recipe
    """

    of: Callable[[Tensor, Tensor, int, float], Tensor]
    heads: Literal["kv", "query"] = "kv"
    over_questions: OverQuestions | None = None


OVER_QUESTIONS: dict[OverQuestions, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum}
TARGETS: dict[str, Target] = {
    "utility": Target(utility),
    "attention": Target(attention, "query", "sum"),
    "peak_logit": Target(peak_logit, "kv", "max"),
}
RECONSTRUCTIONS = ("reconstruction", "reconstruction_plus")  # per KV head, of the context alone: `learnkv.reconstruction`
PER_TOKEN = (*TARGETS, *RECONSTRUCTIONS)  # [layers, heads, n] each


def context_mass(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """What H2O remembers of a prompt (arXiv:2306.14048): attention each token received, summed over all queries and the group.

    queries  [B, Q, n, D] rotated
    keys     [B, H, n, D] rotated
    returns  [B, H, n] float32
    """
    return sum_of_blocks(queries, keys, range(queries.shape[2]), scale, "sum")


def cut_positions(num_tokens: int, count: int, seed: int) -> Tensor:
    """[C] int64 ascending cut points, uniform in 1..n-1 without repetition (arXiv:2602.10238, Alg. 1); C = min(count, n - 1)."""
    generator = torch.Generator().manual_seed(seed)
    return (1 + torch.randperm(num_tokens - 1, generator=generator)[:count]).sort().values


def utility_cuts(queries: Tensor, keys: Tensor, utility: Tensor, cuts: Tensor, scale: float) -> Tensor:
    """Future utility at earlier ends of the context: the context's own rows from the cut on are future too.

    queries  [B, Q, n, D] rotated, of the context
    keys     [B, H, n, D] rotated, of the context
    utility  [B, H, n] float32 at the end of the context
    cuts     [C] int64 ascending, each in 1..n-1
    returns  [C, B, H, n] float32, 0 at and after a cut
    """
    n, later, out = keys.shape[2], utility, []
    for start, stop in reversed(list(pairwise([*cuts.tolist(), n]))):
        later = later + sum_of_blocks(queries, keys, range(start, stop), scale, "max")
        out.append(later.masked_fill(torch.arange(n, device=keys.device) >= start, 0))
    return torch.stack(out[::-1])


def sum_of_blocks(queries: Tensor, keys: Tensor, rows: range, scale: float, over_group: str) -> Tensor:
    """[B, H, n] float32 attention of the context's `rows`, ROWS of them at a time."""
    out = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
    for start in range(rows.start, rows.stop, ROWS):
        block = range(start, min(start + ROWS, rows.stop))
        mass = mass_of_rows(queries[:, :, block.start : block.stop], keys[:, :, : block.stop], block, scale, over_group)
        out[..., : block.stop] += mass
    return out


def mass_of_rows(queries: Tensor, keys: Tensor, rows: range, scale: float, over_group: str) -> Tensor:
    """`ops.column_mass` of unpadded sequences: query t stands at position rows[t], key s at position s."""
    B, H, S, _ = keys.shape
    key_positions = torch.arange(S, device=keys.device).expand(B, H, S)
    query_positions = torch.arange(rows.start, rows.stop, device=keys.device).expand(B, len(rows))
    return ops.column_mass(queries, keys, query_positions, key_positions, scale, over_group=over_group)
