"""The KVP network in Triton: scores as plain torch has them at the same precision, at any width, depth and number of tokens."""

import pytest
import torch
from torch import Tensor

from learnkv import ops
from learnkv.gates.kvp import KVPConfig
from learnkv.kernels import reference
from learnkv.kernels.reference import BranchWeights, TrunkWeights
from tests.interpreted.strict import strict
from tests.observations import observe
from tests.test_kvp import row_of
from tests.training_parts import BASE, made_gate, made_trace

B, H = 2, 2


def made(L: int, D: int = 16, W: int = 12, M: int = 20, F: int = 3, *, inputs: int = 2, depth: int = 2, read=torch.float32):
    """Arguments of `mlp_scorer` with float32 weights."""
    generator = torch.Generator().manual_seed(L + D)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def positive(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) + 0.5

    xs = [(3 * normal(B, H, L, D) + 1).to(read) for _ in range(inputs)]
    branches = [BranchWeights(normal(H, D), 3 * positive(H, D), normal(H, D, W) * D**-0.5, normal(H, W)) for _ in range(inputs)]
    widths = [inputs * W + F] + [M] * depth
    trunk = [TrunkWeights(normal(H, i, M) * i**-0.5, normal(H, M), positive(H, M), normal(H, M)) for i in widths[:-1]]
    return xs, normal(B, H, L, F), branches, trunk, normal(H, M) * M**-0.5, positive(H), normal(H)


def to(arguments, dtype: torch.dtype):
    """The arguments with weights, or with everything in float64, of another type; inputs, statistics and the affine map stay."""
    xs, features, branches, trunk, head, scale, shift = arguments
    if dtype == torch.float64:
        xs, features, scale, shift = [x.double() for x in xs], features.double(), scale.double(), shift.double()
        branches = [BranchWeights(*(w.double() for w in b)) for b in branches]
    else:
        branches = [BranchWeights(b.mean, b.deviation, b.weight.to(dtype), b.bias.to(dtype)) for b in branches]
    return xs, features, branches, [TrunkWeights(*(w.to(dtype) for w in t)) for t in trunk], head.to(dtype), scale, shift


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def in_triton(arguments, order: str = "grid", seed: int = 0) -> Tensor:
    with ops.use("triton"), strict(order=order, seed=seed, races=True, bounds=True):
        out = ops.mlp_scorer(*arguments)
    assert ops.last_used == "triton"
    return out


def holds(arguments) -> None:
    got, plain = in_triton(arguments), reference.mlp_scorer(*arguments)
    want = reference.mlp_scorer(*to(arguments, torch.float64))
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert error(got, want) <= 2 * error(plain, want) + 1e-5


@pytest.mark.parametrize("L", [1, 63, 64, 129])
def test_any_number_of_tokens(L):
    holds(made(L))


@pytest.mark.parametrize("read", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_half_precision_of_cache_and_weights(read, weights):
    holds(to(made(65, read=read), weights))


@pytest.mark.parametrize("D, W, M", [(64, 32, 64), (80, 32, 64), (96, 33, 65), (256, 6, 10), (4, 1, 1)])
def test_widths_that_are_no_powers_of_two(D, W, M):
    holds(made(40, D, W, M))


@pytest.mark.parametrize("W, M", [(256, 256), (40, 256), (200, 136), (200, 40)])
@pytest.mark.parametrize("depth", [1, 2])
def test_widths_beyond_the_registers_go_through_a_workspace(W, M, depth):
    holds(made(20, 16, W, M, depth=depth))


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_any_depth(depth):
    holds(made(40, depth=depth))


@pytest.mark.parametrize("inputs, F", [(2, 0), (1, 3), (0, 3), (0, 32), (1, 0), (2, 32), (2, 5)])
def test_inputs_and_features_that_a_gate_may_have(inputs, F):
    holds(made(40, inputs=inputs, F=F))


def test_three_inputs_are_refused():
    with pytest.raises(ValueError, match="2 at most"):
        in_triton(made(5, inputs=3))


@pytest.mark.parametrize("W, M", [(12, 20), (40, 136)])
def test_the_gradient_is_the_references(W, M):
    def gradients(arguments, run) -> list[Tensor]:
        xs, features, branches, trunk, *ends = arguments
        leaves = [*xs, features, *(w for layer in [*branches, *trunk] for w in layer), *ends]
        for leaf in leaves:
            leaf.requires_grad_()
        score = run(arguments)
        return list(torch.autograd.grad(score, leaves, torch.linspace(-1, 1, score.numel()).view_as(score)))

    got, want = (gradients(made(40, 16, W, M), run) for run in (in_triton, lambda arguments: reference.mlp_scorer(*arguments)))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_needs_no_gradient_gets_none():
    arguments = made(5)
    arguments[4].requires_grad_()
    in_triton(arguments).sum().backward()
    assert arguments[4].grad is not None and arguments[1].grad is None


def test_large_means_beside_small_deviations_cost_no_precision():
    xs, features, branches, *rest = made(64, 32, 256, 16)
    branches = [b._replace(mean=b.mean + 50, bias=b.bias + 30) for b in branches]
    holds(([x + 50 for x in xs], features, branches, *rest))


def test_views_give_the_bits_of_their_copies():
    xs, *rest = made(40)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in xs]
    views[1] = torch.cat([xs[1], xs[1]], 2)[:, :, :40]
    assert torch.equal(in_triton((views, *rest)), in_triton((xs, *rest)))


