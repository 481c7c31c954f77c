"""Fast KVzip's gate in Triton: scores as plain torch has them at the same precision, and their gradients."""

import pytest
import torch
from torch import Tensor

from learnkv import ops
from learnkv.kernels import reference
from tests.interpreted.strict import strict

B, H = 2, 3


def made(T: int, G: int = 4, D: int = 16, S: int = 16, dtype=torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + T)
    shapes = (B, H * G, T, D), (B, H, T, D), (D,), (D,), (H, S, D), (H, G)
    return [torch.randn(shape, generator=generator).mul(2).to(dtype) for shape in shapes]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


def in_triton(arguments, order: str = "grid", seed: int = 0) -> Tensor:
    with ops.use("triton"), strict(order=order, seed=seed, races=True, bounds=True):
        out = ops.gate_scorer(*arguments)
    assert ops.last_used == "triton"
    return out


def holds(arguments) -> None:
    got, plain = in_triton(arguments), reference.gate_scorer(*arguments)
    want = reference.gate_scorer(*(x.double() for x in arguments))
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert error(got, want) <= 2 * error(plain, want) + 1e-5


@pytest.mark.parametrize("T", [1, 63, 129, 1000])
@pytest.mark.parametrize("G", [1, 3, 4, 7])
def test_any_number_of_tokens_and_any_group(T, G):
    holds(made(T, G))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    holds(made(65, dtype=dtype))


@pytest.mark.parametrize("D, S", [(4, 16), (20, 5), (16, 1), (64, 40)])
def test_dimensions_and_sinks_that_are_no_powers_of_two(D, S):
    holds(made(65, D=D, S=S))


@pytest.mark.parametrize("factor", [1e3, -1e3, 1e6])
def test_logits_far_apart_neither_overflow_nor_leave_the_unit_interval(factor):
    queries, keys, query_gain, key_gain, sinks, bias = made(33)
    got = in_triton([queries, keys, query_gain, key_gain, sinks * factor, bias])
    want = reference.gate_scorer(queries, keys, query_gain, key_gain, sinks * factor, bias)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert ((got >= 0) & (got <= 1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_every_argument_as_the_definition_has_them(dtype):
    arguments = [x.requires_grad_() for x in made(33, dtype=dtype)]
    weight = torch.randn(B, H, 33, generator=torch.Generator().manual_seed(1))
    exact = [x.detach().double().requires_grad_() for x in arguments]
    want = torch.autograd.grad((reference.gate_scorer(*exact) * weight).sum(), exact)
    plain = torch.autograd.grad((reference.gate_scorer(*arguments) * weight).sum(), arguments)
    got = torch.autograd.grad((in_triton(arguments) * weight).sum(), arguments)
    for g, p, w, x in zip(got, plain, want, arguments, strict=True):
        assert g.dtype == x.dtype and error(g, w) <= 2 * error(p, w) + 1e-5


def test_gradient_of_some_arguments_leaves_the_others_alone():
    arguments = made(20)
    arguments[4].requires_grad_()
    (got,) = torch.autograd.grad(in_triton(arguments).sum(), [arguments[4]])
    (want,) = torch.autograd.grad(reference.gate_scorer(*arguments).sum(), [arguments[4]])
    torch.testing.assert_close(got, want)


def test_projections_as_they_lie_give_the_bits_of_their_copies():
    queries, keys, *rest = made(40)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (queries, keys)]
    wide = torch.stack([queries, queries], -1)[..., 0]
    want = in_triton([queries, keys, *rest])
    assert torch.equal(in_triton([*views, *rest]), want) and torch.equal(in_triton([wide, keys, *rest]), want)


def test_order_of_programs_changes_no_bit():
    arguments = made(300)
    first = in_triton(arguments)
    for order, seed in [("reverse", 0), ("shuffle", 1), ("shuffle", 2)]:
        assert torch.equal(in_triton(arguments, order, seed), first)


def test_a_poisoned_token_spoils_its_own_score_only():
    arguments = made(140)
    clean = in_triton(arguments)
    arguments[1][0, 2, 131] = float("nan")
    got = in_triton(arguments)
    spoilt = torch.zeros(B, H, 140, dtype=torch.bool)
    spoilt[0, 2, 131] = True
    assert torch.equal(got.isnan(), spoilt) and torch.equal(got[~spoilt], clean[~spoilt])


def test_queries_beyond_2_to_the_31_elements_are_reached():
    queries, *rest = made(20)
    stride = 1 << 27
    far = torch.empty(24 * stride, dtype=torch.float16).as_strided(queries.shape, (12 * stride, stride, 16, 1))  # virtual memory
    far.copy_(queries)
    assert torch.equal(in_triton([far, *rest]), in_triton([queries.half(), *rest]))


def test_nothing_to_score_gives_nothing_and_a_gradient_of_0():
    arguments = [x.requires_grad_() for x in made(0)]
    out = in_triton(arguments)
    assert out.shape == (B, H, 0)
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), arguments))
