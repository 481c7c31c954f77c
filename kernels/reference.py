"""Every op in plain torch: the meaning that Triton kernels are tested against, and what CPU tensors run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def check_choice(op: str, argument: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a reduction that an op does not have."""
    if value not in choices:
        raise ValueError(f'ops.{op}({argument}="{value}"): there are {", ".join(choices)}')


def check_scores(op: str, scores: Tensor) -> None:
    """Refuses scores whose bits are not those of float32, by which they are ranked."""
    if scores.dtype != torch.float32:
        raise ValueError(f"ops.{op} ranks float32 scores, these are {str(scores.dtype).removeprefix('torch.')}; give scores.float()")


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
    """The best `count` entries of each row; of equal scores the later position wins, of equal positions too the first entry.

    scores     [..., L] float32, -inf and NaN never chosen
    positions  [..., L] int32
    count      [...] int64, 0 and less chooses nothing
    returns    [..., L] bool
    """
    check_scores("select", scores)
    keys, L = ranking_keys(scores, positions), scores.shape[-1]
    most = min(L, int(count.max())) if count.numel() else 0
    if most <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    best = keys.topk(most, -1).values
    last = best.gather(-1, (count.clamp(1, most) - 1)[..., None])  # the key of the last to be chosen
    above, equal = keys > last, keys == last
    spare = (count.clamp(0, L) - above.sum(-1))[..., None]  # [..., 1] how many of those with the last key
    chosen = above | (equal & (equal.cumsum(-1) <= spare)) if bool((equal.sum(-1, keepdim=True) > spare).any()) else above | equal
    return chosen & (scores > float("-inf")) & (count > 0)[..., None]


def ranking_keys(scores: Tensor, positions: Tensor) -> Tensor:
    """[..., L] int64 that order as (score, position) do: a float's bits order as its value, those of negative ones the other way round.

    NaN counts as -inf, -0.0 as 0.0.
    """
    bits = (scores.nan_to_num(float("-inf"), float("inf"), float("-inf")) + 0.0).contiguous().view(torch.int32)  # 0.0 in the place of -0.0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * (1 << 32) + positions


def evict_slot(scores: Tensor, positions: Tensor, protected: Tensor) -> Tensor:
    """The slot that each head gives up next: the lowest score of those unprotected, the earlier position of equal ones.

    It is the one that `select` of all but one would leave out.

    scores     [B, H, L] float32, NaN as -inf
    positions  [B, H, L] int32, -1 where empty
    protected  [B, H, L] bool
    returns    [B, H] int64, -1 where no slot may go
    """
    check_scores("evict_slot", scores)
    free = (positions >= 0) & ~protected
    keys = ranking_keys(scores, positions).masked_fill(~free, torch.iinfo(torch.int64).max)
    worst = free & (keys == keys.amin(-1, keepdim=True)) if keys.shape[-1] else free
    slots = torch.arange(keys.shape[-1], device=keys.device)
    return torch.cat([torch.where(worst, slots, -1), slots.new_full((*keys.shape[:-1], 1), -1)], -1).amax(-1)


