"""BoolQ (arXiv:1905.10044): yes or no about a paragraph, which is compressed without the question; from a hub id, or boolq.jsonl.

Differs: the model answers in words of its own, judged by the first; papers that go through lm-eval compare the likelihood of yes and no.
The words around paragraph and question are ours.  A paragraph is of about 140 tokens, whatever num_tokens.
"""

from __future__ import annotations

from learnkv.prompts import Prompt, Question
from learnkv.tasks.hub import Row, Table, in_order
from learnkv.tasks.metrics import first_word
from learnkv.tasks.task import SPLIT, Task


def prompt_of(row: Row) -> Prompt:
    right = row.columns["answer"]
    if not isinstance(right, bool):
        raise ValueError(f"{row.where} has the answer {right!r}; give true or false")
    answer = "yes" if right else "no"
    question = Question(f"{YES_OR_NO} {row.text('question').strip()}?", "The answer is:", f" {answer}", None, (answer,))
    return Prompt("boolq", SPLIT, f"{READ}{row.text('passage').strip()}\n\n", (question,))


READ = "Read the following paragraph. A question about it comes at the end.\n\n"
YES_OR_NO = "Answer this question about the paragraph with yes or no:"
HUB_ID = "google/boolq"
FROM = in_order(Table("BoolQ", "boolq", ("question", "passage", "answer"), split="validation"), prompt_of)
BOOLQ = Task("boolq", FROM(HUB_ID), first_word, 8, benchmark="BoolQ", paper="1905.10044", count=3270, read=FROM)
