"""LookaheadKV and Judge Q as presses: learned rows run after the prompt, and leave again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from kvpress import BasePress
from kvpress.utils import compute_n_kept, get_prerope_query_states
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.models.llama.modeling_llama import rotate_half

from learnkv.gates.lookaheadkv import normalised
from learnkv.presses.common import Learned, marked


@dataclass
class ProbeTokensPress(BasePress):
    """Keeps what learned rows attend to, run after the prompt, beside the prompt's first and last tokens.

    compression_ratio       share of the tokens that go
    num_sinks, num_recent   first and last tokens of a prompt that stay before all others
    """

    compression_ratio: float = 0.0
    num_sinks: int = 4
    num_recent: int = 32

    learned: ClassVar[Learned]

    def __post_init__(self) -> None:
        if not 0 <= self.compression_ratio < 1:
            raise ValueError(f"compression_ratio={self.compression_ratio} is the share of tokens that go; give a number from 0 to below 1")

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[None]:
        decoder = model.get_decoder()
        sliding = len(decoder.layers) - len(self.learned.layers_of(model))
        if sliding:
            raise ValueError(f"{type(model).__name__} has {sliding} layers of a sliding window, whose cache the rows would change")
        handle = decoder.register_forward_hook(self.after_forward)
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def after_forward(self, decoder: Any, args: tuple, output: Any) -> None:
        """Runs the rows after a prompt, and drops what scored least."""
        cache, (B, n, _) = output.past_key_values, output.last_hidden_state.shape
        if not self.compression_ratio or cache.get_seq_length() != n:
            return  # a step of decoding, or the rows themselves
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            raise ValueError(f"{type(self).__name__} runs rows over a DynamicCache, not over a {type(cache).__name__}")
        for layer, scores in zip(cache.layers, self.row_scores(decoder, cache, B, n), strict=True):
            kept = best(marked(scores, self.num_sinks, self.num_recent), compute_n_kept(n, self.compression_ratio))
            index = kept[..., None].expand(-1, -1, -1, layer.keys.shape[-1])
            layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)

    def row_scores(self, decoder: Any, cache: Any, B: int, n: int) -> list[Tensor]:
        """[B, H, n] float32 of each layer; the cache is afterwards as it was."""
        rows = self.learned.weights["tokens"].to(decoder.device, decoder.dtype)
        found: list[Tensor] = []
        try:
            with ExitStack() as stack:
                for block in decoder.layers:
                    hook = partial(self.after_attention, cache, found)
                    stack.callback(block.self_attn.register_forward_hook(hook, with_kwargs=True).remove)
                for handle in self.adapt(decoder):
                    stack.callback(handle.remove)
                decoder(inputs_embeds=rows.expand(B, -1, -1), past_key_values=cache, use_cache=True)
        finally:
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, :n], layer.values[:, :, :n]
        return found

    def adapt(self, decoder: Any) -> Iterator[RemovableHandle]:
        """Changes the decoder's projections for the rows; nothing by default."""
        yield from ()

    def after_attention(self, cache: Any, found: list[Tensor], module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        queries = rotated(get_prerope_query_states(module, kwargs["hidden_states"]), *kwargs["position_embeddings"])
        shares = self.share(row_attention(queries, cache.layers[module.layer_idx].keys, module.scaling))
        scores = shares.unflatten(1, (self.learned.base["num_kv_heads"], -1)).mean(2)  # [B, H, n]
        size = self.learned.config["kernel_size"]
        found.append(F.max_pool1d(scores, size, 1, size // 2) if size > 1 else scores)

    def share(self, attention: Tensor) -> Tensor:
        """[B, Q, n] what the rows' attention to the prompt counts."""
        return attention


class JudgeQPress(ProbeTokensPress):
    """What learned embeddings attend to that run after the prompt and leave again (arXiv:2509.10798).

    Tokens go after the prompt's last layer, for which no wrapper of kvpress waits: it is used alone.  Meant for a question in the prompt.
    """


class LookaheadKVPress(ProbeTokensPress):
    """What learned embeddings attend to that run after the prompt, with a LoRA on them alone, and leave again (arXiv:2603.10899).

    Tokens go after the prompt's last layer, for which no wrapper of kvpress waits: it is used alone.  Meant for a question in the prompt.
    """

    def share(self, attention: Tensor) -> Tensor:
        return normalised(attention)

    def adapt(self, decoder: Any) -> Iterator[RemovableHandle]:
        scale = self.learned.config["alpha"] / self.learned.config["rank"]
        for path, name in PROJECTIONS.items():
            factors = [self.learned.weights.get(f"adapter.factors.{name}.{side}", torch.empty(0)).to(decoder.device) for side in "ab"]
            for block, a, b in zip(decoder.layers, *factors, strict=False):  # of the last layer some have none
                yield projection_of(block, path).register_forward_hook(partial(add_low_rank, a, b, scale))


PROJECTIONS = {f"self_attn.{name}": name for name in ("q_proj", "k_proj", "v_proj", "o_proj")} | {
    f"mlp.{name}": name for name in ("gate_proj", "up_proj", "down_proj")
}


def best(scores: Tensor, count: int) -> Tensor:
    """[B, H, count] int64 where the highest of scores [B, H, n] are, ascending; of equal ones the later, as in learnkv."""
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :count]
    return (scores.shape[-1] - 1 - order).sort().values


def projection_of(block: nn.Module, path: str) -> nn.Module:
    """A projection of a decoder layer."""
    try:
        return block.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"{type(block).__name__} has no {path}, on which the rows' LoRA acts") from error


def add_low_rank(a: Tensor, b: Tensor, scale: float, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    """The projection's output with a LoRA's: a [r, in], b [out, r]."""
    return output + (args[0].to(a.dtype) @ a.mT @ b.mT * scale).to(output.dtype)


def rotated(queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, Q, R, D] with RoPE on the dimensions that it turns."""
    turn, still = queries.tensor_split((cos.shape[-1],), -1)
    return torch.cat([turn * cos[:, None] + rotate_half(turn) * sin[:, None], still], -1)


def row_attention(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[B, Q, n] float32 attention to n prompt tokens, mean over the rows; the rows' own keys keep their share of the softmax.

    queries  [B, Q, R, D] of the rows, rotated
    keys     [B, H, n + R, D] of prompt and rows, rotated
    """
    (Q, R), (H, total) = queries.shape[1:3], keys.shape[1:3]
    logits = (queries.float() * scale).unflatten(1, (H, Q // H)) @ keys.float()[:, :, None].mT  # [B, H, G, R, n + R]
    later = torch.arange(total, device=keys.device) > torch.arange(total - R, total, device=keys.device)[:, None]
    return logits.masked_fill(later, -torch.inf).softmax(-1)[..., : total - R].mean(-2).flatten(1, 2)
