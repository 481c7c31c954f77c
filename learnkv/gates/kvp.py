"""KVP: a small network per KV head ranks tokens by the attention they will receive (arXiv:2602.10238)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learnkv import ops
from learnkv.gates.base import Batch, Gate, refuse_below
from learnkv.gates.ranking import LOSSES, OVER_ALL_HEADS, UTILITY_FLOOR, Items, unprotected
from learnkv.models import BaseModel
from learnkv.names import unknown
from learnkv.observation import Observation
from learnkv.rope import turn_back
from learnkv.traces.format import Trace

INPUTS = ("keys", "values")
MAX_REACH = 64


@dataclass(frozen=True)
class KVPConfig:
    """Published (configs/train_single_head.yaml): branch_width=256, width=256, positions=table, unrotate=False, pooling=0, both inputs."""

    branch_width: int = 32  # of the key branch and of the value branch
    width: int = 64  # of the trunk
    depth: int = 2  # trunk layers of Linear, LayerNorm, SiLU
    positions: str = "log"  # log, table or none
    max_positions: int = 6000  # rows of the table; later positions share the last
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
        if self.loss not in LOSSES:
            raise unknown("loss", self.loss, LOSSES)
        if self.positions not in POSITIONS:
            raise unknown("positions", self.positions, POSITIONS)
        for name in self.inputs:
            if name not in INPUTS:
                raise unknown("input", name, INPUTS)
        if not self.inputs and self.positions == "none":
            raise ValueError("inputs=[] with positions=none leaves the gate nothing to read; give one of them")
        refuse_below(1, branch_width=self.branch_width, width=self.width, depth=self.depth)
        refuse_below(1, max_positions=self.max_positions, reach=self.reach, permutations=self.permutations)
        if not 0 <= self.pooling <= 1:
            raise ValueError(f"pooling={self.pooling} is a share; give 0 to 1")
        if self.reach > MAX_REACH:
            raise ValueError(f"reach={self.reach} is no neighbourhood any more; give 1 to {MAX_REACH} positions")
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


class KVP(Gate):
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
    scale: Tensor
    shift: Tensor
    frequencies: Tensor

    def __init__(self, config: KVPConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        heads = self.heads = Heads(base.num_layers, base.num_kv_heads, config.shared)
        self.branches = nn.ModuleList(Branch(heads, base.head_dim, config.branch_width) for _ in config.inputs)
        self.position = POSITIONS[config.positions](heads, config)
        widths = [config.branch_width * len(config.inputs) + self.position.width] + [config.width] * config.depth
        self.trunk = nn.ModuleList(TrunkLayer(heads, i, o) for i, o in pairwise(widths))
        self.head = HeadLinear(heads, config.width, 1, bias=False)
        self.register_buffer("scale", torch.ones(base.num_layers, base.num_kv_heads))
        self.register_buffer("shift", torch.zeros(base.num_layers, base.num_kv_heads))
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
        inputs = [one_call(getattr(features, name)) for name in self.config.inputs]
        position = one_call(self.position(features.positions, features.num_seen, layers))
        return ops.mlp_scorer(inputs, position, *self.weights(layers)).view(features.positions.shape)

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
        return self.pooled(scores, obs.positions)

    def weights(self, layers: slice) -> tuple[list[ops.BranchWeights], list[ops.TrunkWeights], Tensor, Tensor, Tensor]:
        """The network of `layers` as `ops.mlp_scorer` takes it, layer by layer and head by head."""
        branches = [branch.weights(layers) for branch in cast(list[Branch], self.branches)]
        trunk = [each.weights(layers) for each in cast(list[TrunkLayer], self.trunk)]
        head = self.heads.of(self.head.weight, layers)[..., 0]
        return branches, trunk, head, self.scale[layers].flatten(), self.shift[layers].flatten()

    @torch.no_grad()
    def score_trace(self, trace: Trace) -> Tensor:
        scores = self.trace_scores(trace)
        return self.pooled(scores, torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape))

    def trace_scores(self, trace: Trace) -> Tensor:
        """[layers, H, n] scores of each token by itself, which the losses rank."""
        return self(self.trace_features([trace], slice(None)), slice(None))

    def pooled(self, scores: Tensor, positions: Tensor) -> Tensor:
        """[B, H, L] scores with the neighbourhood's share in them."""
        if not self.config.pooling:
            return scores
        return torch.lerp(scores, neighbourhood_mean(scores, positions, self.config.reach), self.config.pooling)

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


def neighbourhood_mean(scores: Tensor, positions: Tensor, reach: int) -> Tensor:
    """Mean over each token and the tokens held at most `reach` positions away from it.

    scores     [B, H, L] float32, any value on empty slots
    positions  [B, H, L] ascending, -1 on empty slots, which lie at the tail
    returns    [B, H, L]
    """
    total, count = scores.clone(), torch.ones_like(scores)
    for step in range(1, min(reach, scores.shape[-1] - 1) + 1):  # slots apart: at least as many positions
        here, there = slice(None, -step), slice(step, None)
        near = (positions[..., there] >= 0) & (positions[..., there] - positions[..., here] <= reach)
        for to, source in ((here, there), (there, here)):
            total[..., to] += scores[..., source].masked_fill(~near, 0)
            count[..., to] += near
    return total / count


def one_call(x: Tensor) -> Tensor:
    """[l, H, R, X] -> [1, l * H, R, X]: one batched product serves all layers."""
    return x.flatten(0, 1)[None]


