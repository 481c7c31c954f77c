"""attach: the bridge between a transformers model and EvictionCache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Literal, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from learnkv import ops
from learnkv.capture import (
    attention_implementation,
    blocks_of,
    decoder_of,
    queries_before_rope,
    query_projection,
    stock_attention,
    stock_mask,
)
from learnkv.geometry import kv_shape
from learnkv.policy import Policy
from learnkv.runtime.cache import EvictionCache, broken_contract
from learnkv.runtime.step import LayerState, ProbeStep, Step, as_typed, running

NAME = "learnkv+"  # the model's own implementation follows


@contextmanager
def attach(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """`model` serves EvictionCache inside the block; with any other cache, or none, it gives its own results.

    Hooks and attention are as they were afterwards, after an exception too.  Blocks may lie in each other and in several threads: the
    last one to end restores the model.
    """
    decoder = decoder_of(model)
    with lock:
        attachment = attachments.get(decoder) or Attachment(make_ready(model, decoder))
        attachments[decoder] = attachment
        attachment.blocks += 1
    try:
        yield model
    finally:
        with lock:
            attachment.blocks -= 1
            if not attachment.blocks:
                del attachments[decoder]
                attachment.restore.close()


@dataclass
class Attachment:
    """A model inside `attach`: what restores it, and the blocks that have not ended."""

    restore: ExitStack
    blocks: int = 0


attachments: WeakKeyDictionary[nn.Module, Attachment] = WeakKeyDictionary()
lock = RLock()  # held while a model is made ready or restored


def make_ready(model: PreTrainedModel, decoder: PreTrainedModel) -> ExitStack:
    """Sets attention and hooks; what is returned takes them back.  A copy made of an attached model stays as it is."""
    before = decoder.config._attn_implementation
    if NAME in before:
        return ExitStack()
    refuse_attention(model, decoder, before)
    with ExitStack() as stack:
        stack.enter_context(attention_implementation(decoder, NAME + before, partial(attention, before), partial(mask, before)))
        for handle in hooks(decoder):
            stack.callback(handle.remove)
        return stack.pop_all()


@contextmanager
def evict(model: PreTrainedModel, policy: Policy, positions: Literal["original", "renumbered"] = "original") -> Iterator[PreTrainedModel]:
    """attach, and each generate or forward that brings no cache gets a fresh EvictionCache of `policy`.

    The empty DynamicCache that generate makes for itself counts as none; so does an empty one of yours, unless you pass it to generate.
    Of several blocks on one model the latest of the own thread counts; a thread without one goes by the latest of all.
    """
    decoder = decoder_of(model)
    block = decoder, object()

    def inject(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        mine = [other for other in entered.get() if other[0] is decoder]
        kwargs = by_name(decoder, args, kwargs)
        if (not mine or mine[-1] is block) and running.get() is None and brings_none(kwargs.get("cache")):
            if kwargs.get("use_cache") is False:
                raise ValueError("use_cache=False leaves nothing to evict; drop it, or call the model outside `with learnkv.evict(...)`")
            kwargs |= {"cache": EvictionCache(policy, model, positions=positions), "use_cache": True}
        return (), kwargs

    EvictionCache(policy, model, positions=positions)  # what a policy or model can't do is said here, not in the middle of generate
    with attach(model), ExitStack() as stack:
        handle = decoder.register_forward_pre_hook(inject, with_kwargs=True, prepend=True)
        stack.callback(handle.remove)
        entered.set((*entered.get(), block))
        stack.callback(lambda: entered.set(tuple(other for other in entered.get() if other is not block)))
        yield model


entered: ContextVar[tuple[tuple[nn.Module, object], ...]] = ContextVar("learnkv_entered", default=())  # evict blocks of this thread


def brings_none(cache: Cache | None) -> bool:
    if cache is None:
        return True
    return type(cache) is DynamicCache and not cache.get_seq_length() and not getattr(cache, "_is_user_defined", False)


def refuse_attention(model: PreTrainedModel, decoder: PreTrainedModel, implementation: str) -> None:
    """Names what of the model's attention learnkv can't serve."""
    name = f"{type(model).__name__} ({model.config.model_type})"
    own = implementation.rsplit("+", 1)[-1]
    if own not in ("sdpa", "eager"):
        raise ValueError(f"{name} runs attention {own!r}; call model.set_attn_implementation('sdpa') before attach")
    if getattr(decoder.config, "use_bidirectional_attention", False):
        raise ValueError(f"{name} attends to later tokens; learnkv serves causal models")
    for block in blocks_of(decoder):
        layer = block.get_submodule("self_attn")
        problems = {
            "compresses keys and values into one latent (MLA)": hasattr(layer, "kv_b_proj") or hasattr(layer, "kv_a_proj_with_mqa"),
            "soft-caps its attention logits": getattr(layer, "attn_logit_softcapping", None) is not None,
            "adds sink logits to its softmax": hasattr(layer, "sinks"),
            "shares keys and values between layers": bool(getattr(layer, "is_kv_shared_layer", False)),
        }
        found = [problem for problem, holds in problems.items() if holds]
        if found:
            raise ValueError(f"{name} {' and '.join(found)}; learnkv serves grouped-query softmax attention only")


# ---- hooks: they open and close a forward, and hand it to each layer


def hooks(decoder: PreTrainedModel) -> Iterator[RemovableHandle]:
    yield decoder.register_forward_pre_hook(partial(open_forward, kv_shape(decoder)), with_kwargs=True)
    yield decoder.register_forward_hook(close_forward, with_kwargs=True)
    yield decoder.register_forward_hook(forget_forward, always_call=True)
    for index, block in enumerate(blocks_of(decoder)):
        layer = block.get_submodule("self_attn")
        yield block.register_forward_pre_hook(enter_block, with_kwargs=True)
        yield layer.register_forward_pre_hook(partial(enter_attention, index), with_kwargs=True)
        found = query_projection(layer)
        if found is not None:
            projection, width = found
            yield projection.register_forward_hook(partial(leave_query_projection, layer, width))


def by_name(module: nn.Module, args: tuple, kwargs: dict) -> dict:
    """All arguments of a forward by name."""
    kwargs = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
    if "past_key_values" in kwargs:  # its name until transformers 5.40
        kwargs["cache"] = kwargs.pop("past_key_values")
    return kwargs


def open_forward(shape: tuple[int, int, int], decoder: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    kwargs = by_name(decoder, args, kwargs)
    cache = kwargs.get("cache")
    if isinstance(cache, StaticCache):
        raise ValueError("StaticCache evicts nothing; inside attach pass an EvictionCache, or call the model outside the block")
    if isinstance(cache, EvictionCache):
        refuse_another_model(decoder, shape, cache)
        refuse_arguments(decoder, cache, kwargs)
        running.set(begin(cache, kwargs))
    return (), kwargs


def close_forward(decoder: PreTrainedModel, args: tuple, kwargs: dict, output: object) -> None:
    if running.get() is not None:
        kwargs["cache"].finish_forward(decoder, attach)


def forget_forward(decoder: PreTrainedModel, args: tuple, output: object) -> None:
    running.set(None)


def refuse_another_model(decoder: PreTrainedModel, shape: tuple[int, int, int], cache: EvictionCache) -> None:
    """Raises a ValueError where a cache was made for a model of another geometry; shape of the decoder as `kv_shape` says."""
    have, want = len(cache.layers), len(blocks_of(decoder))
    if have != want:
        raise ValueError(f"this EvictionCache has {have} layers, the model {want}; make it with EvictionCache(policy, model)")
    if cache.shape != shape:
        sides = "{} evictable layers x {} KV heads x {}".format(*cache.shape), "{} x {} x {}".format(*shape)
        raise ValueError(f"this EvictionCache is of {sides[0]}, the model has {sides[1]}; make it with EvictionCache(policy, model)")


def refuse_arguments(decoder: PreTrainedModel, cache: EvictionCache, kwargs: dict) -> None:
    """What can't be right beside an EvictionCache, by name."""
    if kwargs.get("output_attentions") or decoder.config.output_attentions:
        raise ValueError("output_attentions=True: an EvictionCache gives no attention weights; learnkv.capture gives queries and keys")
    tokens, attention_mask = step_shape(kwargs), kwargs.get("attention_mask")
    if tokens[1] == 0:
        raise ValueError("the prompt has 0 tokens; give at least one")
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        shape = f"{attention_mask.ndim}-D mask" if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(f"attention_mask is a {shape}; beside an EvictionCache give the 2-D padding mask [batch, tokens], or none")
    columns = cache.get_seq_length() + tokens[1]
    if tuple(attention_mask.shape) != (tokens[0], columns):
        raise ValueError(
            f"attention_mask is {list(attention_mask.shape)}, but {columns} columns were seen with this forward's {tokens[1]} "
            f"({tokens[0]} rows); it covers evicted tokens and padding too: give [{tokens[0]}, {columns}]"
        )
    refuse_other_past(cache, attention_mask[:, : -tokens[1]])


