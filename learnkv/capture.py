"""Queries, keys, values and hidden states of a running model, and the doors of transformers that show them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

Want = Literal["queries", "keys", "values", "hidden", "block_input", "queries_pre_rope"]


@dataclass
class Captured:
    """What the latest forward showed, by layer index; `clear` is called when the next one begins.

    queries      [B, Q, T, D] rotated
    keys         [B, H, T, D] rotated, of this forward's tokens only
    values       [B, H, T, D]
    hidden       [B, T, M] input of self-attention (after the input layernorm)
    block_input  [B, T, M] input of the decoder layer
    queries_pre_rope  [B, Q, T, D] before rotation
    """

    queries: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    block_input: dict[int, Tensor] = field(default_factory=dict)
    queries_pre_rope: dict[int, Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        for name in get_args(Want):
            getattr(self, name).clear()


@contextmanager
def capture(model: PreTrainedModel, want: set[Want]) -> Iterator[Captured]:
    """Keeps what `want` names of every forward of `model` inside the block; results are the model's own.

    with capture(model, {"queries", "keys"}) as taken:
        model(ids)
        taken.queries[3]    # [B, Q, T, D] of layer 3
    """
    unknown = set(want) - set(get_args(Want))
    if unknown:
        raise ValueError(f"capture can't take {sorted(unknown)}; it takes {', '.join(get_args(Want))}")
    decoder, taken = decoder_of(model), Captured()
    before = decoder.config._attn_implementation
    with ExitStack() as stack:
        for handle in capture_hooks(decoder, taken, want):
            stack.callback(handle.remove)
        if want & {"queries", "keys", "values"}:
            attention = partial(capture_attention, before, want)
            stack.enter_context(attention_implementation(decoder, f"learnkv_capture+{before}", attention, stock_mask(before)))
        yield taken


def capture_hooks(decoder: PreTrainedModel, taken: Captured, want: set[Want]) -> Iterator[RemovableHandle]:
    """Hooks that clear `taken` as a forward begins, and write hidden states into it."""

    def begin(module: nn.Module, args: tuple) -> None:
        taken.clear()

    def enter_block(index: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        taken.block_input[index] = args[0] if args else kwargs["hidden_states"]

    def leave_query_projection(index: int, attention: nn.Module, width: int, module: nn.Module, args: tuple, output: Tensor) -> None:
        taken.queries_pre_rope[index] = queries_before_rope(attention, width, output)

    def enter_attention(index: int, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if "hidden" in want:
            taken.hidden[index] = args[0] if args else kwargs["hidden_states"]
        return args, kwargs | {"learnkv_capture": taken} if want & {"queries", "keys", "values"} else kwargs

    yield decoder.register_forward_pre_hook(begin)
    for index, block in enumerate(blocks_of(decoder)):
        if "block_input" in want:
            yield block.register_forward_pre_hook(partial(enter_block, index), with_kwargs=True)
        attention = block.get_submodule("self_attn")
        yield attention.register_forward_pre_hook(partial(enter_attention, index), with_kwargs=True)
        if "queries_pre_rope" in want:
            projection, width = known_query_projection(attention)
            yield projection.register_forward_hook(partial(leave_query_projection, index, attention, width))


def capture_attention(
    before: str,
    want: set[Want],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    learnkv_capture: Captured,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """The model's own attention function, whose arguments are kept on the way."""
    T = query.shape[2]
    seen = {"queries": query, "keys": key[:, :, -T:], "values": value[:, :, -T:]}
    for name in want & seen.keys():
        getattr(learnkv_capture, name)[module.layer_idx] = seen[name]
    return stock_attention(module, before)(module, query, key, value, attention_mask, **kwargs)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The stack of decoder layers inside `model`; a model whose attention learnkv can't reach is refused by name."""
    decoder = model.get_decoder()
    name = f"{type(model).__name__} ({model.config.model_type})"
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; learnkv serves decoder-only models")
    if not all(hasattr(block, "self_attn") for block in getattr(decoder, "layers", [None])):
        raise ValueError(f"{name} has no decoder layers with `self_attn`; learnkv serves models built like Llama, Qwen or Gemma 3")
    if not (getattr(decoder, "_supports_attention_backend", False) and decoder._can_set_attn_implementation()):
        raise ValueError(f"{name} does not call attention through transformers' AttentionInterface; learnkv can't serve it")
    return decoder


def blocks_of(decoder: nn.Module) -> list[nn.Module]:
    """The decoder layers of a decoder, each with its `self_attn`."""
    return list(decoder.get_submodule("layers").children())


def filled_cache(decoder: PreTrainedModel, keys: Tensor, values: Tensor) -> DynamicCache:
    """transformers' own cache that holds keys, values [layers, B, H, n, D] of all layers of a decoder."""
    cache = DynamicCache(config=decoder.config)
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        cache.update(k, v, layer)
    return cache


def evictable_layers(model: PreTrainedModel) -> list[int]:
    """Which of the decoder layers have tokens that can be evicted, ascending: those of full attention, not sliding ones."""
    return [i for i, layer in enumerate(DynamicCache(config=model.config).layers) if type(layer) is DynamicLayer]


def query_projection(layer: nn.Module) -> tuple[nn.Module, int] | None:
    """The module of a self-attention whose first outputs are the queries, head by head, and how many those are; None if not found."""
    config, D = getattr(layer, "config", None), getattr(layer, "head_dim", None)
    if config is None or D is None:
        return None
    queries = config.num_attention_heads * D
    keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * D
    for name, width in {"q_proj": queries, "qkv_proj": queries + 2 * keys}.items():
        projection = getattr(layer, name, None)
        if projection is not None and getattr(projection, "out_features", width) == width:
            return projection, queries
    return None


def known_query_projection(layer: nn.Module) -> tuple[nn.Module, int]:
    """`query_projection`, or a ValueError that names the model's attention."""
    found = query_projection(layer)
    if found is None:
        raise ValueError(
            f"{type(layer).__name__} projects queries in a way that learnkv does not know (neither q_proj nor qkv_proj with queries, keys "
            "and values side by side), so they can't be had before rotation; take another method"
        )
    return found


def queries_before_rope(layer: nn.Module, width: int, output: Tensor) -> Tensor:
    """[B, Q, T, D] the first `width` outputs of a query projection, after the model's query norm where it has one, be it over a head or
    over all."""
    norm = getattr(layer, "q_norm", nn.Identity())
    heads = output.detach()[..., :width].unflatten(-1, (-1, layer.head_dim))  # [B, T, Q, D]
    over_all = getattr(getattr(norm, "weight", None), "shape", [layer.head_dim])[-1] != layer.head_dim
    heads = norm(heads.flatten(-2)).view_as(heads) if over_all else norm(heads)
    return heads.transpose(1, 2)


def stock_attention(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that `module` would have called under `implementation`."""
    if implementation == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[implementation]


def stock_mask(implementation: str) -> Callable[..., Tensor | None]:
    """The mask function that belongs to `implementation`."""
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation]


@contextmanager
def attention_implementation(decoder: PreTrainedModel, name: str, attention: Callable, mask: Callable) -> Iterator[None]:
    """`decoder` calls `attention` and `mask` inside the block, and what it called before it afterwards."""
    before = decoder.config._attn_implementation
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    decoder.set_attn_implementation(name)
    try:
        yield
    finally:
        decoder.set_attn_implementation(before)
