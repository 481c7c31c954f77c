"""The references of the two gate scorers: what the formulas say, in float64 and a token at a time."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learnkv import ops
from learnkv.gates.kvp import KVPConfig
from tests.observations import observe
from tests.test_kvp import KNOBS, row_of
from tests.training_parts import BASE, made_gate, made_trace


def norm(x: list[float]) -> list[float]:
    mean = sum(x) / len(x)
    spread = math.sqrt(sum((v - mean) ** 2 for v in x) / len(x) + 1e-5)
    return [(v - mean) / spread for v in x]


def affine(x: list[float], weight: Tensor, bias: Tensor) -> list[float]:
    return [sum(v * float(weight[i, o]) for i, v in enumerate(x)) + float(bias[o]) for o in range(weight.shape[1])]


def test_mlp_scorer_equals_the_network_a_token_at_a_time():
    generator = torch.Generator().manual_seed(0)
    B, H, L, D, W, M, F = 2, 2, 3, 4, 3, 5, 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs, features = [normal(B, H, L, D) for _ in range(2)], normal(B, H, L, F)
    branches = [ops.BranchWeights(normal(H, D), normal(H, D).abs() + 0.5, normal(H, D, W), normal(H, W)) for _ in range(2)]
    trunk = [ops.TrunkWeights(normal(H, i, M), normal(H, M), normal(H, M), normal(H, M)) for i in (2 * W + F, M)]
    head, scale, shift = normal(H, M), normal(H), normal(H)
    got = ops.mlp_scorer(inputs, features, branches, trunk, head, scale, shift)
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in (B, H, L))).tolist():
        x = []
        for value, branch in zip(inputs, branches, strict=True):
            x += norm(affine(((value[b, h, t] - branch.mean[h]) / branch.deviation[h]).tolist(), branch.weight[h], branch.bias[h]))
        x += features[b, h, t].tolist()
        for layer in trunk:
            y = norm(affine(x, layer.weight[h], layer.bias[h]))
            y = [float(g) * v + float(o) for v, g, o in zip(y, layer.gain[h], layer.offset[h], strict=True)]
            x = [v / (1 + math.exp(-v)) for v in y]
        want = sum(float(w) * v for w, v in zip(head[h], x, strict=True)) * float(scale[h]) + float(shift[h])
        assert float(got[b, h, t]) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("config", [replace(c, pooling=0.0) for c in KNOBS[:11]], ids=str)
def test_mlp_scorer_is_what_the_gate_learns_through(config: KVPConfig):
    gate, trace = made_gate(config), made_trace(23)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        gate.scale.add_(0.5)
        gate.shift.sub_(0.5)
    want = gate.score_trace(trace)
    for layer in range(BASE.num_layers):
        row = row_of(trace, layer, [list(range(23))] * BASE.num_kv_heads)
        got = gate.score(observe([row], layer=layer, num_layers=BASE.num_layers))[0]
        torch.testing.assert_close(got, want[layer], atol=1e-6, rtol=1e-6)


def gate_case(B: int = 2, H: int = 2, G: int = 3, T: int = 4, D: int = 5, S: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H * G, T, D), (B, H, T, D), (D,), (D,), (H, S, D), (H, G)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_gate_scorer_equals_the_formula_a_token_at_a_time():
    queries, keys, query_gain, key_gain, sinks, bias = gate_case()
    got = ops.gate_scorer(queries, keys, query_gain, key_gain, sinks, bias)
    for b, h, t in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(4)).tolist():
        k = keys[b, h, t] / (keys[b, h, t].square().mean() + 1e-6).sqrt() * key_gain
        shares = []
        for g in range(3):
            x = queries[b, 3 * h + g, t]
            q = x / (x.square().mean() + 1e-6).sqrt() * query_gain
            own = float(q @ k) / math.sqrt(5) + float(bias[h, g])
            shares.append(1 / (1 + sum(math.exp(float(q @ sink) / math.sqrt(5) - own) for sink in sinks[h])))
        assert float(got[b, h, t]) == pytest.approx(sum(shares) / 3, rel=1e-9)


def test_gate_scorer_starts_at_one_in_17_with_sixteen_sinks_of_zero():
    queries, keys = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    got = ops.gate_scorer(queries, keys, torch.ones(16), torch.ones(16), torch.zeros(2, 16, 16), torch.zeros(2, 2))
    torch.testing.assert_close(got, torch.full((1, 2, 3), 1 / 17))


def test_gate_scorer_stays_finite_with_its_gradient_where_logits_lie_far_apart():
    case = [x.float() for x in gate_case()]
    case[4] = (case[4] * 1e6).requires_grad_()
    got = ops.gate_scorer(*case)
    (gradient,) = torch.autograd.grad(got.sum(), case[4])
    assert ((got >= 0) & (got <= 1)).all() and gradient.isfinite().all()


def test_gradient_of_the_gate_is_that_of_finite_differences():
    case = [x.requires_grad_() for x in gate_case(B=1, H=1, G=2, T=2)]
    assert torch.autograd.gradcheck(lambda *x: ops.gate_scorer(*x), case)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (1,), (2, 1)])
def test_plackett_luce_of_nothing_and_of_one_pick_is_0(shape):
    scores = torch.zeros(shape, requires_grad=True)
    out = ops.pl_logprob(scores)
    assert torch.equal(out, torch.zeros(shape))
    assert torch.equal(torch.autograd.grad(out.sum(), scores)[0], torch.zeros(shape))


def test_plackett_luce_in_float64_is_exact_to_float64():
    scores = torch.randn(2, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 50
    want = scores - scores.flip(-1).logcumsumexp(-1).flip(-1)
    torch.testing.assert_close(ops.pl_logprob(scores), want, rtol=1e-12, atol=1e-12)
