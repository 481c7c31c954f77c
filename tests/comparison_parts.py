"""What the tests of comparisons share: rows as a comparison writes them, a tiny model, a tokenizer of single letters, prompts."""

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from learnkv.evaluation.rows import Row
from learnkv.prompts import Prompt, Question

LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?!:\n"

DEFAULTS = dict(
    prompt="p0",
    kind="codes",
    split="heldout",
    question=0,
    num_tokens=100,
    line="snapkv",
    method="snapkv",
    scorer="snapkv",
    allocator="uniform",
    run="",
    gate="",
    budget=0.1,
    budget_form="ratio",
    question_in_prefix=False,
    prefill="one-shot",
    num_sinks=4,
    num_recent=16,
    model="tiny",
    weights_hash="0" * 16,
    rope="0" * 8,
    dtype="float32",
    accuracy=1.0,
    nll=0.5,
    span_kept=0.75,
    kept_mean=10.0,
    kept_max=10,
    bytes_held=1000,
    prefill_seconds=0.5,
    extra_seconds=0.25,
)


def row(**changes) -> Row:
    return Row(**{**DEFAULTS, **changes})


def full_row(**changes) -> Row:
    whole = {"line": "full cache", "method": "full", "scorer": "full", "budget": 1.0, "kept_mean": 100.0, "extra_seconds": 0.0}
    return row(**{**whole, **changes})


def letter_tokenizer() -> PreTrainedTokenizerFast:
    letters = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=letters)


def tiny_model(max_tokens=256) -> LlamaForCausalLM:
    """3 layers, 4 query heads, 2 KV heads; weights large enough that attention has something to prefer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_tokens,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def short_prompt(i=0, questions=1) -> Prompt:
    """A context of about a hundred letters that holds one number, asked for once or twice."""
    context = f"Prose number {i} goes on for a while. The code of Anna is {71 + i}. More prose follows it and ends."
    begin = context.index(f"{71 + i}.")
    names, span = ("Anna", "Berta")[:questions], (begin, begin + 2)
    asked = tuple(Question(f" What is the code of {name}?", " It is", f" {71 + i}", span) for name in names)
    return Prompt("codes" if i % 2 else "people", "heldout", context, asked)
