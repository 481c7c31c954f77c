"""W_O is that of the layers whose tokens are evicted."""

import pytest
import torch
from transformers import CONFIG_MAPPING as CONFIGS
from transformers import AutoModelForCausalLM

from learnkv.projection import output_projections, projected_norms
from learnkv.runtime.cache import EvictionCache

SIZES = {"vocab_size": 17, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
KINDS = {"llama": {}, "qwen3": {}, "phi3": {}, "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}}


def tiny(kind, **more):
    return AutoModelForCausalLM.from_config(CONFIGS[kind](**SIZES, **IDS, num_key_value_heads=2, **KINDS.get(kind, {}), **more))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_models_own_in_the_order_of_the_evictable_layers(kind):
    model = tiny(kind)
    weights = output_projections(model)
    layers = [2, 1, 0][: len(EvictionCache(None, model).states)][::-1]  # what slides comes first
    assert [w.data_ptr() for w in weights] == [model.model.layers[i].self_attn.o_proj.weight.data_ptr() for i in layers]
    assert not any(w.requires_grad for w in weights)


def test_a_model_whose_projection_has_another_name_is_refused():
    with pytest.raises(ValueError, match="PhiForCausalLM has no `o_proj`"):
        output_projections(tiny("phi"))


def test_gemma_has_fewer_of_them_than_layers():
    assert len(output_projections(tiny("gemma3_text"))) == 2


@pytest.mark.parametrize("group", [1, 4, 7])
def test_norms_are_those_of_each_value_through_each_query_heads_part_of_the_projection(group):
    generator = torch.Generator().manual_seed(group)
    values, weight = torch.randn(2, 3, 5, 8, generator=generator), torch.randn(32, 3 * group * 8, generator=generator)
    found = projected_norms(values, weight)
    for b, q, t in torch.cartesian_prod(torch.arange(2), torch.arange(3 * group), torch.arange(5)).tolist():
        want = (weight[:, 8 * q : 8 * q + 8].double() @ values[b, q // group, t].double()).norm()
        assert found[b, q, t].item() == pytest.approx(want.item(), rel=1e-5)
