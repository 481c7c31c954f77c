"""A small network per KV head from several inputs to one score: KVP's (arXiv:2602.10238), every weight stacked [layers, H, ...]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkv import ops
from learnkv.gates.base import refuse_below
from learnkv.names import unknown


@dataclass(frozen=True)
class NetworkConfig:
    """The sizes of a HeadNetwork."""

    branch_width: int = 32  # of each input's branch
    width: int = 64  # of the trunk
    depth: int = 2  # trunk layers of Linear, LayerNorm, SiLU
    positions: str = "log"  # log, table or none
    max_positions: int = 6000  # rows of the table; later positions share the last

    def __post_init__(self) -> None:
        if self.positions not in POSITIONS:
            raise unknown("positions", self.positions, POSITIONS)
        refuse_below(1, branch_width=self.branch_width, width=self.width, depth=self.depth, max_positions=self.max_positions)


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

    def __init__(self, heads: Heads, max_positions: int) -> None:
        super().__init__()

    def forward(self, positions: Tensor, num_seen: Tensor, layers: slice) -> Tensor:
        pos = positions.clamp(min=0).float()
        left = (num_seen - pos).clamp(min=0)  # below 0 on padding
        return torch.stack([pos.log1p() / LOG_SPAN, left.log1p() / LOG_SPAN, pos / num_seen], -1)


LOG_SPAN = 8.0  # log of about 3,000 tokens: keeps the features near 1


class TablePositions(nn.Module):
    """A learned row per position and a LayerNorm, as published."""

    width = 32

    def __init__(self, heads: Heads, max_positions: int) -> None:
        super().__init__()
        self.heads = heads
        self.table = heads.weight(max_positions, self.width)
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

    def __init__(self, heads: Heads, max_positions: int) -> None:
        super().__init__()

    def forward(self, positions: Tensor, num_seen: Tensor, layers: slice) -> Tensor:
        return positions.new_zeros(*positions.shape, 0, dtype=torch.float32)


POSITIONS: dict[str, Callable[[Heads, int], LogPositions | TablePositions | NoPositions]] = {
    "log": LogPositions,
    "table": TablePositions,
    "none": NoPositions,
}


class HeadNetwork(nn.Module):
    """A branch per input, concatenated with a position part into a trunk that ends in one score; a part of a gate, which builds it."""

    branches: nn.ModuleList
    position: LogPositions | TablePositions | NoPositions
    trunk: nn.ModuleList
    scale: Tensor
    shift: Tensor

    def build(self, heads: Heads, sizes: Sequence[int], config: NetworkConfig) -> None:
        """Fresh weights; `sizes` are the dimensions of the inputs."""
        self.heads = heads
        self.branches = nn.ModuleList(Branch(heads, size, config.branch_width) for size in sizes)
        self.position = POSITIONS[config.positions](heads, config.max_positions)
        widths = [config.branch_width * len(sizes) + self.position.width] + [config.width] * config.depth
        self.trunk = nn.ModuleList(TrunkLayer(heads, i, o) for i, o in pairwise(widths))
        self.head = HeadLinear(heads, config.width, 1, bias=False)
        self.register_buffer("scale", torch.ones(heads.num_layers, heads.num_kv_heads))
        self.register_buffer("shift", torch.zeros(heads.num_layers, heads.num_kv_heads))

    def network(self, inputs: Sequence[Tensor], positions: Tensor, num_seen: Tensor, layers: slice) -> Tensor:
        """[l, H, R] float32 scores of rows, which are the tokens of any number of sequences, by the weights of `layers`.

        inputs     each [l, H, R, D] of any float type
        positions  [l, H, R] ordinal of the token in its sequence
        num_seen   [R] tokens of that sequence so far
        """
        position = one_call(self.position(positions, num_seen, layers))
        return ops.mlp_scorer([one_call(x) for x in inputs], position, *self.weights(layers)).view(positions.shape)

    def weights(self, layers: slice) -> tuple[list[ops.BranchWeights], list[ops.TrunkWeights], Tensor, Tensor, Tensor]:
        """The network of `layers` as `ops.mlp_scorer` takes it, layer by layer and head by head."""
        branches = [branch.weights(layers) for branch in cast(list[Branch], self.branches)]
        trunk = [each.weights(layers) for each in cast(list[TrunkLayer], self.trunk)]
        head = self.heads.of(self.head.weight, layers)[..., 0]
        return branches, trunk, head, self.scale[layers].flatten(), self.shift[layers].flatten()


def one_call(x: Tensor) -> Tensor:
    """[l, H, R, X] -> [1, l * H, R, X]: one batched product serves all layers."""
    return x.flatten(0, 1)[None]
