"""Task: how the prompts of a benchmark are made for a model at hand, how an answer is judged, and what the benchmark lays down."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from learnkv.counts import check_count
from learnkv.prompts import Prompt, Question, encode
from learnkv.prompts.haystack import Split
from learnkv.prompts.prompt import Tokenizer
from learnkv.tasks.metrics import Metric

SPLIT: Split = "heldout"  # a benchmark is never trained on and chooses no setting


@dataclass(frozen=True)
class Size:
    """How long a prompt of a task may be, in tokens of the model at hand.

    tokenizer       the model's
    num_tokens      of prompt and generation together
    max_new_tokens  of them for the generation
    chat            whether prompts go through the model's chat template
    """

    tokenizer: Tokenizer
    num_tokens: int
    max_new_tokens: int
    chat: bool

    def of(self, text: str) -> int:
        """Tokens of a text alone."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def beginning(self, text: str) -> str:
        """As many of the text's words as the generation has tokens for, each with the blanks before it."""
        words = re.findall(r"\s*\S+", text)[: self.max_new_tokens]
        most = bisect_right(range(1, len(words) + 1), self.max_new_tokens, key=lambda n: self.of("".join(words[:n])))
        return "".join(words[:most])

    @property
    def room(self) -> int:
        """Tokens that a prompt's own text may have: all but the generation and what the chat template adds."""
        bare = Prompt("bare", SPLIT, "a\n", (Question("b?", "c:", ""),), self.chat)
        return self.num_tokens - self.max_new_tokens - (prompt_tokens(self.tokenizer, bare) - self.of("a\nb? c:"))

    def over(self, prompt: Prompt) -> int:
        """Tokens that the prompt, as the model gets it, and its generation have too many; below 0 where there is room left."""
        return prompt_tokens(self.tokenizer, prompt) + self.max_new_tokens - self.num_tokens

    def fits(self, prompt: Prompt) -> bool:
        return self.over(prompt) <= 0


def prompt_tokens(tokenizer: Tokenizer, prompt: Prompt) -> int:
    """Tokens before the generation: context and question, chat template included; of the longest question where there are several."""
    first, *others = prompt.questions
    encoded = encode(tokenizer, prompt, first)
    short = replace(prompt, context=prompt.context[:100])  # what follows the context is the same tokens after any
    asked = [len(encoded.question), *(len(encode(tokenizer, short, question).question) for question in others)]
    return len(encoded.context) + max(asked)


Make = Callable[[Size, int], Iterator[Prompt]]
"""(size, seed) -> prompts that fit, in an order of their own, so that a longer run begins with a shorter one's."""


@dataclass(frozen=True)
class Task:
    """One task of the comparison.

    name            as in TASKS; each prompt's kind begins with it
    make            its prompts
    metric          of one generated answer, 0 to 1; None where the answer is not generated but its own tokens are scored
    max_new_tokens  of the answer, as its benchmark lays down; where it is not generated, the most that are scored
    benchmark       whose task it is, "" for one of ours
    paper           arXiv id of the benchmark, "" for ours
    count           prompts that the benchmark asks for, 0 where any number will do
    chat            whether prompts go through the model's chat template
    clean           what is done to an answer before it is judged
    decode          whether tokens are evicted while the answer is generated too, and not after the context alone
    read            source -> make, where a hub has the prompts: source is an id or a folder with NAME.jsonl; None where they are made here
    """

    name: str
    make: Make
    metric: Metric | None
    max_new_tokens: int
    benchmark: str = ""
    paper: str = ""
    count: int = 0
    chat: bool = True
    clean: Callable[[str], str] = str.strip
    decode: bool = False
    read: Callable[[str], Make] | None = None

    @property
    def metric_name(self) -> str:
        """How the README and the tables call what this task is judged by."""
        return self.metric.__name__ if self.metric else "next_token"

    def prompts(self, tokenizer: Tokenizer, num_tokens: int, count: int, seed: int) -> list[Prompt]:
        """`count` prompts, each at most `num_tokens` tokens of `tokenizer` with its generation, and near it where the task allows.

        The i-th prompt depends on the task, the tokenizer, num_tokens and seed only.  Raises ValueError where so many, or any of that
        size, can't be made.
        """
        check_count("count", count)
        size = Size(tokenizer, num_tokens, self.max_new_tokens, self.chat)
        made = list(islice(self.make(size, seed), count)) if size.room > 0 else []
        if not made:
            raise ValueError(
                f"task {self.name} can't be made of num_tokens={num_tokens}, {self.max_new_tokens} of them generated; give more"
            )
        if len(made) < count:
            raise ValueError(f"task {self.name} has {len(made)} prompts of num_tokens={num_tokens}, not count={count}; ask for fewer")
        return [replace(prompt, task=self.name) for prompt in made]

    def score(self, prediction: str, question: Question) -> float:
        """What a generated answer is worth, 0 to 1."""
        assert self.metric, f"the answers of {self.name} are not generated"
        return self.metric(self.clean(prediction), question.references or (question.answer.strip(),))


def largest(build: Callable[[int], Prompt], size: Size, most: int) -> int:
    """The largest n up to `most` whose prompt fits, 0 where none does; what `build` makes grows with n."""
    return bisect_right(range(1, most + 1), False, key=lambda n: not size.fits(build(n)))
