"""KVP: a small network per KV head ranks tokens by the attention they will receive (arXiv:2602.10238)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learnkv.gates.base import Batch, Gate, positions_of, refuse_below, refuse_infinite
from learnkv.gates.neighbours import refuse_pooling, with_neighbours
from learnkv.gates.network import Branch, HeadNetwork, Heads, NetworkConfig
from learnkv.gates.ranking import LOSSES, OVER_ALL_HEADS, UTILITY_FLOOR, Items, unprotected
from learnkv.models import BaseModel
from learnkv.names import unknown
from learnkv.observation import Observation
from learnkv.rope import turn_back
from learnkv.traces.format import Trace

INPUTS = ("keys", "values")


@dataclass(frozen=True)
class KVPConfig(NetworkConfig):
    """Published (configs/train_single_head.yaml): branch_width=256, width=256, positions=table, unrotate=False, pooling=0, both inputs."""

    inputs: tuple[str, ...] = ("keys", "values")  # which branches there are; () scores by position alone
    unrotate: bool = True  # take RoPE off the keys, so that scores hold at positions that were not trained on
    pooling: float = 0.75  # share in a served score of the mean over the token's neighbourhood; 0 for none
    reach: int = 2  # positions that the neighbourhood reaches to both sides
    shared: bool = False  # one agent for all heads instead of one per head
    loss: str = "plackett_luce"  # see learnkv.gates.ranking.LOSSES
    permutations: int = 8  # K drawn per item and step
    num_sinks: int = 4  # first tokens left out of the loss: a policy keeps them anyway
    num_recent: int = 16  # last tokens, likewise

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in LOSSES:
            raise unknown("loss", self.loss, LOSSES)
        for name in self.inputs:
            if name not in INPUTS:
                raise unknown("input", name, INPUTS)
        if not self.inputs and self.positions == "none":
            raise ValueError("inputs=[] with positions=none leaves the gate nothing to read; give one of them")
        refuse_below(1, permutations=self.permutations)
        refuse_pooling(self.pooling, self.reach)
        refuse_below(0, num_sinks=self.num_sinks, num_recent=self.num_recent)


@dataclass(frozen=True)
class Features:
    """What KVP reads of each token; rows R are the tokens of any number of sequences.

    positions     [l, H, R] ordinal of the token in its sequence
    num_seen      [R] tokens of that sequence so far
    keys, values  [l, H, R, D] any float type, keys as `KVP.as_read` gives them; None where the gate has no such branch
    """

    positions: Tensor
    num_seen: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None


class KVP(HeadNetwork, Gate):
    """Key branch, value branch and position part, concatenated into a trunk that ends in one score (arXiv:2602.10238).

    Differs: all agents are one batched network, where the authors train one agent per process; RoPE is taken off the keys, so that
    contexts longer than the traces are scored as those are; keys and values are standardised per head by the first traces' mean and
    deviation; the last linear has no bias, which no ranking loss can train, and an affine map per head takes the score to the
    logarithm of the utility after training, so that heads can share a budget; a served score is mixed with the mean of its
    neighbours', as SnapKV pools attention, so that an answer stays with the words around it.
    """

    METHOD = "kvp"
    needs = frozenset({"rope_offset"})
    Config = KVPConfig
    config: KVPConfig
    frequencies: Tensor

    def __init__(self, config: KVPConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        self.build(Heads(base.num_layers, base.num_kv_heads, config.shared), [base.head_dim] * len(config.inputs), config)
        if self.turns and not base.frequencies:
            raise ValueError(
                f"learnkv can't take the RoPE of model {base.name} off its keys, which this gate reads; train with gate.unrotate=false"
            )
        self.register_buffer("frequencies", torch.tensor(base.frequencies), persistent=False)

    @property
    def turns(self) -> bool:
        """Whether RoPE is taken off the keys."""
        return self.config.unrotate and "keys" in self.config.inputs

    def bind(self, model: nn.Module) -> KVP:
        """The gate on the model's device, and with the model's RoPE where it takes that off."""
        return super(KVP, self.with_rope_of(model) if self.turns else self).bind(model)

    def forward(self, features: Features, layers: slice) -> Tensor:
        """[l, H, R] float32 scores by the weights of `layers`, whose heads are those of one call."""
        inputs = [getattr(features, name) for name in self.config.inputs]
        return self.network(inputs, features.positions, features.num_seen, layers)

    @torch.no_grad()
    def score(self, obs: Observation) -> Tensor:
        self.check_geometry(obs)
        B, H, L = obs.positions.shape
        assert obs.rope_offset is not None
        taken = {name: getattr(obs, name) for name in self.config.inputs}  # each is a gather
        read = self.as_read(taken, obs.positions + obs.rope_offset[:, None, None])
        of_tokens = {name: rows(x)[None] for name, x in read.items()}
        features = Features(rows(obs.positions)[None], obs.num_seen.repeat_interleave(L), **of_tokens)
        scores = self(features, slice(obs.layer, obs.layer + 1)).view(H, B, L).transpose(0, 1)
        return with_neighbours(scores, obs.positions, self.config.pooling, self.config.reach)

    @torch.no_grad()
    def score_trace(self, trace: Trace) -> Tensor:
        scores = self.trace_scores(trace)
        return with_neighbours(scores, positions_of(scores), self.config.pooling, self.config.reach)

    def trace_scores(self, trace: Trace) -> Tensor:
        """[layers, H, n] scores of each token by itself, which the losses rank."""
        return self(self.trace_features([trace], slice(None)), slice(None))

    def trace_features(self, traces: Sequence[Trace], layers: slice) -> Features:
        """Rows of the traces side by side, each padded to the longest: R = B * n."""
        lengths = torch.tensor([len(t.ids) for t in traces], device=self.device)
        n = int(lengths.max())
        of_traces = {name: [self.recorded(t, name, layers) for t in traces] for name in self.config.inputs}
        positions = torch.arange(n, device=self.device).repeat(len(traces))
        read = self.as_read({name: padded(x, n).flatten(2, 3) for name, x in of_traces.items()}, positions)
        heads = len(range(self.base.num_layers)[layers]), self.base.num_kv_heads
        return Features(positions.expand(*heads, -1), lengths.repeat_interleave(n), **read)

    def trace_items(self, batch: Batch, layers: slice) -> Items:
        """What the loss ranks, padded as `trace_features` pads."""
        utilities = [self.recorded(t, "utility", layers) for t in batch.traces]
        lengths = torch.tensor([u.shape[-1] for u in utilities], device=self.device)
        return Items(padded(utilities, int(lengths.max())), lengths, batch, layers.start)

    def as_read(self, taken: dict[str, Tensor], rope_positions: Tensor) -> dict[str, Tensor]:
        """Inputs [..., D] by name as the branches read them: keys in float32 without RoPE, or as they are where the config says so."""
        if not self.turns:
            return taken
        angle = rope_positions[..., None] * self.frequencies
        return taken | {"keys": turn_back(taken["keys"].float(), angle.cos(), angle.sin())}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """See `Gate.loss`.  The loss is summed over heads: an agent's gradient does not depend on how many there are."""
        chunks = self.layer_chunks(batch)
        run: Callable = self.layers_loss if len(chunks) == 1 else self.recomputed_loss
        losses, rewards = zip(*(run(batch, layers) for layers in chunks), strict=True)
        per_trace = torch.cat(losses).sum((0, 1))  # [B]
        return {"loss": per_trace.mean(), "losses": per_trace.detach(), "reward": torch.cat(rewards).mean((1, 2))}

    def layers_loss(self, batch: Batch, layers: slice) -> tuple[Tensor, Tensor]:
        """(loss, reward), both [l, H, B], of a run of layers."""
        config = self.config
        features, items = self.trace_features(batch.traces, layers), self.trace_items(batch, layers)
        scores = self(features, layers).view(items.utility.shape)
        return LOSSES[config.loss](*unprotected(scores, items, config.num_sinks, config.num_recent), config.permutations)

    def recomputed_loss(self, batch: Batch, layers: slice) -> tuple[Tensor, Tensor]:
        """`layers_loss` that keeps no activations: they are computed again when the gradient is."""
        return checkpoint(self.layers_loss, batch, layers, use_reentrant=False, preserve_rng_state=False)

    def layer_chunks(self, batch: Batch) -> list[slice]:
        """All layers at once where the step then fits CHUNK_FLOATS or the loss spans them, else as many as fit, one at least."""
        if self.config.loss in OVER_ALL_HEADS:
            return [slice(0, self.base.num_layers)]
        tokens = len(batch.traces) * max(len(t.ids) for t in batch.traces) * self.base.num_kv_heads
        config = self.config
        per_token = 4 * self.base.head_dim + 6 * config.branch_width + 4 * config.depth * config.width + 12 * config.permutations
        step = max(1, CHUNK_FLOATS // (tokens * per_token))
        return [slice(i, min(i + step, self.base.num_layers)) for i in range(0, self.base.num_layers, step)]

    def prepare(self, traces: Sequence[Trace]) -> None:
        features = [self.trace_features([t], slice(None)) for t in traces]
        for name, branch in zip(self.config.inputs, self.branches, strict=True):
            assert isinstance(branch, Branch)
            refuse_infinite(traces, name)
            branch.standardise(torch.cat([getattr(f, name) for f in features], 2).float())

    def calibrate(self, traces: Sequence[Trace]) -> None:
        """Least squares per head from score to the logarithm of the utility, slope above 0 so that the order within a head stays.

        A loss over all heads has taught them to compare already and is left as it is.
        """
        if self.config.loss in OVER_ALL_HEADS:
            return
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.shift)
        scores = torch.cat([self.trace_scores(t) for t in traces], -1)
        target = (torch.cat([self.recorded(t, "utility") for t in traces], -1) + UTILITY_FLOOR).log()
        slope, offset = positive_fit(scores, target)
        self.scale.copy_(slope)
        self.shift.copy_(offset)