def located(table: Tensor, slots: Tensor, held: Tensor, P: int) -> tuple[Tensor, Tensor]:
    """Pages [n] and rows in them [n] int64 of those slots [B, H, L] that are `held` [B, H, L], head by head."""
    b, h, l = held.nonzero(as_tuple=True)
    slots = slots.expand_as(held)[b, h, l]
    return table[b, h, slots // P].long(), slots % P


def compact(
    key_pages: Tensor, value_pages: Tensor, position_pages: Tensor, memory_pages: Tensor, table: Tensor, lengths: Tensor, keep: Tensor
) -> Tensor:
    """Drops all slots but `keep`, in place: those kept beyond the new length fill the holes below it, both ascending; order is not kept.

    Slots given up get position -1, memory 0 and value 0: an old NaN would outlive its weight of 0.  No page may stand in two places.

    key_pages, value_pages  [N, P, D]
    position_pages          [N, P] int32
    memory_pages            [N, P, C] float32
    table                   [B, H, pages] int32, -1 past a head's last page
    lengths                 [B, H] slots held, left as they are
    keep                    [B, H, L] bool, ignored from a head's length on
    returns                 [B, H] slots held now, in the type of lengths
    """
    P, slots = key_pages.shape[1], torch.arange(keep.shape[-1], device=keep.device)
    filled = slots < lengths[..., None]
    keep = keep & filled
    new_lengths = keep.sum(-1)
    below = slots < new_lengths[..., None]
    target, source = located(table, slots, ~keep & below, P), located(table, slots, keep & ~below, P)
    for pages in (key_pages, value_pages, position_pages, memory_pages):
        pages[target] = pages[source]
    stale = located(table, slots, filled & ~below, P)
    position_pages[stale], memory_pages[stale], value_pages[stale] = -1, 0, 0
    return new_lengths.to(lengths.dtype)


def copy_kept(
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    memory_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    keep: Tensor,
    target_key_pages: Tensor,
    target_value_pages: Tensor,
    target_position_pages: Tensor,
    target_memory_pages: Tensor,
    target_table: Tensor,
) -> Tensor:
    """Copies the slots in `keep`, in their order, to the first slots of each head in other pages; arguments as `compact`.

    memory_pages, target_memory_pages  [., P, C] float32, columns of wider ones perhaps
    target_table                       [B, H, pages] int32 with room for what is kept, in pages that `table` does not name
    returns                            [B, H] slots held there, in the type of lengths
    """
    P, slots = key_pages.shape[1], torch.arange(keep.shape[-1], device=keep.device)
    keep = keep & (slots < lengths[..., None])
    source, target = located(table, slots, keep, P), located(target_table, keep.cumsum(-1) - 1, keep, P)
    sources = (key_pages, value_pages, position_pages, memory_pages)
    targets = (target_key_pages, target_value_pages, target_position_pages, target_memory_pages)
    for old, new in zip(sources, targets, strict=True):
        new[target] = old[source]
    return keep.sum(-1).to(lengths.dtype)


def append_kv(
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    first: Tensor | None = None,
    padded: bool = True,
) -> Tensor:
    """Writes new tokens after what each head holds, in pages that it has; `lengths` stay as they are and are the caller's to raise.

    key_pages, value_pages  [N, P, D]
    position_pages          [N, P] int32
    table                   [B, H, pages] int32 with room for `lengths + (positions >= 0).sum(-1)[:, None]`
    lengths                 [B, H] slots held
    keys, values            [B, H, T, D] in the pages' type
    positions               [B, T] ordinals of the real tokens, -1 on padding, which is not stored
    first                   [B, H, 1] int64 where the first slot of each head lies among all slots, where its pages lie in one run
    padded                  False where nothing is padding: nobody then looks
    returns                 [B, H, T] int64 slots written to, -1 on padding
    """
    T, P = keys.shape[2], key_pages.shape[1]
    if padded:
        real = positions >= 0
        slots = lengths[..., None] + real.cumsum(-1)[:, None] - 1  # [B, H, T]
        written = real[:, None].expand_as(slots)
        slots = slots.masked_fill(~written, -1)
    else:
        slots = lengths[..., None] + torch.arange(T, device=keys.device) if T > 1 else lengths[..., None]
    where = written.flatten() if padded else slice(None)
    places = first + slots if first is not None else page_rows(table, slots, P)
    for pages, new in ((key_pages, keys), (value_pages, values)):
        pages.flatten(0, 1).index_copy_(0, places.flatten()[where], new.flatten(0, 2)[where])
    position_pages.view(-1).index_copy_(0, places.flatten()[where], positions.int()[:, None].expand(slots.shape).flatten()[where])
    return slots


def page_rows(table: Tensor, slots: Tensor, P: int) -> Tensor:
    """slots [B, H, S] -> [B, H, S] int64 rows of the flattened pages; meaningless past a head's last page."""
    slots = slots.clamp(min=0)
    return table.gather(2, slots // P).long() * P + slots % P


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
    if not queries.numel():
        return queries.new_full(queries.shape[:3], float("-inf"), dtype=torch.float32)
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
    check_reductions(over_group, over_queries)
    B, T = query_positions.shape
    H = keys.shape[1]
    out = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
    if not queries.numel() or not keys.numel():
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


def check_reductions(over_group: str, over_queries: str) -> None:
    """Of `column_mass`."""
    check_choice("column_mass", "over_group", over_group, ("sum", "mean", "max"))
    check_choice("column_mass", "over_queries", over_queries, ("sum", "mean", "max"))


def pool(mass: Tensor, positions: Tensor, *, kernel_size: int, pooling: str) -> Tensor:
    """Each slot's mass pooled with its neighbours', the filled slots up to kernel_size // 2 before and after it in the head.

    No slot is left out and none protected: sinks, recent window and pins are the policy's.

    mass       [B, H, L] float32
    positions  [B, H, L]  -1 where empty
    pooling    "max" or "mean" of the filled slots covered
    returns    [B, H, L] float32, 0 on empty slots
    """
    check_pooling(kernel_size, pooling)
    empty, half = positions < 0, kernel_size // 2
    if not mass.numel():
        return mass
    if pooling == "max":
        return F.max_pool1d(mass.masked_fill(empty, float("-inf")), kernel_size, stride=1, padding=half).masked_fill(empty, 0)
    total = F.avg_pool1d(mass.masked_fill(empty, 0), kernel_size, stride=1, padding=half)
    share = F.avg_pool1d((~empty).float(), kernel_size, stride=1, padding=half)
    return (total / share).masked_fill(empty, 0)


def check_pooling(kernel_size: int, pooling: str) -> None:
    """Of `pool`."""
    check_choice("pool", "pooling", pooling, ("max", "mean"))
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"ops.pool(kernel_size={kernel_size}) has no middle slot; give an odd number, 1 for no pooling")


@dataclass(frozen=True)
class Owners:
    """Whose each slot is.

    slots  [N, P] int32, the head b * H + h that the slot belongs to, -1 where it is empty or its page free
    full   whether no page is free
    """

    slots: Tensor
    full: bool


def owners(table: Tensor, position_pages: Tensor) -> Owners | None:
    """table [B, H, pages], position_pages [N, P] -> whose each slot is; None where a page has several heads."""
    held = table >= 0
    pages, counts = table[held].long(), held.sum(-1).flatten()
    head = pages.new_full((len(position_pages),), -1, dtype=torch.int32)
    head[pages] = torch.arange(len(counts), dtype=torch.int32, device=table.device).repeat_interleave(counts)
    used = int((head >= 0).sum())
    return Owners(head[:, None].where(position_pages >= 0, -1), used == len(head)) if used == len(pages) else None


def page_score(
    scores: Tensor,
    positions: Tensor,
    num_seen: Tensor,
    page_size: int,
    *,
    num_sinks: int = 0,
    num_recent: int = 0,
    reduce: str = "mean",
) -> Tensor:
    """Worth of every page of a head: its filled slots' scores, reduced; a page that holds a protected slot is protected.

    scores      [B, H, L] float32; +inf protects a slot (a pin)
    positions   [B, H, L] -1 where empty
    num_seen    [B] tokens so far
    page_size   P; page j of a head is its slots j * P to j * P + P - 1
    num_sinks   first tokens of a row that protect their page
    num_recent  last tokens of a row that protect theirs, with 1 or more the page still open among them
    reduce      "sum", "mean" or "max" over a page's filled slots
    returns     [B, H, ceil(L / P)] float32, +inf on protected pages, -inf on those without a token
    """
    check_choice("page_score", "reduce", reduce, ("sum", "mean", "max"))
    pages = -(-scores.shape[-1] // page_size)

    def paged(slots: Tensor) -> Tensor:
        return F.pad(slots, (0, pages * page_size - slots.shape[-1])).unflatten(-1, (pages, page_size))  # [B, H, pages, P]

    filled = paged(positions >= 0)
    safe = (scores == float("inf")) | (positions < num_sinks) | (positions >= (num_seen - num_recent)[:, None, None])
    protected = (paged(safe) & filled).any(-1)
    worth = paged(scores.float()).masked_fill(~filled, float("-inf") if reduce == "max" else 0.0)
    worth = worth.amax(-1) if reduce == "max" else worth.sum(-1)
    if reduce == "mean":
        worth = worth / filled.sum(-1).clamp(min=1)
    return worth.masked_fill(~filled.any(-1), float("-inf")).masked_fill(protected, float("inf"))


def page_evict(table: Tensor, lengths: Tensor, keep_pages: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The table without the pages that are not kept, in a second table; the kept ones close up in their order.

    A page that holds no token yet is kept or given up like any other.  A page that stands in several heads' tables is given up by each
    on its own: whether it is free then is the pool's to say.

    table       [B, H, pages] int32, -1 past a head's last page
    lengths     [B, H] slots held; only a head's last page that holds any may be part full
    keep_pages  [B, H, k] bool, k <= pages; columns past k are not kept
    page_size   P
    returns     table [B, H, pages] int32, -1 past a head's last page;
                lengths [B, H] in their type, a multiple of P where the part-full page went;
                given up [B * H * pages] int32, the pages in order of heads and columns, -1 past the last;
                counts [B, H] int64, how many of those are each head's
    """
    P, pages = page_size, table.shape[-1]
    kept = F.pad(keep_pages, (0, pages - keep_pages.shape[-1])) & (table >= 0)
    gone = (table >= 0) & ~kept
    column = torch.arange(pages, device=table.device)
    tokens = (lengths[..., None] - column * P).clamp(0, P)  # [B, H, pages]
    closed = torch.full_like(table, -1).masked_scatter(column < kept.sum(-1, keepdim=True), table[kept])
    given_up = torch.full_like(table, -1).flatten()
    given_up[: int(gone.sum())] = table[gone]
    return closed, (tokens * kept).sum(-1).to(lengths.dtype), given_up, gone.sum(-1)


def page_minmax(key_pages: Tensor, position_pages: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest key of every page, channel by channel, over its filled slots.

    Of some pages, as those that a step wrote on: `page_minmax(key_pages[pages], position_pages[pages])`.

    key_pages       [N, P, D] rotated
    position_pages  [N, P] -1 where empty
    returns         minimum, maximum [N, D] in the keys' type; +inf and -inf where a page holds no token
    """
    minimum, maximum, empty = key_pages.amin(1), key_pages.amax(1), position_pages < 0
    partly = empty.any(1)  # most pages are full, and masking all of them would cost ten times as much
    some, empty = key_pages[partly], empty[partly, :, None]
    minimum[partly] = some.masked_fill(empty, float("inf")).amin(1)
    maximum[partly] = some.masked_fill(empty, float("-inf")).amax(1)
    return minimum, maximum


def page_bound(queries: Tensor, minimum: Tensor, maximum: Tensor, table: Tensor, *, reduce: str = "max") -> Tensor:
    """Quest's upper bound of q . k over the keys of every page (arXiv:2406.10774, section 3.3), unscaled, reduced over the query group.

    Differs: pages are shared by the heads of a query group, where the paper knows no groups.

    queries           [B, Q, D] or [B, Q, T, D] rotated; the highest bound of the T counts
    minimum, maximum  [N, D] what `page_minmax` says of every page
    table             [B, H, pages] int32, -1 past a head's last page
    reduce            "max" or "sum" over the group
    returns           [B, H, pages] float32  sum over d of max(q_d * minimum_d, q_d * maximum_d); -inf where no page is, or no token in it
    """
    check_choice("page_bound", "reduce", reduce, ("max", "sum"))
    q = (queries if queries.dim() == 4 else queries[:, :, None]).unflatten(1, (table.shape[1], -1)).float()  # [B, H, G, T, D]
    held = table.clamp(min=0).long()
    absent = (table < 0) | (maximum[held, 0] == float("-inf"))
    low, high = (x[held].float().masked_fill(absent[..., None], 0).mT[:, :, None] for x in (minimum, maximum))  # [B, H, 1, D, pages]
    bound = (q.clamp(min=0) @ high + q.clamp(max=0) @ low).amax(3)  # [B, H, G, pages]
    return REDUCE[reduce](bound, 2).masked_fill(absent, float("-inf"))


def attend(
    queries: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    table: Tensor,
    query_positions: Tensor,
    scale: float,
    whose: Owners | None = None,
    causal: bool = True,
) -> Tensor:
    """Causal attention of queries over the pages of their heads, page by page with one softmax per head.

    No page is gathered but where one belongs to several heads (rows that were one and share their past).

    queries                 [B, Q, T, D] rotated
    key_pages, value_pages  [N, P, D]
    position_pages          [N, P] int32, -1 where empty
    table                   [B, H, pages] int32, -1 past a head's last page; rows may have pages in common
    query_positions         [B, T]  -1 where the row is padding
    whose                   what `owners` says of the table, where that is known
    causal                  False where every query sees all that its heads hold: nobody then asks for positions
    returns                 [B, Q, T, D] in the queries' type, 0 where a query sees nothing
    """
    if nothing_to_read(queries, position_pages):
        return torch.zeros_like(queries)
    B, Q, T, D = queries.shape
    whose = whose or owners(table, position_pages)
    if whose is None:
        pages, counts = table[table >= 0].long(), (table >= 0).sum(-1).flatten()
        key_pages, value_pages, position_pages = key_pages[pages], value_pages[pages], position_pages[pages]
        owner = torch.arange(len(counts), device=table.device).repeat_interleave(counts)
        whose = Owners(owner.int()[:, None].where(position_pages >= 0, -1), full=True)
    H, (N, P) = table.shape[1], position_pages.shape
    if B == 1 and Q * T * N * P <= FEW_LOGITS and whose.full:
        return attend_at_once(queries, key_pages, value_pages, position_pages, whose, query_positions, H, scale, causal)
    owner = whose.slots.amax(1).long()
    head = torch.where(owner < 0, B * H, owner)  # free pages belong to a head of their own: a NaN in them is nobody's
    row = head.clamp(max=B * H - 1) // H
    grouped = queries.reshape(B * H, Q // H, T, D).float() * scale
    grouped = torch.cat([grouped, torch.zeros_like(grouped[:1])])
    keys, values = key_pages.float(), value_pages.float()
    used = whose.slots >= 0  # [N, P]
    step = max(1, BLOCK_ELEMENTS // (N * (Q // H) * max(P, D)))
    blocks = []
    for start in range(0, T, step):
        q = grouped[:, :, start : start + step]  # [B * H + 1, G, t, D]
        seen = used[..., None]
        if causal:
            seen = seen & (position_pages[..., None] <= query_positions[row][:, None, start : start + step])  # [N, P, t]
        logits = (keys @ q.flatten(1, 2)[head].mT).unflatten(2, q.shape[1:3])  # [N, P, G, t]; this way round small products are fast
        blocks.append(segment_softmax_sum(logits.masked_fill_(~seen[:, :, None], float("-inf")), values, head, B * H + 1)[:-1])
    return torch.cat(blocks, 2).view(B, Q, T, D).to(queries.dtype)


def nothing_to_read(queries: Tensor, position_pages: Tensor) -> bool:
    """Whether there is no query, or no slot."""
    return not queries.numel() or not position_pages.numel()


FEW_LOGITS = 1 << 16  # for so few, of all queries with all slots, one masked product is faster than one per page


def attend_at_once(
    queries: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    whose: Owners,
    query_positions: Tensor,
    num_heads: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """`attend` of one row as one attention of all queries over all slots, other heads' masked."""
    _, Q, T, D = queries.shape
    head = torch.arange(Q * T, dtype=torch.int32, device=queries.device)[:, None] // (Q * T // num_heads)  # [Q * T, 1]
    seen = whose.slots.view(-1) == head  # [Q * T, S]
    if causal:
        seen = seen & (position_pages.view(-1) <= query_positions[0].repeat(Q)[:, None])
    dtype = torch.promote_types(key_pages.dtype, value_pages.dtype)
    q, k, v = (x.reshape(1, 1, -1, D).to(dtype) for x in (queries, key_pages, value_pages))
    return F.scaled_dot_product_attention(q, k, v, seen[None, None], scale=scale).view(1, Q, T, D).to(queries.dtype)


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


def attend_with_lse(
    queries: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    table: Tensor,
    query_positions: Tensor,
    scale: float,
    whose: Owners | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """`attend`, and the log-sum-exp of each query's logits; arguments as `attend`.

    returns  [B, Q, T, D] in the queries' type, 0 where a query sees nothing
             [B, Q, T] float32 in natural units, -inf where it sees nothing
    """
    out = attend(queries, key_pages, value_pages, position_pages, table, query_positions, scale, whose, causal)
    if nothing_to_read(queries, position_pages):
        return out, queries.new_full(queries.shape[:3], float("-inf"), dtype=torch.float32)
    keys, positions = paged_slots(key_pages, position_pages, table)
    return out, row_lse(queries, keys, query_positions, positions, scale)


def attend_with_mass(
    queries: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    position_pages: Tensor,
    table: Tensor,
    query_positions: Tensor,
    scale: float,
    whose: Owners | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """`attend`, and the attention that each slot receives, summed over queries and the group; arguments as `attend`.

    returns  [B, Q, T, D] in the queries' type
             [B, H, L] float32 with L = pages * P, every slot that the table has room for; 0 where it is empty
    """
    (B, Q, T, _), (_, H, pages), P = queries.shape, table.shape, position_pages.shape[1]
    if nothing_to_read(queries, position_pages):
        return torch.zeros_like(queries), queries.new_zeros(B, H, pages * P, dtype=torch.float32)
    keys, positions = paged_slots(key_pages, position_pages, table)
    if B * Q * T * pages * P > BLOCK_ELEMENTS:
        out = attend(queries, key_pages, value_pages, position_pages, table, query_positions, scale, whose, causal)
        return out, column_mass(queries, keys, query_positions, positions, scale)
    grouped = queries.unflatten(1, (H, -1)).flatten(2, 3).float() * scale  # [B, H, G * T, D]
    unseen = (positions < 0)[:, :, None] | (positions[:, :, None] > query_positions.repeat(1, Q // H)[:, None, :, None])
    logits = (grouped @ keys.float().mT).masked_fill_(unseen, float("-inf"))
    weights = logits.softmax(-1).masked_fill_(unseen.all(-1, keepdim=True), 0)
    values = value_pages[table.clamp(min=0).long()].flatten(2, 3).float().masked_fill_((positions < 0)[..., None], 0)
    return (weights @ values).unflatten(2, (-1, T)).flatten(1, 2).to(queries.dtype), weights.sum(2)


def paged_slots(key_pages: Tensor, position_pages: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, H, L, D] and positions [B, H, L] of all slots that a table has room for, -1 and anything where it has no page."""
    pages = table.clamp(min=0).long()
    positions = position_pages[pages].masked_fill(table[..., None] < 0, -1)
    return key_pages[pages].flatten(2, 3), positions.flatten(2)


def mass_update(memory: Tensor, table: Tensor, mass: Tensor, decay: float) -> None:
    """memory = decay * memory + mass over the heads' pages, in place.

    memory  [N, P] float32, perhaps one column of memory pages [N, P, C]
    table   [B, H, pages] int32, -1 past a head's last page; no page stands twice in it
    mass    [B, H, L] float32 with L = pages * P, as `attend_with_mass` gives it
    """
    held = table >= 0
    pages = table[held].long()
    memory[pages] = decay * memory[pages] + mass.unflatten(2, (-1, memory.shape[1]))[held]


def pl_logprob(scores: Tensor) -> Tensor:
    """Plackett-Luce log-probability of each pick, given scores in the order of the permutation (arXiv:2602.10238, section 3).

    scores   [..., n] float32 or float64, scores[j] of the j-th pick; -inf on padding, which lies at the tail
    returns  [..., n] likewise  s_j - logsumexp(s_j, s_j+1, ...), 0 on padding
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if not scores.numel():
        return scores
    # a reversed logcumsumexp with its sums in float64: exact over a range of 700, and a fifth of logcumsumexp's time with its backward
    shifted = scores - scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    rest = shifted.double().exp().flip(-1).cumsum(-1).flip(-1).clamp(min=torch.finfo(torch.float64).tiny).log()
    return (shifted - rest.to(shifted.dtype)).masked_fill(scores == float("-inf"), 0.0)


def budget_reward(utility: Tensor) -> Tensor:
    """Utility evicted, summed over the budgets 1..n and negated: -sum_i i * u_i with i = 1 for the first to be kept.

    Differs: the paper (arXiv:2602.10238, section 3.1.1) sums budgets 1..n-1, weight i - 1; the authors' code has weight i, as here.

    utility  [..., n] in the order of the permutation, 0 on padding
    returns  [...] float32
    """
    weight = torch.arange(1, utility.shape[-1] + 1, device=utility.device, dtype=torch.float32)
    return -(utility.float() * weight).sum(-1)


class BranchWeights(NamedTuple):
    """One input of `mlp_scorer`, of all heads: standardise, Linear, LayerNorm without weights.

    mean, deviation  [H, D] of the input
    weight           [H, D, W]
    bias             [H, W]
    """

    mean: Tensor
    deviation: Tensor
    weight: Tensor
    bias: Tensor


class TrunkWeights(NamedTuple):
    """One trunk layer of `mlp_scorer`, of all heads: Linear, LayerNorm, SiLU.

    weight        [H, i, M]
    bias          [H, M]
    gain, offset  [H, M] of the LayerNorm
    """

    weight: Tensor
    bias: Tensor
    gain: Tensor
    offset: Tensor


def mlp_scorer(
    inputs: Sequence[Tensor],
    features: Tensor,
    branches: Sequence[BranchWeights],
    trunk: Sequence[TrunkWeights],
    head: Tensor,
    scale: Tensor,
    shift: Tensor,
) -> Tensor:
    """A small network per head scores every token: a branch per input, their outputs and the features through a trunk to one number.

    inputs        each [B, H, L, D] of any float type
    features      [B, H, L, F] float32, join the branches' outputs as they are; F may be 0
    branches      one per input, all of one width W
    trunk         at least one layer; the first reads [branch outputs, features]
    head          [H, M] of the last linear map, without bias
    scale, shift  [H] of the affine map at the end
    returns       [B, H, L] float32 (float64 where the weights are)
    """
    B, H, L = features.shape[:3]
    parts = []
    for x, branch in zip(inputs, branches, strict=True):
        inverse = 1 / branch.deviation[:, None]
        standard = torch.addcmul(-branch.mean[:, None] * inverse, by_head(x).to(branch.mean.dtype), inverse)  # one pass over x
        x = torch.baddbmm(branch.bias[:, None], standard.to(branch.weight.dtype), branch.weight)
        parts.append(F.layer_norm(x, x.shape[-1:]))
    x = torch.cat([*parts, by_head(features).to(trunk[0].weight.dtype)], -1)  # [H, B * L, i]
    for layer in trunk:
        x = torch.baddbmm(layer.bias[:, None], x, layer.weight)
        x = F.silu(torch.addcmul(layer.offset[:, None], F.layer_norm(x, x.shape[-1:]), layer.gain[:, None]))
    score = torch.bmm(x, head[..., None])[..., 0]
    score = score.to(torch.promote_types(score.dtype, torch.float32)) * scale[:, None] + shift[:, None]
    return score.view(H, B, L).transpose(0, 1)


def by_head(x: Tensor) -> Tensor:
    """[B, H, L, X] -> [H, B * L, X]."""
    return x.transpose(0, 1).flatten(1, 2)


def gate_scorer(
    queries: Tensor,
    keys: Tensor,
    query_gain: Tensor,
    key_gain: Tensor,
    sinks: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """Share of attention that a token's own key gets beside learned sink keys, mean over the query group (arXiv:2601.17668).

    Differs: the bias is added once, as the authors' inference does; their training adds it twice.

    queries               [B, Q, T, D] projected, before their RMSNorm
    keys                  [B, H, T, D] likewise
    query_gain, key_gain  [D] of the RMSNorms
    sinks                 [H, S, D] sink keys, not normalised
    bias                  [H, Q / H] added to a query head's own logit
    returns               [B, H, T] float32 in (0, 1) (float64 where the queries are)
    """
    H, D = keys.shape[1], keys.shape[-1]
    q = rms_norm(queries, query_gain, eps).unflatten(1, (H, -1))  # [B, H, G, T, D]
    own = (q * rms_norm(keys, key_gain, eps)[:, :, None]).sum(-1) * D**-0.5 + bias[..., None]  # [B, H, G, T]
    others = (q @ sinks[:, None].mT.to(q.dtype) * D**-0.5).logsumexp(-1)
    return (own - others).sigmoid().mean(2)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x over its root mean square along the last dimension, times the gain; in float32 or more."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain
