"""Generate after evicting: the context is compressed before the question is known, then the model answers greedily.

python -m learnkv.generate compare=true                                    a needle prompt of ours, full cache beside the compressed one
python -m learnkv.generate method=snapkv budget=256 file=notes.txt question="Who pays?"
python -m learnkv.generate gate=checkpoints/runs/kvp budget=0.1 file=-       your gate; the context from standard input
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from learnkv import config
from learnkv.budgets import resolve
from learnkv.checkpoint import load_gate
from learnkv.evaluation.contenders import contenders_of, entries_of
from learnkv.evaluation.judge import greedy
from learnkv.evaluation.rows import budget_of
from learnkv.geometry import max_positions
from learnkv.models import DTYPES, PreTrainedModel, PreTrainedTokenizerBase, load_model
from learnkv.policy import Policy
from learnkv.prompts import Prompt, Question, encode, make
from learnkv.prompts.make import read_pipe, read_text, refuse_half_characters
from learnkv.prompts.prompt import Tokenizer
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache, prefill_many


@dataclass(frozen=True)
class GenerateCommand:
    """What `python -m learnkv.generate` reads."""

    recipe: str = ""  # a .yaml file with these keys, or none
    model: str = "smollm2-135m"  # bundled name, hub id or folder
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of model and cache
    method: str = "kvp+adaptive"  # as in evaluate.methods: snapkv, "snapkv(kernel_size=5)+adaptive", kvp:checkpoints/runs/kvp
    gate: str = ""  # folder of a gate, instead of `method`
    budget: float = 0.2  # below 1 the fraction of the context that stays, else tokens per KV head
    num_sinks: int = 4  # first tokens that always stay
    num_recent: int = 16  # last tokens of the context that always stay
    prompt: str | None = None  # the context; without it and `file` a needle prompt of ours
    file: str | None = None  # a text file with the context, - for standard input
    question: str = ""  # asked after the context was compressed
    max_new_tokens: int = 64  # tokens
    compare: bool = False  # answer with the full cache too

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} asks for nothing; give 1 or more")
        if self.prompt is not None and self.file is not None:
            raise ValueError(f"prompt and file={self.file} both hold a context; give one of them")
        if self.question and self.demonstrates:
            raise ValueError("question=... needs a context to ask about; give prompt=... or file=...")

    @property
    def demonstrates(self) -> bool:
        """Whether no context was given."""
        return self.prompt is None and self.file is None


def run(command: GenerateCommand) -> None:
    budget_of(command.budget)  # a mistake in these should not wait for the model
    if not command.gate:
        entries_of([command.method])
    own = None if command.demonstrates else own_prompt(command)
    model, tokenizer = load_model(command.model, DTYPES[command.dtype])
    policy = policy_of(command, model, tokenizer)
    prompt = own or make(["codes"], split="heldout", count=1, num_tokens=700, tokenizer=tokenizer)[0]
    context, question = tokens_of(prompt, command, model, tokenizer)
    announce(command, prompt.questions[0], context, question)
    with attach(model):
        cache, full = prefill_many(model, context[None], [policy, None])
        report(command, policy, context, cache, full)
        for name, held in {"full cache": full, "compressed": cache}.items():
            if command.compare or held is cache:
                start = time.perf_counter()
                (new,) = greedy(model, held, torch.cat([context, question])[None], command.max_new_tokens)
                pace = pace_of(time.perf_counter() - start, len(new))
                print(f"\n{name}: {len(new)} tokens{pace}\n{text_of(tokenizer, new)}", flush=True)
    named = f"gate={command.gate}" if command.gate else f"method={shlex.quote(command.method)}"
    print(f"\nnext: python -m learnkv.evaluate {named} evaluate.count=20")


def pace_of(seconds: float, num_tokens: int) -> str:
    """The time of a token, where there are enough: of few, most of it is the question's."""
    return f", {1000 * seconds / num_tokens:.0f} ms per token" if num_tokens >= FEWEST_TIMED else ""


FEWEST_TIMED = 5  # tokens


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def announce(command: GenerateCommand, asked: Question, context: Tensor, question: Tensor) -> None:
    print(f"model: {command.model}, {command.dtype}")
    print(f"tokens: {len(context)} of context, {len(question)} of the question after it")
    print(f"asked: {one_line(asked.text) or '(nothing: the context is continued)'}")
    if asked.answer:
        print(f"right answer: {one_line(asked.answer)}")


def one_line(text: str) -> str:
    return " ".join(text.split())


def own_prompt(command: GenerateCommand) -> Prompt:
    """The user's context and question; an empty context is refused."""
    text = command.prompt or ""
    if command.file is not None:
        text = read_pipe(sys.stdin, "standard input") if command.file == "-" else read_text(Path(command.file))
    refuse_half_characters(text, f"the context from {command.file or 'prompt'}")
    refuse_half_characters(command.question, "question")
    if not text.strip():
        raise ValueError(f"the context from {command.file or 'prompt'} is empty; there is nothing to compress")
    return Prompt("own", "heldout", text, (Question(f"\n\n{command.question}" if command.question else "", "", ""),))


def policy_of(command: GenerateCommand, model: PreTrainedModel, tokenizer: Tokenizer) -> Policy:
    """The policy that `method` or `gate` names, at the budget."""
    text = f"{load_gate(command.gate, model).METHOD}:{command.gate}" if command.gate else command.method
    contender = contenders_of([text], model, tokenizer, command.num_sinks, command.num_recent)[-1]
    if contender.scorer in ("full", "oracle"):
        raise ValueError(f"method {text} cannot generate: the oracle must know the answer, and compare=true shows the full cache")
    return contender.at(budget_of(command.budget))


def tokens_of(prompt: Prompt, command: GenerateCommand, model: PreTrainedModel, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """(context [n], question [m]) int64; refused where the answer would not fit the model's positions.

    A question without tokens borrows the context's last one: generation needs a token to start from.
    """
    encoded = encode(tokenizer, prompt, prompt.questions[0])
    total = len(encoded.context) + len(encoded.question) + command.max_new_tokens
    most = max_positions(model)
    if total > most:
        size = f"{total} tokens with the question and max_new_tokens={command.max_new_tokens}"
        raise ValueError(f"{size}, but {command.model} has {most} positions; shorten the context")
    if len(encoded.context) < 2:
        raise ValueError(f"the context is {len(encoded.context)} token(s); there is nothing to evict from fewer than 2")
    end = len(encoded.context) - (len(encoded.question) == 0)
    question = torch.cat([encoded.context[end:], encoded.question])
    return encoded.context[:end].to(model.device), question.long().to(model.device)


def report(command: GenerateCommand, policy: Policy, context: Tensor, cache: EvictionCache, full: EvictionCache) -> None:
    """What was kept of the context, in tokens and bytes."""
    wanted = int(resolve(policy.budget, torch.tensor([len(context)])))
    lengths = cache.lengths().float()  # [layers, 1, H]
    print(f"policy: {command.gate or command.method}, budget {command.budget:g} = {wanted} tokens per KV head")
    if wanted >= len(context):
        print(f"note: the budget of {wanted} holds all {len(context)} tokens of the context; nothing was evicted")
    spread = "" if lengths.min() == lengths.max() else f" ({lengths.min():.0f} to {lengths.max():.0f})"
    print(f"kept: {lengths.mean():.1f} of {len(context)} tokens per KV head{spread}")
    print(f"bytes held: {full.nbytes():,} before, {cache.nbytes():,} after ({cache.nbytes() / full.nbytes():.1%})", flush=True)


if __name__ == "__main__":
    raise SystemExit(config.main(run, GenerateCommand))
