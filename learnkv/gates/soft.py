"""The one door to soft gating: a frozen model runs a whole sequence while a gate has its say in the attention of every evictable layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from learnkv.capture import attention_implementation, blocks_of, decoder_of, evictable_layers, stock_attention, stock_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = 128  # query rows at once: never S x S


@dataclass(frozen=True)
class Seen:
    """One evictable layer of a running model, as a gate sees it in training.

    layer         index among the evictable layers
    hidden        [B, T, M] input of self-attention (after the input layernorm)
    block_input   [B, T, M] input of the decoder layer
    queries       [B, Q, T, D] rotated
    keys, values  [B, H, T, D]
    scale         the model's own softmax scale
    plain         gives the layer's own attention, [B, T, Q, D]
    """

    layer: int
    hidden: Tensor
    block_input: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    plain: Callable[[], Tensor]


Attend = Callable[[Seen], Tensor]  # [B, T, Q, D] in the place of the layer's own attention
Change = Callable[..., Tensor]  # logits [B, H, G, R, S], age [R, S] of each key at each row, *per_key [B, H, S] -> logits


@contextmanager
def soft_attention(model: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """Every evictable layer of `model` attends by `attend` inside the block, and by itself after it, after an exception too.

    with soft_attention(model, attend):
        logits = model(ids, use_cache=False).logits    # whole sequences without padding; gradients flow into what attend reads
    """
    decoder = decoder_of(model)
    before = decoder.config._attn_implementation
    with ExitStack() as stack:
        for handle in hooks(decoder, evictable_layers(model), attend):
            stack.callback(handle.remove)
        own = partial(attention, before)
        stack.enter_context(attention_implementation(decoder, f"learnkv_soft+{before}", own, stock_mask(before)))
        yield


@dataclass
class Handle:
    """What the hooks of one layer hand to its attention function."""

    attend: Attend
    layer: int
    hidden: Tensor | None = None
    block_input: Tensor | None = None

    def taken(self) -> tuple[Tensor, Tensor]:
        """(hidden, block_input), not held any longer."""
        hidden, block_input, self.hidden, self.block_input = self.hidden, self.block_input, None, None
        assert hidden is not None and block_input is not None, "hooks come before"
        return hidden, block_input


def hooks(decoder: PreTrainedModel, layers: list[int], attend: Attend) -> Iterator[RemovableHandle]:
    """Hooks that bring a layer's input to its attention function."""

    def begin(module: nn.Module, args: tuple, kwargs: dict) -> None:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and not mask.bool().all():
            raise ValueError("soft gating runs whole sequences without padding; give one sequence at a time, or equally long ones")

    def enter_block(handle: Handle, module: nn.Module, args: tuple, kwargs: dict) -> None:
        handle.block_input = args[0] if args else kwargs["hidden_states"]

    def enter_attention(handle: Handle, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        handle.hidden = args[0] if args else kwargs["hidden_states"]
        return args, kwargs | {"learnkv_soft": handle}

    yield decoder.register_forward_pre_hook(begin, with_kwargs=True)
    blocks = blocks_of(decoder)
    for layer, index in enumerate(layers):
        handle = Handle(attend, layer)
        yield blocks[index].register_forward_pre_hook(partial(enter_block, handle), with_kwargs=True)
        own = blocks[index].get_submodule("self_attn")
        yield own.register_forward_pre_hook(partial(enter_attention, handle), with_kwargs=True)


def attention(
    before: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    learnkv_soft: Handle | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """The gate's attention in evictable layers, the model's own in the others."""
    own = partial(stock_attention(module, before), module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if learnkv_soft is None:
        return own()
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"soft gating runs whole sequences: {query.shape[2]} tokens came after {key.shape[2] - query.shape[2]} in a cache")
    seen = Seen(learnkv_soft.layer, *learnkv_soft.taken(), query, key, value, scaling, lambda: own()[0])
    return learnkv_soft.attend(seen).to(query.dtype), None


def gated_attention(seen: Seen, change: Change, *per_key: Tensor) -> Tensor:
    """[B, T, Q, D] causal attention whose logits `change` has changed, some rows at a time; they are computed again for the gradient.

    per_key  [B, H, T] each, of which `change` gets the part of the keys at hand
    """
    T = seen.keys.shape[2]
    out = [recomputed(attend_rows, seen, rows, change, *(x[..., : rows.stop] for x in per_key)) for rows in blocks_of_rows(T, ROWS)]
    return torch.cat(out, 2).transpose(1, 2)


def blocks_of_rows(T: int, size: int) -> list[range]:
    """0 to T - 1 in runs of at most `size`."""
    return [range(start, min(start + size, T)) for start in range(0, T, size)]


def recomputed(run: Callable[..., Tensor], *args: object) -> Tensor:
    """run(*args), of which nothing is kept for the gradient: it runs again then."""
    return cast(Tensor, checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False))


def attend_rows(seen: Seen, rows: range, change: Change, *per_key: Tensor) -> Tensor:
    """[B, Q, R, D] of a block of rows, over the keys up to its last row; softmax in float32."""
    H, S = seen.keys.shape[1], rows.stop
    queries = seen.queries[:, :, rows.start : S].unflatten(1, (H, -1))  # [B, H, G, R, D]
    G, R = queries.shape[2:4]
    logits = (queries.flatten(2, 3) @ seen.keys[:, :, :S].mT).float().unflatten(2, (G, R)) * seen.scale  # [B, H, G, R, S]
    at = torch.arange(S, device=logits.device)
    age = at[rows.start :, None] - at  # [R, S]
    weights = change(logits, age, *per_key).masked_fill(age < 0, -torch.inf).softmax(-1)
    out = weights.to(seen.values.dtype).flatten(2, 3) @ seen.values[:, :, :S]
    return out.unflatten(2, (G, R)).flatten(1, 2)


def per_row(per_key: Tensor) -> Tensor:
    """[B, H, S] as logits [B, H, G, R, S] take it."""
    return per_key[:, :, None, None]