def refuse_other_past(cache: EvictionCache, past: Tensor) -> None:
    """Raises a ValueError where a mask hides what was seen, or shows what was padding: the cache holds the former and not the latter."""
    now = past.bool().sum(-1).to(cache.num_seen.device)
    if past.shape[1] and len(now) == len(cache.num_seen) and not torch.equal(now, cache.num_seen):
        row = int((now != cache.num_seen).nonzero()[0])
        raise ValueError(
            f"attention_mask shows {int(now[row])} of the earlier tokens of row {row}, this EvictionCache saw {int(cache.num_seen[row])}; "
            "repeat the mask of the earlier forwards, with this forward's columns after it"
        )


def step_shape(kwargs: dict) -> tuple[int, int]:
    """Rows and columns of a forward."""
    given = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    return given.shape[0], given.shape[1]


def begin(cache: EvictionCache, kwargs: dict) -> Step:
    """Opens the cache's forward from the decoder's arguments."""
    B, T = step_shape(kwargs)
    token_ids, attention_mask, rope = (kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    device = (token_ids if token_ids is not None else kwargs["inputs_embeds"]).device
    real = torch.ones(B, T, dtype=torch.bool, device=device) if attention_mask is None else attention_mask[:, -T:].to(device).bool()
    if rope is None:
        rope = torch.arange(T, device=device) + cache.get_seq_length()
    return cache.begin(real, rope.to(device).expand(B, T), token_ids, attention_mask)


def enter_block(block: nn.Module, args: tuple, kwargs: dict) -> None:
    step = running.get()
    if step is not None and "block_input" in step.needs:
        step.block_input = (args[0] if args else kwargs["hidden_states"]).detach()


def enter_attention(index: int, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    step, cache = running.get(), kwargs.get("cache")
    if step is None or not isinstance(cache, EvictionCache) or cache.is_sliding[index]:
        return args, kwargs
    if "hidden" in step.needs:
        step.hidden = (args[0] if args else kwargs["hidden_states"]).detach()
    return args, kwargs | {"learnkv": step}


def leave_query_projection(layer: nn.Module, width: int, projection: nn.Module, args: tuple, output: Tensor) -> None:
    step = running.get()
    if step is not None and "queries_pre_rope" in step.needs:
        step.queries_pre_rope = queries_before_rope(layer, width, output)


# ---- attention


def mask(before: str, *args: object, **kwargs: object) -> Tensor | None:
    """The mask that the model's own attention wants; none where an EvictionCache knows what is seen."""
    if running.get() is not None and kwargs.get("local_size") is None:
        if kwargs.get("mask_function", causal_mask_function) is not causal_mask_function:
            raise ValueError("this model wants a mask that is not causal (packed, blockwise, bidirectional); EvictionCache can't serve it")
        return None
    return stock_mask(before)(*args, **kwargs)


def attention(
    before: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    learnkv: Step | ProbeStep | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Attention over what the layer holds, then what the policy makes of it; without a handle the model's own."""
    if learnkv is None:
        return stock_attention(module, before)(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} calls attention with {name}, which EvictionCache does not serve")
    if learnkv.state is None:
        raise RuntimeError(broken_contract("cache.update"))
    state, learnkv.state = learnkv.state, None  # each layer's own update sets it
    if isinstance(learnkv, ProbeStep):
        return attend_probe(learnkv, state, query, key, value, scaling), None
    return attend_held(learnkv, state, module, query, key, value, scaling), None


def attend_held(step: Step, state: LayerState, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[B, T, Q, D] over all slots of each head, this forward's included; then remember and select."""
    T = query.shape[2]
    starts = state.columns == T
    run = None if step.padded else state.held.equal_run()
    if step.frequencies is not None and not starts:
        out = attend_renumbered(step, module, query, scale)
    elif "mass" in step.needs and not starts:
        out = attend_pages(step, state, query, scale)
    elif run is not None:
        visible = None if T == 1 or starts else lower_right(T, run[0].shape[2], query.device)
        out = sdpa_attention_forward(module, query, *run, visible, scaling=scale)[0]
    elif starts:  # padded: what each row holds is this forward's real tokens
        real = step.positions.to(query.device) >= 0
        visible = lower_right(T, T, query.device) & real[:, None, None]
        out = sdpa_attention_forward(module, query, key, value, visible, scaling=scale)[0]
    else:
        out = attend_pages(step, state, query, scale)
    with torch.no_grad(), as_typed(query.device):
        step.observe(state, query, scale)
    return NoGradient.apply(out) if out.requires_grad else out


class NoGradient(torch.autograd.Function):
    """What was attended to through a cache: its keys and values are stored without their history, so a gradient would be a wrong one."""

    @staticmethod
    def forward(ctx: object, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> NoReturn:
        raise ValueError("no gradient goes through an EvictionCache; train without one, or run the model under torch.no_grad()")


def attend_pages(step: Step, state: LayerState, query: Tensor, scale: float) -> Tensor:
    """[B, T, Q, D] over the pages; where a scorer reads it, the step then knows the attention that each slot received."""
    slots, positions = state.held.slots(), step.positions.to(query.device)
    pages = slots.key_pages, slots.value_pages, slots.position_pages, slots.table
    whose, causal = state.held.owners(), query.shape[2] > 1 or step.padded
    with as_typed(query.device):
        if "mass" in step.needs:
            out, mass = ops.attend_with_mass(query, *pages, positions, scale, whose, causal)
            step.mass = slots.in_order(mass[..., : slots.max_length].detach())
        else:
            out = ops.attend(query, *pages, positions, scale, whose, causal)
    return out.transpose(1, 2)


def attend_renumbered(step: Step, module: nn.Module, query: Tensor, scale: float) -> Tensor:
    """[B, T, Q, D] over the slots as they follow each other."""
    assert step.slots is not None
    slots, positions = step.slots, step.positions.to(query.device)
    visible = slots.filled[:, :, None] & (slots.positions[:, :, None] <= positions[:, None, :, None])  # [B, H, T, L]
    visible = visible.repeat_interleave(query.shape[1] // visible.shape[1], 1)
    return sdpa_attention_forward(module, query, slots.keys, slots.values, visible, scaling=scale)[0]


def attend_probe(probe: ProbeStep, state: LayerState, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[1, R, Q, D]: probe rows see all that their row holds, and each other causally; then the scorer absorbs them."""
    (_, Q, R, D), H = query.shape, key.shape[1]
    slots = state.held.row(probe.row)
    held = slots.filled[:, :, None].expand(-1, -1, R, -1)  # [1, H, R, L]
    visible = torch.cat([held, lower_right(R, R, query.device).expand(1, H, R, R)], -1).repeat(1, 1, Q // H, 1)
    keys, values = torch.cat([slots.keys, key], 2), torch.cat([slots.values, value], 2)
    grouped = query.reshape(1, H, Q // H * R, D)  # a group's heads as rows of one: keys and values need no copies
    out = F.scaled_dot_product_attention(grouped, keys, values, visible, scale=scale)
    with torch.no_grad(), as_typed(query.device):
        probe.observe(state, slots, query, key)
    return out.reshape(1, Q, R, D).transpose(1, 2)


def lower_right(T: int, L: int, device: torch.device) -> Tensor:
    """[1, 1, T, L] bool: the last T of L slots are the queries' own."""
    return torch.ones(T, L, dtype=torch.bool, device=device).tril(L - T)[None, None]
