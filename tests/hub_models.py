"""Folders with the configuration of the hub's models that paper recipes name, weights and tokenizer left out."""

from __future__ import annotations

from pathlib import Path

from transformers import Gemma3Config, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config


def qwen2(**changes: object) -> Qwen2Config:
    own = dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28)
    return Qwen2Config(**own | dict(num_key_value_heads=4, tie_word_embeddings=False) | changes)


def qwen3(layers: int, hidden: int, width: int, heads: int) -> Qwen3Config:
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=width, num_attention_heads=heads)
    own = dict(vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False)
    return Qwen3Config(**sizes | own)


def llama(layers: int, hidden: int, width: int, positions: int, *, vocabulary: int = 128256, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=width,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
    )


def gemma3() -> Gemma3Config:
    text = dict(vocab_size=262208, hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16)
    return Gemma3Config(text_config=text | dict(num_key_value_heads=8, head_dim=256, max_position_embeddings=131072))


CONFIGS: dict[str, PreTrainedConfig] = {
    "Qwen/Qwen2.5-7B-Instruct": qwen2(max_position_embeddings=32768),
    "Qwen/Qwen2.5-7B-Instruct-1M": qwen2(max_position_embeddings=1010000),
    "Qwen/Qwen3-8B": qwen3(36, 4096, 12288, 32),
    "Qwen/Qwen3-14B": qwen3(40, 5120, 17408, 40),
    "meta-llama/Meta-Llama-3-8B-Instruct": llama(32, 4096, 14336, 8192),
    "meta-llama/Llama-3.1-8B-Instruct": llama(32, 4096, 14336, 131072),
    "meta-llama/Llama-3.2-1B-Instruct": llama(16, 2048, 8192, 131072, tied=True),
    "google/gemma-3-12b-it": gemma3(),
}


def folder_of(hub_id: str, where: Path) -> Path:
    """`where`/<name> with the model's config.json."""
    folder = where / hub_id.rpartition("/")[2]
    CONFIGS[hub_id].save_pretrained(folder)
    return folder