CHUNK_FLOATS = 1 << 28  # 1 GiB of activations


def positive_fit(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Least-squares (slope, offset) [...] of y on x, both [..., n]; the slope at least LEAST_SLOPE."""
    x_mean, y_mean = x.mean(-1, dtype=torch.float64), y.mean(-1, dtype=torch.float64)
    dx = x - x_mean[..., None]
    slope = ((dx * (y - y_mean[..., None])).sum(-1) / dx.square().sum(-1).clamp(min=1e-12)).clamp(min=LEAST_SLOPE)
    return slope.float(), (y_mean - slope * x_mean).float()


LEAST_SLOPE = 1e-3  # below it float32 would merge neighbours


# ---- from traces and caches to rows


def rows(x: Tensor) -> Tensor:
    """[B, H, L, ...] -> [H, B * L, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def padded(tensors: list[Tensor], n: int) -> Tensor:
    """Stacks [l, H, n_b, ...] as [l, H, B, n, ...] with zeros after the end."""
    if len(tensors) == 1:
        return tensors[0][:, :, None]
    l, H, _, *rest = tensors[0].shape
    out = tensors[0].new_zeros(l, H, len(tensors), n, *rest)
    for b, t in enumerate(tensors):
        out[:, :, b, : t.shape[2]] = t
    return out
