"""What capture shows of a running model."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from learnkv.capture import capture
from learnkv.rope import rotary_frequencies, turn_back

SMALL = dict(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)
ALL = {"queries", "keys", "values", "hidden", "block_input", "queries_pre_rope"}


LLAMA, QWEN = (LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)


@pytest.fixture(params=[("sdpa", *LLAMA), ("eager", *LLAMA), ("sdpa", *QWEN)])
def model(request):
    attention, config, lm = request.param
    torch.manual_seed(0)
    return lm(config(**SMALL, attn_implementation=attention)).eval()


@torch.no_grad()
def test_capture_leaves_results_alone(model):
    ids = torch.randint(0, 97, (2, 11))
    want = model(ids).logits
    with capture(model, ALL):
        got = model(ids).logits
    assert torch.equal(got, want)
    assert torch.equal(model(ids).logits, want)


@torch.no_grad()
def test_captured_queries_keys_values_give_the_attention_output(model):
    ids = torch.randint(0, 97, (1, 11))
    outputs = []
    for block in model.model.layers:
        block.self_attn.o_proj.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
    with capture(model, ALL) as taken:
        model(ids)
    for layer, want in enumerate(outputs):
        q, k, v = taken.queries[layer], taken.keys[layer], taken.values[layer]
        got = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(got.transpose(1, 2).flatten(2), want)


@torch.no_grad()
def test_captured_hidden_is_the_normed_block_input(model):
    with capture(model, ALL) as taken:
        model(torch.randint(0, 97, (1, 11)))
    for layer, block in enumerate(model.model.layers):
        torch.testing.assert_close(block.input_layernorm(taken.block_input[layer]), taken.hidden[layer])


@torch.no_grad()
def test_captured_queries_before_rope_are_those_of_the_model_once_they_are_turned(model):
    with capture(model, ALL) as taken:
        model(torch.randint(0, 97, (2, 11)))
    angle = torch.arange(11)[:, None] * rotary_frequencies(model)[0]
    for layer, queries in taken.queries.items():
        torch.testing.assert_close(turn_back(queries, angle.cos(), angle.sin()), taken.queries_pre_rope[layer])


def test_a_model_whose_query_projection_is_unknown_is_refused_by_name(model):
    del model.model.layers[1].self_attn.q_proj
    with pytest.raises(ValueError, match="Attention projects queries in a way"), capture(model, {"queries_pre_rope"}):
        pass
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@torch.no_grad()
def test_a_later_forward_shows_its_own_tokens_only(model):
    ids = torch.randint(0, 97, (1, 11))
    with capture(model, ALL) as taken:
        model(ids)
        want = taken.keys[1][:, :, 8:], taken.queries[1][:, :, 8:]
        first = model(ids[:, :8], use_cache=True)
        model(ids[:, 8:], cache=first.cache)
    assert taken.keys[1].shape[2] == 3
    torch.testing.assert_close(taken.keys[1], want[0])
    torch.testing.assert_close(taken.queries[1], want[1])


def test_hooks_are_gone_after_an_exception(model):
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="stop"), capture(model, ALL):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == before
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_an_unknown_want_is_refused(model):
    with pytest.raises(ValueError, match="capture can't take"), capture(model, {"queris"}):
        pass
