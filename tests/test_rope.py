"""RoPE comes off as the models put it on."""

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING as CONFIGS
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextModel
from transformers.models.llama.modeling_llama import LlamaModel, apply_rotary_pos_emb

from learnkv.models import describe
from learnkv.rope import rotary_frequencies, turn_back

SIZES = {"vocab_size": 17, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_frequencies_of_hybrid_models_are_those_of_full_attention():
    model = Gemma3TextModel(
        Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=8, layer_types=["sliding_attention", "full_attention"])
    )
    frequencies, scaling = rotary_frequencies(model)
    assert torch.equal(frequencies, model.rotary_emb.full_attention_inv_freq) and scaling == 1.0


def test_a_model_without_rope_has_no_frequencies():
    assert len(rotary_frequencies(nn.Linear(1, 1))[0]) == 0


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e4}, SCALED | {"original_max_position_embeddings": 64}])
def test_turning_back_undoes_the_models_own_rotation(rope):
    model = LlamaModel(LlamaConfig(**SIZES, rope_parameters=rope, max_position_embeddings=256))
    keys, positions = torch.randn(1, 2, 50, 16), torch.arange(150, 200)
    rotated = apply_rotary_pos_emb(keys, keys, *model.rotary_emb(keys, positions[None]))[1]
    angle = positions[:, None] * rotary_frequencies(model)[0]
    assert (rotated - keys).abs().max() > 0.5
    assert torch.allclose(turn_back(rotated, angle.cos(), angle.sin()), keys, atol=1e-5)


def tiny(kind):
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = CONFIGS[kind](**SIZES | ids | {"num_key_value_heads": 1, "num_hidden_layers": 6})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "phi"])
def test_models_whose_rope_comes_off_are_described_with_their_frequencies(kind):
    model = tiny(kind)
    assert describe(model).frequencies == tuple(rotary_frequencies(model)[0].tolist())
    assert describe(model.bfloat16()).frequencies


@pytest.mark.parametrize("kind", ["cohere", "smollm3"])
def test_models_whose_rope_does_not_come_off_are_described_without(kind):
    """Cohere rotates interleaved pairs, SmolLM3 leaves every fourth layer without RoPE."""
    assert describe(tiny(kind)).frequencies == ()


def test_dimensions_that_do_not_rotate_stay():
    x, angle = torch.randn(3, 8), torch.randn(3, 3)
    assert torch.equal(turn_back(x, angle.cos(), angle.sin())[:, 6:], x[:, 6:])