def test_one_agent_shared_by_all_heads_is_read_from_expanded_weights():
    xs, features, branches, trunk, head, scale, shift = made(20)
    alike = [[type(weights)(*(w[:1].expand(w.shape) for w in weights)) for weights in stack] for stack in (branches, trunk)]
    holds((xs, features, *alike, head[:1].expand(head.shape), scale, shift))


@pytest.mark.parametrize("W, M", [(12, 20), (40, 136)])
def test_order_of_programs_changes_no_bit(W, M):
    arguments = made(65, 16, W, M)
    first = in_triton(arguments)
    for order, seed in [("reverse", 0), ("shuffle", 1), ("shuffle", 2)]:
        assert torch.equal(in_triton(arguments, order, seed), first)


def test_tokens_that_are_not_there_stay_where_they_are():
    xs, *rest = made(40)
    xs[0][0, 1, 7] = xs[1][1, 0, 3] = float("nan")  # empty slots hold anything; nobody else sees it
    got, clean = in_triton((xs, *rest)), in_triton(made(40))
    spoilt = torch.zeros(B, H, 40, dtype=torch.bool)
    spoilt[0, 1, 7] = spoilt[1, 0, 3] = True
    assert torch.equal(got.isnan(), spoilt) and torch.equal(got[~spoilt], clean[~spoilt])


def test_keys_beyond_2_to_the_31_elements_are_reached():
    xs, *rest = made(33, 64)
    far = torch.empty(1 << 32, dtype=torch.float16)  # virtual memory
    stride = (1 << 32) // (B * H)
    keys = far.as_strided((B, H, 33, 64), (H * stride, stride, 64, 1))
    keys.copy_(xs[0])
    assert torch.equal(in_triton(([keys, xs[1]], *rest)), in_triton(([xs[0].half(), xs[1]], *rest)))


def test_nothing_to_score_gives_nothing():
    assert in_triton(made(0)).shape == (B, H, 0)


@pytest.mark.parametrize("config", [KVPConfig(), KVPConfig(shared=True, positions="table", max_positions=16)], ids=["log", "shared table"])
def test_a_gate_serves_the_same_scores_through_either_side(config):
    gate, trace = made_gate(config), made_trace(40)
    everything = [list(range(40))] * BASE.num_kv_heads
    obs = observe([row_of(trace, 1, everything)], layer=1, num_layers=BASE.num_layers)
    want = gate.score(obs)  # also gathers its keys and values
    with ops.use("triton"), strict(order="grid", seed=0, races=True, bounds=True):
        got = gate.score(obs)
    assert ops.last_used == "triton"
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("inputs, F", [(2, 0), (1, 32), (0, 3)])
def test_wide_trunks_read_the_same_inputs_and_features(inputs, F):
    holds(made(20, 16, 40, 70, F, inputs=inputs, depth=3))