def rows(x: Tensor) -> Tensor:
    """[B, H, L, ...] -> [H, B * L, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def refuse_infinite(traces: Sequence[Trace], name: str) -> None:
    """A single value would spoil the statistics."""
    for trace in traces:
        if not getattr(trace, name).isfinite().all():
            raise ValueError(f"trace {trace.id}: its {name} are not all finite; record it again or leave it out")


def padded(tensors: list[Tensor], n: int) -> Tensor:
    """Stacks [l, H, n_b, ...] as [l, H, B, n, ...] with zeros after the end."""
    if len(tensors) == 1:
        return tensors[0][:, :, None]
    l, H, _, *rest = tensors[0].shape
    out = tensors[0].new_zeros(l, H, len(tensors), n, *rest)
    for b, t in enumerate(tensors):
        out[:, :, b, : t.shape[2]] = t
    return out


# ---- the network, every weight stacked [layers, H, ...]


@dataclass(frozen=True)
class Heads:
    """How many agents there are; one weight serves all of them where they are shared."""

    num_layers: int
    num_kv_heads: int
    shared: bool

    def weight(self, *shape: int) -> nn.Parameter:
        """An empty stacked parameter."""
        return nn.Parameter(torch.empty(*((1, 1) if self.shared else (self.num_layers, self.num_kv_heads)), *shape))

    def of(self, weight: Tensor, layers: slice) -> Tensor:
        """[l * H, ...] the weights of a run of layers."""
        return weight.expand(self.num_layers, self.num_kv_heads, *weight.shape[2:])[layers].flatten(0, 1)


class HeadLinear(nn.Module):
    """Weight [.., i, o] and bias of one linear map per head."""

    def __init__(self, heads: Heads, size: int, width: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = heads.weight(size, width)
        self.bias = heads.weight(1, width) if bias else None
        nn.init.normal_(self.weight, std=1 / math.sqrt(size))
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class HeadNorm(nn.Module):
    """Weight and bias per head of a LayerNorm over the last dimension."""

    def __init__(self, heads: Heads, width: int) -> None:
        super().__init__()
        self.weight = heads.weight(1, width)
        self.bias = heads.weight(1, width)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)


class Branch(nn.Module):
    """Standardise, Linear, LayerNorm.

    The LayerNorm has no weight and bias of its own: the linear map that follows it holds them.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, heads: Heads, head_dim: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = HeadLinear(heads, head_dim, width)
        shape = heads.num_layers, heads.num_kv_heads, 1, head_dim
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("deviation", torch.ones(shape))

    def weights(self, layers: slice) -> ops.BranchWeights:
        """Of the heads of `layers`."""
        assert self.linear.bias is not None
        mean, deviation = (x[layers].flatten(0, 1)[:, 0] for x in (self.mean, self.deviation))
        return ops.BranchWeights(mean, deviation, self.heads.of(self.linear.weight, layers), self.heads.of(self.linear.bias, layers)[:, 0])

    def standardise(self, x: Tensor) -> None:
        """Takes mean and deviation per head from x [layers, H, n, D]."""
        self.mean.copy_(x.mean(2, keepdim=True))
        self.deviation.copy_(x.std(2, keepdim=True) + 1e-5)


class TrunkLayer(nn.Module):
    """Linear, LayerNorm, SiLU."""

    def __init__(self, heads: Heads, size: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = HeadLinear(heads, size, width)
        self.norm = HeadNorm(heads, width)

    def weights(self, layers: slice) -> ops.TrunkWeights:
        """Of the heads of `layers`."""
        assert self.linear.bias is not None
        rows = (self.heads.of(w, layers)[:, 0] for w in (self.linear.bias, self.norm.weight, self.norm.bias))
        return ops.TrunkWeights(self.heads.of(self.linear.weight, layers), *rows)


class LogPositions(nn.Module):
    """log(1 + pos), log(1 + n - pos) and pos / n: goes on past the lengths that were trained on.

    Differs: the published table tells no positions apart beyond its end.
    """

    width = 3

    def __init__(self, heads: Heads, config: KVPConfig) -> None:
        super().__init__()

    def forward(self, positions: Tensor, num_seen: Tensor, layers: slice) -> Tensor:
        pos = positions.clamp(min=0).float()
        left = (num_seen - pos).clamp(min=0)  # below 0 on padding
        return torch.stack([pos.log1p() / LOG_SPAN, left.log1p() / LOG_SPAN, pos / num_seen], -1)


LOG_SPAN = 8.0  # log of about 3,000 tokens: keeps the features near 1


class TablePositions(nn.Module):
    """A learned row per position and a LayerNorm, as published."""

    width = 32

    def __init__(self, heads: Heads, config: KVPConfig) -> None:
        super().__init__()
        self.heads = heads
        self.table = heads.weight(config.max_positions, self.width)
        self.norm = HeadNorm(heads, self.width)
        nn.init.normal_(self.table)

    def forward(self, positions: Tensor, num_seen: Tensor, layers: slice) -> Tensor:
        table, weight, bias = (self.heads.of(w, layers) for w in (self.table, self.norm.weight, self.norm.bias))
        index = positions.flatten(0, 1).clamp(0, table.shape[1] - 1).long()[..., None]  # [l * H, R, 1]
        found = F.layer_norm(table.gather(1, index.expand(-1, -1, self.width)), (self.width,))
        return torch.addcmul(bias, found, weight).view(*positions.shape, self.width)


class NoPositions(nn.Module):
    """Nothing: the score hangs on keys and values alone."""

    width = 0

    def __init__(self, heads: Heads, config: KVPConfig) -> None:
        super().__init__()

    def forward(self, positions: Tensor, num_seen: Tensor, layers: slice) -> Tensor:
        return positions.new_zeros(*positions.shape, 0, dtype=torch.float32)


POSITIONS: dict[str, Callable[[Heads, KVPConfig], LogPositions | TablePositions | NoPositions]] = {
    "log": LogPositions,
    "table": TablePositions,
    "none": NoPositions,
}
