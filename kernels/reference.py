"""Every op in plain torch: the meaning that Triton kernels are tested against, and what CPU tensors run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_pages(pages: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The slots of every head side by side, padded with zeros.

    pages    [N, P, X]
    table    [B, H, pages] int32, -1 past a head's last page
    lengths  [B, H] int32
    returns  [B, H, L, X] with L the longest head
    """
    P = pages.shape[1]
    L = int(lengths.max()) if lengths.numel() else 0
    used = table[..., : -(-L // P)].clamp(min=0).long()
    out = pages[used].flatten(2, 3)[:, :, :L]  # [B, H, L, X]
    empty = torch.arange(L, device=pages.device) >= lengths[..., None]
    return out.masked_fill(empty[..., None], 0)


def select(scores: Tensor, positions: Tensor, count: Tensor) -> Tensor:
    """The best `count` entries of each row; of equal scores the later position wins.

    scores     [..., L] float32, -inf never chosen
    positions  [..., L] int32
    count      [...] int64
    returns    [..., L] bool
    """
    order = ranking_keys(scores, positions).argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    chosen = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, rank < count[..., None])
    return chosen & (scores > float("-inf"))


def ranking_keys(scores: Tensor, positions: Tensor) -> Tensor:
    """[..., L] int64 that order as (score, position) do: a float's bits order as its value, those of negative ones the other way round."""
    bits = (scores + 0.0).contiguous().view(torch.int32)  # 0.0 in the place of -0.0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * (1 << 32) + positions


BLOCK_ELEMENTS = 1 << 21  # logits held at once: 8 MiB of float32, near a core's cache
FEW_ROWS = 4  # for so few, a mask over all slots costs less than to know where none is needed


def row_blocks(
    queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """Causal logits a block of query rows at a time: (rows, [B, H, G, t, l] float32), -inf where a query may not look.

    The l slots are the first ones, up to the last that any row of the block sees.

    queries          [B, Q, T, D] rotated
    keys             [B, H, L, D] rotated
    query_positions  [B, T]     -1 where the row is padding
    key_positions    [B, H, L]  -1 where empty
    """
    B, Q, T, D = queries.shape
    H, L = keys.shape[1:3]
    grouped = queries.view(B, H, Q // H, T, D).float() * scale
    transposed = keys.float().mT[:, :, None]  # [B, H, 1, D, L]
    never = torch.iinfo(key_positions.dtype).max
    held = key_positions.masked_fill(key_positions < 0, never).flatten(0, 1)  # [B * H, L]
    plain, stop = 0, L
    if T > FEW_ROWS:
        before = held.amax(0).cummax(0).values  # [L], highest position up to a slot
        after = held.amin(0).flip(0).cummin(0).values.flip(0)  # [L], lowest position from a slot on
    step = max(1, BLOCK_ELEMENTS // max(1, B * Q * L))
    for start in range(0, T, step):
        rows = slice(start, min(start + step, T))
        at = query_positions[:, rows].to(key_positions.dtype)
        if T > FEW_ROWS:
            plain = int(torch.searchsorted(before, at.amin(), right=True))  # slots that every row sees
            stop = int(torch.searchsorted(after, at.amax(), right=True))
        logits = grouped[:, :, :, rows] @ transposed[..., :stop]
        cut = held.view(B, H, 1, L)[..., plain:stop] > at[:, None, :, None]  # [B, H, t, stop - plain]
        logits[..., plain:].masked_fill_(cut[:, :, None], float("-inf"))
        yield rows, logits


def row_lse(queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor, scale: float) -> Tensor:
    """Log-sum-exp of every query's causal attention logits; arguments as `row_blocks`.

    returns  [B, Q, T] float32, -inf where a query sees nothing
    """
    B, Q, T, _ = queries.shape
    H, L = keys.shape[1:3]
    out = queries.new_full((B, H, Q // H, T), float("-inf"), dtype=torch.float32)
    if L:
        for rows, logits in row_blocks(queries, keys, query_positions, key_positions, scale):
            out[..., rows] = logits.logsumexp(-1)
    return out.view(B, Q, T)


REDUCE: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}


def column_mass(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    *,
    over_group: str = "sum",
    over_queries: str = "sum",
    lse: Tensor | None = None,
) -> Tensor:
    """Attention that each slot receives, reduced over the query group, then over the queries; never T x L at once.

    queries                    [B, Q, T, D] rotated
    keys                       [B, H, L, D] rotated
    query_positions            [B, T]     causal: a query sees slots at positions up to its own; -1 where the row is padding
    key_positions              [B, H, L]  -1 where empty
    over_group, over_queries   "sum", "mean" (over the real queries) or "max"
    lse                        [B, Q, T] float32 as `row_lse` gives it, of these keys or of more; saves Triton a pass over them
    returns                    [B, H, L] float32, 0 on empty slots
    """
    B, T = query_positions.shape
    H, L = keys.shape[1:3]
    out = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
    if not L:
        return out
    first = key_positions.masked_fill(key_positions < 0, torch.iinfo(key_positions.dtype).max).amin(-1)  # [B, H]
    blind = query_positions[:, None] < first[..., None]  # [B, H, T], a query that sees nothing gives nothing
    total = lse.view(B, H, -1, T).masked_fill(blind[:, :, None], 0) if lse is not None else None
    for rows, logits in row_blocks(queries, keys, query_positions, key_positions, scale):
        weights = logits.softmax(-1) if total is None else logits.sub_(total[..., rows, None]).clamp_(max=0).exp_()
        if blind[..., rows].any():
            weights = weights.masked_fill(blind[:, :, None, rows, None], 0)
        seen = out[..., : weights.shape[-1]]
        if over_queries == "max":
            torch.maximum(seen, REDUCE[over_group](weights, 2).amax(2), out=seen)
        elif over_group == "max":
            seen += weights.amax(2).sum(2)
        else:
            seen += weights.sum((2, 3)) / (weights.shape[2] if over_group == "mean" else 1)
    if over_queries == "mean":
        out = out / (query_positions >= 0).sum(-1).clamp(min=1)[:, None, None]
    return out


def pool(mass: Tensor, positions: Tensor, *, kernel_size: int, pooling: str) -> Tensor:
    """Each slot's mass pooled with its neighbours', the filled slots up to kernel_size // 2 before and after it in the head.

    No slot is left out and none protected: sinks, recent window and pins are the policy's.

    mass       [B, H, L] float32
    positions  [B, H, L]  -1 where empty
    pooling    "max" or "mean" of the filled slots covered
    returns    [B, H, L] float32, 0 on empty slots
    """
    empty, half = positions < 0, kernel_size // 2
    if not mass.numel():
        return mass
    if pooling == "max":
        return F.max_pool1d(mass.masked_fill(empty, float("-inf")), kernel_size, stride=1, padding=half).masked_fill(empty, 0)
    total = F.avg_pool1d(mass.masked_fill(empty, 0), kernel_size, stride=1, padding=half)
    share = F.avg_pool1d((~empty).float(), kernel_size, stride=1, padding=half)
    return (total / share).masked_fill(empty, 0)


def page_owner(table: Tensor, num_pages: int) -> Tensor | None:
    """table [B, H, pages] -> [N] int64, the head b * H + h that each page belongs to, -1 where it is free; None where one has several."""
    held = table >= 0
    pages, counts = table[held].long(), held.sum(-1).flatten()
    owner = pages.new_full((num_pages,), -1)
    owner[pages] = torch.arange(len(counts), device=table.device).repeat_interleave(counts)
    return owner if int((owner >= 0).sum()) == len(pages) else None


def attend(
    queries: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    table: Tensor,
    query_positions: Tensor,
    scale: float,
    owner: Tensor | None = None,
) -> Tensor:
    """Causal attention of queries over the pages of their heads, page by page with one softmax per head.

    No page is gathered but where one belongs to several heads (rows that were one and share their past).

    queries                 [B, Q, T, D] rotated
    key_pages, value_pages  [N, P, D]
    position_pages          [N, P] int32, -1 where empty
    table                   [B, H, pages] int32, -1 past a head's last page; rows may have pages in common
    query_positions         [B, T]  -1 where the row is padding
    owner                   [N] what `page_owner` says of the table, where that is known
    returns                 [B, Q, T, D] in the queries' type, 0 where a query sees nothing
    """
    B, Q, T, D = queries.shape
    if owner is None:
        owner = page_owner(table, len(position_pages))
    if owner is None:
        pages, counts = table[table >= 0].long(), (table >= 0).sum(-1).flatten()
        key_pages, value_pages, position_pages = key_pages[pages], value_pages[pages], position_pages[pages]
        owner = torch.arange(len(counts), device=table.device).repeat_interleave(counts)
    H, (N, P) = table.shape[1], position_pages.shape
    if B == 1 and Q * T * N * P <= FEW_LOGITS and int(owner.min()) >= 0:
        return attend_at_once(queries, key_pages, value_pages, position_pages, owner, query_positions, H, scale)
    head = torch.where(owner < 0, B * H, owner)  # free pages belong to a head of their own: a NaN in them is nobody's
    row = head.clamp(max=B * H - 1) // H
    grouped = queries.reshape(B * H, Q // H, T, D).float() * scale
    grouped = torch.cat([grouped, torch.zeros_like(grouped[:1])])
    keys, values = key_pages.float(), value_pages.float()
    used = (position_pages >= 0) & (owner >= 0)[:, None]  # [N, P]
    step = max(1, BLOCK_ELEMENTS // (N * (Q // H) * max(P, D)))
    blocks = []
    for start in range(0, T, step):
        q = grouped[:, :, start : start + step]  # [B * H + 1, G, t, D]
        seen = used[..., None] & (position_pages[..., None] <= query_positions[row][:, None, start : start + step])  # [N, P, t]
        logits = (keys @ q.flatten(1, 2)[head].mT).unflatten(2, q.shape[1:3])  # [N, P, G, t]; this way round small products are fast
        blocks.append(segment_softmax_sum(logits.masked_fill_(~seen[:, :, None], float("-inf")), values, head, B * H + 1)[:-1])
    return torch.cat(blocks, 2).view(B, Q, T, D).to(queries.dtype)


FEW_LOGITS = 1 << 16  # for so few, of all queries with all slots, one masked product is faster than one per page


def attend_at_once(
    queries: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    owner: Tensor,
    query_positions: Tensor,
    num_heads: int,
    scale: float,
) -> Tensor:
    """`attend` of one row as one attention of all queries over all slots, other heads' masked."""
    _, Q, T, D = queries.shape
    heads = torch.arange(num_heads, device=owner.device)[:, None, None, None]
    seen = (position_pages >= 0) & (position_pages <= query_positions[0, :, None, None])  # [T, N, P]
    seen = (seen & (owner[:, None] == heads)).flatten(2)  # [H, T, S]
    seen = seen[:, None].expand(-1, Q // num_heads, -1, -1).reshape(1, 1, Q * T, -1)
    dtype = torch.promote_types(key_pages.dtype, value_pages.dtype)
    q, k, v = (x.reshape(1, 1, -1, D).to(dtype) for x in (queries, key_pages, value_pages))
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale).view(1, Q, T, D).to(queries.dtype)


def segment_softmax_sum(logits: Tensor, values: Tensor, head: Tensor, num_heads: int) -> Tensor:
    """Softmax over all slots of a head, whatever pages they lie in, times the values.

    logits   [N, P, G, t] float32, -inf where unseen
    values   [N, P, D] float32
    head     [N] int64
    returns  [num_heads, G, t, D] float32, 0 where all is unseen
    """
    highest = logits.amax(1)  # [N, G, t]
    peak = highest.new_full((num_heads, *highest.shape[1:]), torch.finfo(torch.float32).min)
    peak.scatter_reduce_(0, head[:, None, None].expand_as(highest), highest, "amax")
    weights = (logits - peak[head][:, None]).exp_()
    total = torch.zeros_like(peak).index_add_(0, head, weights.sum(1))
    partial = (weights.flatten(2).mT @ values).unflatten(1, weights.shape[2:])  # [N, G, t, D]
    out = partial.new_zeros(num_heads, *partial.shape[1:]).index_add_(0, head, partial)
    return out / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]


def pl_logprob(scores: Tensor) -> Tensor:
    """Plackett-Luce log-probability of each pick, given scores in the order of the permutation (arXiv:2602.10238, section 3).

    scores   [..., n] float32, scores[j] of the j-th pick; -inf on padding, which lies at the tail
    returns  [..., n] float32  s_j - logsumexp(s_j, s_j+1, ...), 0 on padding
    """
    # a reversed logcumsumexp with its sums in float64: exact over a range of 700, and a fifth of logcumsumexp's time with its backward
    shifted = scores - scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    rest = shifted.double().exp().flip(-1).cumsum(-1).flip(-1).clamp(min=torch.finfo(torch.float64).tiny).log()
    return (shifted - rest.float()).masked_fill(scores == float("-inf"), 0.0)


def budget_reward(utility: Tensor) -> Tensor:
    """Utility evicted, summed over the budgets 1..n and negated: -sum_i i * u_i with i = 1 for the first to be kept.

    Differs: the paper (arXiv:2602.10238, section 3.1.1) sums budgets 1..n-1, weight i - 1; the authors' code has weight i, as here.

    utility  [..., n] in the order of the permutation, 0 on padding
    returns  [...] float32
    """
    weight = torch.arange(1, utility.shape[-1] + 1, device=utility.device, dtype=torch.float32)
    return -(utility.float() * weight).sum(-1)
