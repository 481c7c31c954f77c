"""What the tests of traces share: a tiny random model, a byte tokenizer, prompts of our own, a recording in a process of its own."""

import os
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from learnkv.prompts import Prompt, Question
from learnkv.traces.record import RecordSettings, record_traces


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def tiny_model(
    *, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, layers: int = 2, positions: int = 512, seed: int = 0
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=8 * heads,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        initializer_range=0.3,  # attention far from flat
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def own_prompts(count: int, num_chars: int = 60) -> list[Prompt]:
    """Prompts of one or two questions, every third of them held out."""
    made = []
    for i in range(count):
        context = f"{i} apples lie in box {7 * i}. " + "abc defg " * (num_chars // 9)
        asked = (Question("How many?", " There are", f" {i}"), Question("Where?", " In box", f" {7 * i}"))
        made.append(Prompt("boxes", "heldout" if i % 3 == 2 else "train", context, asked[: 1 + i % 2]))
    return made


def record_big_enough(folder: str | Path) -> None:
    """Ten prompts of half a MiB each, so that shards of one MiB fill up."""
    torch.set_num_threads(1)
    model = tiny_model(head_dim=64, layers=4)
    record_traces(model, byte_tokenizer(), own_prompts(10, num_chars=200), folder, RecordSettings(shard_mib=1))


def record_as(rank: int, world: int, meeting: str, folder: str) -> None:
    """One process of several that share a recording."""
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    record_big_enough(folder)
    distributed.destroy_process_group()


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file under `folder` by name."""
    return {os.path.relpath(path, folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
