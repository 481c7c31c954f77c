"""LongBench: rows of a folder become prompts with the benchmark's own rules; those that are too long lose their middle."""

import json

import pytest

from learnkv.prompts import encode
from learnkv.tasks import TASKS
from learnkv.tasks.longbench import RULES, longbench
from learnkv.tasks.task import prompt_tokens
from tests.recording import byte_tokenizer
from tests.task_parts import CHAT

ROW = {"context": "Read on. Ann has 3 cats.\n\n", "question": "Question: How many?\n", "answer_prefix": "Answer:"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two rows of each task."""
    folder = tmp_path_factory.mktemp("longbench")
    for name in RULES:
        answers = ["Paragraph 3", "Paragraph 4"] if name == "passage_retrieval_en" else ["3", "three"]
        rows = [{**ROW, "context": f"{i} {ROW['context']}", "answers": answers, "all_classes": ["13", "3"]} for i in range(2)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def task(folder, name):
    return next(t for t in longbench(str(folder)) if t.name == f"longbench_{name}")


def tokenizer_of(template=None):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def text_of(tokenizer, prompt):
    encoded = encode(tokenizer, prompt, prompt.questions[0])
    return tokenizer.decode([*encoded.context, *encoded.question])


@pytest.mark.parametrize("name", RULES)
def test_every_task_reads_its_rows_in_order_and_gives_the_answer_its_due(folder, name):
    first, second = task(folder, name).prompts(tokenizer_of(), 1000, 2, 0)
    assert (first.context[0], second.context[0]) == ("0", "1") and first.kind == f"longbench_{name}"
    question = first.questions[0]
    assert task(folder, name).score(question.answer.strip(), question) == pytest.approx(1)
    assert task(folder, name).score(".", question) == 0


def test_few_shot_and_code_tasks_go_without_the_chat_template(folder):
    without = {
        name
        for name in RULES
        if "<|user|>" not in text_of(tokenizer_of(CHAT), task(folder, name).prompts(tokenizer_of(CHAT), 1000, 1, 0)[0])
    }
    assert without == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}


def test_without_a_template_the_text_is_the_benchmarks(folder):
    (prompt,) = task(folder, "trec").prompts(tokenizer_of(), 1000, 1, 0)
    assert text_of(tokenizer_of(), prompt) == "0 " + ROW["context"] + ROW["question"] + ROW["answer_prefix"]


def test_only_the_first_line_of_a_few_shot_answer_counts(folder):
    for name, want in (("trec", 1), ("qasper", 0.5)):
        (prompt,) = task(folder, name).prompts(tokenizer_of(), 1000, 1, 0)
        assert task(folder, name).score("\n3\n13 more words", prompt.questions[0]) == (want if name == "trec" else pytest.approx(0.4))


def test_the_best_of_several_answers_counts(folder):
    (prompt,) = task(folder, "hotpotqa").prompts(tokenizer_of(), 1000, 1, 0)
    assert task(folder, "hotpotqa").score("Three", prompt.questions[0]) == 1


@pytest.mark.parametrize("template", [None, CHAT], ids=["plain", "chat"])
@pytest.mark.parametrize("num_tokens", [200, 201, 260])
def test_a_long_prompt_loses_the_middle_of_its_context_and_fills_the_length(tmp_path, template, num_tokens):
    context = "".join(f"{i} " for i in range(400))
    (tmp_path / "qasper.jsonl").write_text(json.dumps({**ROW, "context": context, "answers": ["3"], "all_classes": None}))
    one = task(tmp_path, "qasper")
    (prompt,) = one.prompts(tokenizer_of(template), num_tokens, 1, 0)
    assert prompt_tokens(tokenizer_of(template), prompt) + one.max_new_tokens == num_tokens
    half = len(prompt.context) // 2
    assert context.startswith(prompt.context[:half]) and context.endswith(prompt.context[half + 1 :])


def test_a_question_that_is_too_long_by_itself_is_refused(folder):
    with pytest.raises(ValueError, match="a question of longbench_lcc alone is longer than num_tokens=90"):
        task(folder, "lcc").prompts(tokenizer_of(), 90, 1, 0)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"context": "x"}, "qasper, row 0 has no question; a row needs context"),
        ({**ROW, "answers": [], "all_classes": []}, "row 0 has no answers"),
    ],
)
def test_a_row_that_lacks_something_is_named(tmp_path, row, said):
    (tmp_path / "qasper.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=said):
        task(tmp_path, "qasper").prompts(tokenizer_of(), 500, 1, 0)


def test_a_folder_without_the_task_says_what_to_give(tmp_path):
    with pytest.raises(ValueError, match=r"LongBench's qasper can't be read from .*; give a folder with qasper.jsonl, or run with network"):
        task(tmp_path, "qasper").prompts(tokenizer_of(), 500, 1, 0)


def test_the_registry_holds_all_sixteen_from_the_hub():
    assert len([name for name in TASKS if name.startswith("longbench_")]) == 16
