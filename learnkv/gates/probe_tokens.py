"""Probe tokens: learned rows that run after a prompt, and whose attention to it says what the answer will look at."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from learnkv.capture import capture, decoder_of, evictable_layers, filled_cache
from learnkv.gates.base import Batch, Gate, Held, positions_of, refuse_below
from learnkv.geometry import max_positions
from learnkv.models import BaseModel, PreTrainedModel
from learnkv.observation import Observation, Probe, ProbeScorer, pooled, refuse_kernel
from learnkv.traces.format import Trace
from learnkv.traces.measure import softmax_scales

NOISE = 0.1  # of the first embeddings, in deviations of the model's own


@dataclass(frozen=True)
class ProbeTokensConfig:
    """What all methods of probe tokens can be told."""

    num_tokens: int = 32  # rows; LookaheadKV section 2, where more gain nothing
    kernel_size: int = 7  # slots of the max-pooling of a served score, odd; 0 or 1 for none

    def __post_init__(self) -> None:
        refuse_below(1, num_tokens=self.num_tokens)
        refuse_kernel(self.kernel_size)


@dataclass(frozen=True)
class Rows:
    """Rows behind a prompt, as any run of layers sees both.

    queries   [l, B, Q, R, D] of the rows, rotated
    own_keys  [l, B, H, R, D] of the rows, rotated
    keys      [l, B, H, L, D] of the prompt, rotated
    filled    [l, B, H, L] bool, True where the slot holds a token
    scale     [l] softmax scale
    """

    queries: Tensor
    own_keys: Tensor
    keys: Tensor
    filled: Tensor
    scale: Tensor


class ProbeTokens(ProbeScorer, Gate):
    """The base of LookaheadKV and Judge Q: embeddings of rows that the decoder runs after the prompt, then drops.

    A score is the rows' attention to a token, mean over the rows and the query group, pooled over neighbours.  Training runs the rows
    alone, over a trace's keys and values: a prompt does not see what comes after it.  A subclass says how rows and response are compared.

    Differs: softmax in float32; the rows begin as tokens spread evenly over the vocabulary, with noise of the run's seed; pooled after
    the mean over the query group.
    """

    READS = frozenset({"attention"})
    config: ProbeTokensConfig
    held: Held | None = None  # the model or decoder that runs the rows

    def __init__(self, config: ProbeTokensConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        self.tokens = nn.Parameter(torch.randn(config.num_tokens, base.hidden_size))

    @torch.no_grad()
    def meet(self, model: PreTrainedModel) -> None:
        """Keeps the model for training, and starts the rows from embeddings of its own."""
        refuse_hybrid(decoder_of(model), evictable_layers(model))
        self.held = Held(model)
        embed = cast(nn.Embedding, decoder_of(model).get_input_embeddings())
        count = self.config.num_tokens
        words = embed(torch.arange(count, device=model.device) * embed.num_embeddings // count).to(self.tokens)
        self.tokens.copy_(words + NOISE * words.std() * self.tokens)

    def model_tokens(self, n: int) -> int:
        return 2 * len(self.tokens)  # there and back

    def bind(self, model: nn.Module) -> Self:
        bound = copy.copy(super().bind(model))
        bound.held = Held(decoder_of(cast(PreTrainedModel, model)))
        return bound

    def runner(self) -> PreTrainedModel:
        """The decoder that runs the rows."""
        if self.held is None:
            raise ValueError(f"a {self.METHOD} gate scores a trace by running rows through {self.base.name}; call gate.bind(model) first")
        model = self.held.model
        return decoder_of(model if model.device == self.device else cast(Any, model).to(self.device))

    # ---- from rows to scores

    def forward(self, rows: Rows) -> Tensor:
        """[l, B, Q, L] float32 attention that each query head pays to each token, mean over the rows; 0 on empty slots.

        The rows' own keys keep their share of the softmax.
        """
        (l, B, Q, R, _), (H, L) = rows.queries.shape, rows.keys.shape[2:4]
        queries = (rows.queries.float() * rows.scale.view(-1, 1, 1, 1, 1)).reshape(l, B, H, Q // H * R, -1)
        keys = torch.cat([rows.keys, rows.own_keys], 3).float()  # [l, B, H, L + R, D]
        logits = (queries @ keys.mT).view(l, B, H, -1, R, L + R)
        own = torch.ones(R, R, dtype=torch.bool, device=keys.device).tril().expand(l, B, H, 1, R, R)
        seen = torch.cat([rows.filled[:, :, :, None, None].expand(-1, -1, -1, -1, R, -1), own], -1)
        weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        return weights[..., :L].mean(-2).flatten(2, 3)

    def per_kv_head(self, shares: Tensor) -> Tensor:
        """[l, B, Q, L] -> [l, B, H, L] mean over the query group."""
        return shares.unflatten(2, (self.base.num_kv_heads, -1)).mean(3)

    def probe(self, token_ids: Tensor) -> list[Probe]:
        return [Probe(self.tokens.detach(), 0, len(token_ids), position=len(token_ids))]

    def absorb(self, obs: Observation, probe: Probe, queries: Tensor, keys: Tensor) -> Tensor:
        self.check_geometry(obs)
        scale = torch.tensor([obs.scale], device=keys.device)
        shares = self(Rows(queries[None], keys[None], obs.keys[None], obs.filled[None], scale))
        return self.per_kv_head(shares)[0][..., None]

    def score(self, obs: Observation) -> Tensor:
        return pooled(super().score(obs), obs.positions, self.config.kernel_size)

    # ---- traces

    @torch.no_grad()
    def score_trace(self, trace: Trace) -> Tensor:
        scores = self.per_kv_head(self.shares_of(trace))[:, 0]
        return pooled(scores, positions_of(scores), self.config.kernel_size)

    def shares_of(self, trace: Trace) -> Tensor:
        """[layers, 1, Q, n] `forward` of the rows, run behind a trace's keys and values."""
        decoder = self.runner()
        layers = evictable_layers(decoder)
        keys, values = (self.recorded(trace, name).to(decoder.device, decoder.dtype)[:, None] for name in ("keys", "values"))
        refuse_hybrid(decoder, layers)
        n = keys.shape[3]
        refuse_late(trace, n + len(self.tokens), max_positions(decoder))
        rope = torch.arange(n, n + len(self.tokens), device=decoder.device)[None]
        with capture(decoder, {"queries", "keys"}) as taken:
            decoder(
                inputs_embeds=self.tokens.to(decoder.dtype)[None],
                position_ids=rope,
                cache=filled_cache(decoder, keys, values),
                use_cache=True,
            )
            queries, own_keys = (torch.stack([of[i] for i in layers]) for of in (taken.queries, taken.keys))
        filled = torch.ones(keys.shape[:4], dtype=torch.bool, device=keys.device)
        return self(Rows(queries, own_keys, keys, filled, torch.tensor(softmax_scales(decoder, layers), device=keys.device)))

    def trace_loss(self, batch: Batch, trace: Trace) -> Tensor:
        return self.distance(self.target_of(trace), self.shares_of(trace)[:, 0])

    def target_of(self, trace: Trace) -> Tensor:
        """[layers, Q, n] attention of the response, mean over its rows; of several responses the mean."""
        return self.recorded(trace, "attention") / max(1, len(trace.questions))

    def distance(self, target: Tensor, shares: Tensor) -> Tensor:
        """[] how far the rows' attention lies from the response's, both [layers, Q, n]."""
        raise NotImplementedError


def refuse_late(trace: Trace, end: int, limit: float) -> None:
    """Raises a ValueError where rows behind a trace would stand past the model's positions."""
    if end > limit:
        raise ValueError(
            f"the rows behind trace {trace.id} of {len(trace.ids)} tokens end at position {end}, the model has {limit}; "
            "give fewer rows (gate.num_tokens), or record shorter contexts"
        )


def refuse_hybrid(decoder: PreTrainedModel, layers: Sequence[int]) -> None:
    """Raises a ValueError where traces hold keys and values of some layers only."""
    total = decoder.config.num_hidden_layers
    if len(layers) != total:
        raise ValueError(
            f"{type(decoder).__name__} has {total - len(layers)} sliding-window layers of {total}, whose keys and values traces do not "
            "hold; train probe tokens on a model of full attention only"
        )
