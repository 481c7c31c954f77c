"""Soft gating: what a gate does to attention is what it says, and the model is its own before, beside and after it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from learnkv.capture import capture, evictable_layers
from learnkv.gates import soft
from learnkv.gates.soft import Seen, gated_attention, per_row, soft_attention
from tests.tiny_models import prompt, tiny

FAMILIES = ("llama", "qwen3", "gemma3")


def frozen(family: str, **changes: object):
    return tiny(family, **changes).requires_grad_(False)


def unchanged(logits: Tensor, age: Tensor) -> Tensor:
    return logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_open_gates_leave_the_models_own_logits(family, attention):
    model, ids = frozen(family, attn_implementation=attention), prompt(21, rows=2)
    want = model(ids, use_cache=False).logits
    with soft_attention(model, lambda seen: gated_attention(seen, unchanged)):
        assert torch.allclose(model(ids, use_cache=False).logits, want, atol=1e-5)
    with soft_attention(model, lambda seen: seen.plain()):
        assert torch.equal(model(ids, use_cache=False).logits, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gate_sees_every_evictable_layer_and_its_inputs(family):
    model, ids, found = frozen(family), prompt(9), []

    def attend(seen: Seen) -> Tensor:
        found.append(seen)
        return seen.plain()

    with capture(model, {"hidden", "block_input", "queries", "keys", "values"}) as taken:
        model(ids, use_cache=False)
        with soft_attention(model, attend):
            model(ids, use_cache=False)
    assert [seen.layer for seen in found] == list(range(len(evictable_layers(model))))
    for seen, index in zip(found, evictable_layers(model), strict=True):
        for name in ("hidden", "block_input"):
            assert torch.equal(getattr(seen, name), getattr(taken, name)[index])


def test_queries_keys_and_values_are_those_that_attention_is_of():
    model, ids, found = frozen("qwen3"), prompt(9), []

    def attend(seen: Seen) -> Tensor:
        found.append(seen)
        return seen.plain()

    with capture(model, {"queries", "keys", "values"}) as taken:
        model(ids, use_cache=False)
    with soft_attention(model, attend):
        model(ids, use_cache=False)
    for seen in found:
        for name in ("queries", "keys", "values"):
            assert torch.equal(getattr(seen, name), getattr(taken, name)[seen.layer])


def random_seen(B: int = 2, H: int = 2, G: int = 3, T: int = 17, D: int = 4) -> Seen:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, T, D, generator=g) for heads in (H * G, H, H))
    return Seen(0, torch.empty(0), torch.empty(0), q, k, v, 0.4, lambda: torch.empty(0))


def plainly(seen: Seen, bias: Tensor) -> Tensor:
    """[B, T, Q, D] in float64: key i of row t has its logit raised by (t - i) bias_i."""
    q, k, v = (x.double() for x in (seen.queries, seen.keys, seen.values))
    (B, Q, T, D), H = q.shape, k.shape[1]
    out = q.new_zeros(B, T, Q, D)
    for b in range(B):
        for head in range(Q):
            h = head // (Q // H)
            for t in range(T):
                logits = torch.stack([q[b, head, t] @ k[b, h, i] * seen.scale + (t - i) * bias[b, h, i].double() for i in range(t + 1)])
                out[b, t, head] = logits.softmax(-1) @ v[b, h, : t + 1]
    return out


@pytest.mark.parametrize("rows", [4, 128])
def test_gated_attention_and_its_gradient_are_the_plain_formulas(rows, monkeypatch):
    monkeypatch.setattr(soft, "ROWS", rows)
    seen = random_seen()
    bias, g = torch.randn(2, 2, 17, requires_grad=True), torch.randn(2, 17, 6, 4)
    got = gated_attention(seen, lambda logits, age, bias: logits + age.clamp(min=0) * per_row(bias), bias)
    want = plainly(seen, bias)
    assert torch.allclose(got.double(), want, atol=1e-5)
    (found,) = torch.autograd.grad((got * g).sum(), bias)
    (wanted,) = torch.autograd.grad((want * g).sum(), bias)
    assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4)


def test_later_keys_are_never_seen_whatever_a_gate_makes_of_their_logits():
    seen, bias = random_seen(), torch.zeros(2, 2, 17)
    bias[..., 10:] = 1e6
    got = gated_attention(seen, lambda logits, age, bias: logits + per_row(bias), bias)
    assert torch.allclose(got[:, :10].double(), plainly(seen, torch.zeros(2, 2, 17))[:, :10], atol=1e-5)


def test_gradients_flow_through_all_later_layers():
    model, ids = frozen("llama"), prompt(12)
    rate = torch.zeros(3, requires_grad=True)

    def attend(seen: Seen) -> Tensor:
        per_key = rate[seen.layer] * seen.hidden.mean(-1)[:, None].expand(-1, 2, -1)
        return gated_attention(seen, lambda logits, age, x: logits + per_row(x), per_key)

    with soft_attention(model, attend):
        model(ids, use_cache=False).logits.square().sum().backward()
    assert rate.grad.all() and not any(p.grad is not None for p in model.parameters())


def test_half_precision_stays_the_models(monkeypatch):
    model, ids = frozen("llama", dtype=torch.bfloat16), prompt(12)
    want = model(ids, use_cache=False).logits
    with soft_attention(model, lambda seen: gated_attention(seen, unchanged).float()):
        got = model(ids, use_cache=False).logits
    assert got.dtype == torch.bfloat16 and torch.allclose(got.float(), want.float(), atol=0.1)


def test_the_model_is_its_own_after_an_exception():
    model, ids = frozen("llama"), prompt(9)
    before, want = model.config._attn_implementation, model(ids).logits

    def fails(seen: Seen) -> Tensor:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), soft_attention(model, fails):
        model(ids, use_cache=False)
    assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(ids).logits, want)


def test_padding_and_what_lies_in_a_cache_are_refused():
    model, ids = frozen("llama"), prompt(9)
    cache = model(ids, use_cache=True).cache
    with soft_attention(model, lambda seen: seen.plain()):
        with pytest.raises(ValueError, match="without padding"):
            model(ids, attention_mask=torch.tensor([[0] + [1] * 8]), use_cache=False)
        with pytest.raises(ValueError, match="4 tokens came after 9 in a cache"):
            model(ids[:, :4], cache=cache)
        model(ids, attention_mask=torch.ones_like(ids), use_cache=False)


def test_one_model_in_a_block_leaves_another_alone():
    one, two, ids = frozen("llama"), frozen("qwen3"), prompt(9)
    want = two(ids).logits
    with soft_attention(one, partial(gated_attention, change=unchanged)):
        assert torch.equal(two(ids).logits, want)
        with soft_attention(two, lambda seen: 2 * seen.plain()):
            assert torch.allclose(one(ids, use_cache=False).logits, frozen("llama")(ids).logits, atol=1e-5)
            assert not torch.allclose(two(ids, use_cache=False).logits, want)
