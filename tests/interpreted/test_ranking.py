"""Plackett-Luce and the reward over budgets in Triton: values and gradients as the definition in float64 has them."""

import pytest
import torch
from torch import Tensor

from learnkv import ops
from learnkv.kernels import ranking, reference
from learnkv.kernels.entry import Tile
from tests.interpreted.strict import strict

ORDERS = [("reverse", 0), ("shuffle", 1), ("shuffle", 2)]


OWN_TILE = ranking.tile


def definition(scores: Tensor) -> Tensor:
    """Plain torch at the precision of its input; -inf gives 0."""
    rest = scores.flip(-1).logcumsumexp(-1).flip(-1)
    return (scores - rest).masked_fill(scores == float("-inf"), 0)


def picks(*shape: int, spread: float = 3.0, padding: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    scores = (torch.rand(shape, generator=generator) - 0.5) * spread
    if padding:
        scores[..., -padding:] = float("-inf")
    return scores


def upstream(scores: Tensor) -> Tensor:
    return torch.randn(scores.shape, generator=torch.Generator().manual_seed(7))


def with_gradient(op, scores: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    leaf = scores.clone().requires_grad_()
    out = op(leaf)
    (gradient,) = torch.autograd.grad((out * weight).sum(), leaf)
    return out.detach(), gradient.nan_to_num(0)  # logcumsumexp has NaN on padding


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """The interpreter scans a number at a time; with these, rows of a few hundred have many tiles and many blocks of them."""
    monkeypatch.setattr(ranking, "tile", lambda arch: Tile({"BLOCK_N": 32, "BLOCK_T": 4}))


def in_triton(op, *args, order: str = "grid", seed: int = 0):
    with ops.use("triton"), strict(order=order, seed=seed, races=True, bounds=True):
        out = op(*args)
    assert ops.last_used == "triton"
    return out


def test_plain_torch_at_the_same_precision_is_beaten_or_matched():
    for n, spread in [(1, 3.0), (63, 3.0), (129, 40.0), (160, 3.0), (300, 700.0)]:
        scores = picks(2, n, spread=spread)
        weight = upstream(scores)
        want = with_gradient(definition, scores.double(), weight)
        plain = with_gradient(definition, scores, weight)
        got = in_triton(with_gradient, ops.pl_logprob, scores, weight)
        for g, p, w in zip(got, plain, want, strict=True):
            assert error(g, w) <= 2 * error(p, w) + 1e-6, (n, spread)


@pytest.mark.parametrize("descending", [True, False])
def test_sorted_scores_over_a_range_of_700_neither_overflow_nor_vanish(descending):
    scores = picks(1, 300, spread=1400.0).sort(-1, descending=descending).values
    weight = upstream(scores)
    want = with_gradient(definition, scores.double(), weight)
    got = in_triton(with_gradient, ops.pl_logprob, scores, weight)
    for g, w in zip(got, want, strict=True):
        assert error(g, w) < 1e-5


@pytest.mark.parametrize("padding", [1, 60, 160, 198, 200])
def test_padding_has_logprob_0_and_gradient_0_and_changes_nothing_before_it(padding):
    scores = picks(200, padding=padding)
    weight = upstream(scores)
    logprob, gradient = in_triton(with_gradient, ops.pl_logprob, scores, weight)
    filled = 200 - padding
    assert not logprob[filled:].any() and not gradient[filled:].any()
    if filled:
        want = with_gradient(definition, scores[:filled].double(), weight[:filled])
        assert error(logprob[:filled], want[0]) < 1e-6 and error(gradient[:filled], want[1]) < 1e-6


def test_reference_and_triton_agree_on_rows_of_any_padding():
    scores = picks(3, 2, 70)
    scores[0, 1, 50:] = scores[2, 0, 1:] = scores[1, 1] = float("-inf")
    weight = upstream(scores)
    for got, want in zip(
        in_triton(with_gradient, ops.pl_logprob, scores, weight), with_gradient(reference.pl_logprob, scores, weight), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_gradients_of_a_row_cancel_since_a_constant_changes_no_probability():
    scores = torch.zeros(1, 300)
    _, gradient = in_triton(with_gradient, ops.pl_logprob, scores, torch.ones_like(scores))
    assert abs(float(gradient.sum())) < 1e-4 < float(gradient.abs().sum())


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (1,), (2, 3, 1)])
def test_nothing_to_rank_and_a_single_pick_have_values_and_gradients(shape):
    scores = torch.zeros(shape)
    logprob, gradient = in_triton(with_gradient, ops.pl_logprob, scores, torch.ones(shape))
    reward, slope = in_triton(with_gradient, ops.budget_reward, torch.ones(shape), torch.ones(shape[:-1]))
    assert torch.equal(logprob, scores) and torch.equal(gradient, scores)
    assert torch.equal(reward, -torch.ones(shape).sum(-1)) and torch.equal(slope, -torch.ones(shape))


def test_views_and_expanded_upstreams_give_the_bits_of_their_copies():
    scores = picks(200, 3).mT
    leaf = scores.clone(memory_format=torch.contiguous_format).requires_grad_()
    want = in_triton(lambda: torch.autograd.grad(ops.pl_logprob(leaf).mul(torch.ones(3, 200)).sum(), leaf)[0])
    view = scores.detach().requires_grad_()
    assert not view.is_contiguous()
    got = in_triton(lambda: torch.autograd.grad(ops.pl_logprob(view).sum(), view)[0])
    assert torch.equal(got, want)


def test_order_of_programs_changes_no_bit():
    scores, utility = picks(2, 200, padding=30), picks(2, 200).abs()
    weight = upstream(scores)
    first = *in_triton(with_gradient, ops.pl_logprob, scores, weight), in_triton(ops.budget_reward, utility)
    for order, seed in ORDERS:
        options = {"order": order, "seed": seed}
        again = in_triton(with_gradient, ops.pl_logprob, scores, weight, **options), in_triton(ops.budget_reward, utility, **options)
        assert all(torch.equal(a, b) for a, b in zip(first, (*again[0], again[1]), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 63, 129, 1000])
def test_budget_reward_and_its_gradient_equal_the_weighted_sum(n, dtype):
    utility = torch.rand(2, 2, n, generator=torch.Generator().manual_seed(n)).to(dtype)
    weight = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    got, gradient = in_triton(with_gradient, ops.budget_reward, utility, weight)
    want, slope = with_gradient(reference.budget_reward, utility.double(), weight)
    assert got.dtype == torch.float32 and error(got, want) < 1e-6
    assert gradient.dtype == dtype and torch.equal(gradient, slope.to(dtype))


def test_rows_beyond_2_to_the_31_elements_are_reached():
    rows, n, filled = 9, 1 << 28, 32
    far = torch.empty(rows * n, dtype=torch.float32)  # virtual memory: 32 numbers a row are touched
    row_starts, spare = far.view(rows, n)[:, :filled], torch.zeros(rows)
    scores, weight = picks(rows, filled), upstream(picks(rows, filled))
    logprob, gradient = with_gradient(reference.pl_logprob, scores, weight)
    row_starts[:] = scores
    with strict(order="grid", seed=0, races=False, bounds=True):
        ranking.budget_reward_tile[(rows, 1)](far, spare, n, filled)
        ranking.pl_logprob_tile[(rows, 1)](far, spare, spare, far, n, filled, 4)
        torch.testing.assert_close(row_starts, logprob)
        ranking.pl_logprob_grad[(rows, 1)](far, weight, spare, spare, far, n, filled, 1, filled, 4)
    torch.testing.assert_close(row_starts, gradient)


def test_the_launchers_own_tiles_give_the_same(monkeypatch):
    scores = picks(1, 1025, spread=700.0)
    weight = upstream(scores)
    want = in_triton(with_gradient, ops.pl_logprob, scores, weight)
    monkeypatch.setattr(ranking, "tile", OWN_TILE)
    got = in_triton(with_gradient, ops.pl_logprob, scores, weight)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
