"""SCBench: several questions on one context, its twelve sets and its metrics."""

import json

import pytest

from learnkv.tasks import TASKS, named, scbench_metrics
from learnkv.tasks.scbench import RULES
from learnkv.tasks.task import prompt_tokens
from tests.recording import byte_tokenizer

CODES = [f"def f{n}(a):\n    first = a\n    second = first + {n}\n    return second * second + first" for n in range(4)]
ONE_TURN = ("scbench_summary_with_needles_summary", "scbench_summary_with_needles_passkey", "scbench_repoqa_and_kv_kv")


def turn(question, answer, **others):
    return {"input": question, "answer": answer, **others}


OPTIONS = ["The sea", "A hill", "Nobody", "The wind"]
NEEDLES = [turn("Sum it up.", "All went home.", task="scbench_summary"), turn("Which passkey?", "71", task="scbench_passkey")]
ROWS = {
    "scbench_kv": {"context": '{"k1": "v1", "k2": "v2"}', "multi_turns": [turn("Key: k1", "v1"), turn("Key: k2", "v2")]},
    "scbench_prefix_suffix": {"context": "a1b a2b", "multi_turns": [turn("From a1 to b", "a1b"), turn("From a2 to b", "a2b")]},
    "scbench_vt": {"context": "VAR X = 1. VAR Y = X.", "multi_turns": [turn("Which are 1?", ["X", "Y"]), turn("Which is 2?", ["Z"])]},
    "scbench_repoqa": {
        "context": "\n\n".join(CODES[:2]),
        "multi_turns": [turn("Adds 0.", CODES[0], name="f0"), turn("Adds 1.", CODES[1], name="f1")],
        "repo": "one/two",
        "lang": "python",
    },
    "scbench_qa_eng": {"context": "The wind came.", "multi_turns": [turn("What came?", "The wind"), turn("When?", "once")]},
    "scbench_qa_chn": {"context": "风来了。", "multi_turns": [turn("什么来了？", "大风"), turn("何时？", "一次")]},  # noqa: RUF001
    "scbench_choice_eng": {
        "context": "The wind came.",
        "multi_turns": [turn("Who came?", "The wind", options=OPTIONS), turn("Who left?", "Nobody", options=OPTIONS)],
    },
    "scbench_many_shot": {"context": "is it? (A)", "multi_turns": [turn("is this?", "(A)"), turn("is that?", "(B)")]},
    "scbench_mf": {"context": [3, 17, 5], "multi_turns": [turn("The largest number is:", 17), turn("The mean is:", 8.33)]},
    "scbench_summary": {"context": "All went home.", "multi_turns": [turn("Sum it up.", "All\nleft."), turn("And that?", "They went.")]},
    "scbench_summary_with_needles": {"context": "All went home.", "multi_turns": NEEDLES},
    "scbench_repoqa_and_kv": {
        "context": "\n\n".join(CODES[2:]),
        "multi_turns": [
            turn("Adds 2.", CODES[2], name="f2", task="scbench_repoqa"),
            turn("Key: k1", "v1", task="scbench_kv"),
            turn("Adds 3.", CODES[3], name="f3", task="scbench_repoqa"),
        ],
        "repo": "one/three",
        "lang": "python",
    },
}


def write(folder, **changed):
    for name, row in {**ROWS, **changed}.items():
        rows = [row, {**row, "context": row["context"] * 2}]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("scbench"))


def made(name, folder, count=2, num_tokens=4000):
    return named(name, folder).prompts(byte_tokenizer(), num_tokens, count, 0)


@pytest.mark.parametrize("name", RULES)
def test_every_task_reads_its_rows_in_order_and_gives_the_answer_its_due(folder, name):
    first, second = made(name, folder)
    assert first.kind == name and first.context != second.context and first.chat
    assert len({q.text for q in first.questions}) == (1 if name in ONE_TURN else 2)
    for question in first.questions:
        assert named(name, folder).score(question.answer, question) == pytest.approx(1)
        assert named(name, folder).score("☃", question) == 0
        assert named(name, folder).score("", question) == 0
        assert question.text.strip() not in first.context


def test_the_registry_holds_the_twelve_sets_as_fourteen_tasks():
    assert [name for name in TASKS if name.startswith("scbench_")] == list(RULES)
    assert len({rules.table for rules in RULES.values()}) == 12 and len(RULES) == 14


def test_a_long_context_loses_its_middle_for_the_longest_question(tmp_path):
    row = {"context": "word " * 2000, "multi_turns": [turn("Key: k1", "v1"), turn("Key: " + "k" * 200, "v2")]}
    (prompt, *_) = made("scbench_kv", write(tmp_path, scbench_kv=row), num_tokens=1000)
    assert prompt_tokens(byte_tokenizer(), prompt) + 150 == 1000


def test_a_list_of_numbers_is_put_in_brackets(folder):
    (prompt, _) = made("scbench_mf", folder)
    assert prompt.context.endswith("[3, 17, 5]\n\n")


def test_options_follow_the_question_and_the_letter_or_the_text_is_right(folder):
    question = made("scbench_choice_eng", folder)[0].questions[0]
    assert "\nA. The sea\nB. A hill\nC. Nobody\nD. The wind\n" in question.text
    assert question.answer == " D" and question.references == ("The wind", "D")


def test_the_other_functions_of_the_repository_are_references_behind_the_right_one(folder):
    one, other = made("scbench_repoqa", folder)[0].questions
    assert one.references == tuple(CODES[:2]) and other.references == (CODES[1], CODES[0])
    task = TASKS["scbench_repoqa"]
    assert task.score(f"Here it is:\n```python\n{CODES[0]}\n```\nIt adds.", one) == 1
    assert task.score(f"```\n{CODES[1]}\n```", one) == 0


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("scbench_kv", {"multi_turns": []}, "scbench_kv, row 0 has no turns; give one or more"),
        ("scbench_kv", {"multi_turns": [turn("Key: k1", "")]}, "scbench_kv, row 0, turn 0 has no answer"),
        ("scbench_vt", {"multi_turns": [turn("Which?", [])]}, "row 0, turn 0 has no answer"),
        ("scbench_kv", {"multi_turns": [turn("Key: k1", "v1"), {"answer": "v2"}]}, "row 0, turn 1 has no text as its input"),
        (
            "scbench_choice_eng",
            {"multi_turns": [turn("Who?", "Me", options=OPTIONS)]},
            "row 0, turn 0 has the options .* and the answer 'Me'",
        ),
        ("scbench_choice_eng", {"multi_turns": [turn("Who?", "Me")]}, r"has the options \[\] and"),
        ("scbench_mf", {"multi_turns": [turn("The mean is:", "many")]}, "row 0, turn 0 has the answer 'many'; give a number"),
        ("scbench_summary_with_needles_passkey", {"multi_turns": NEEDLES[:1]}, "row 0 has no turns of task scbench_passkey; give one"),
    ],
)
def test_a_row_that_lacks_something_is_named(tmp_path, name, changed, said):
    table = RULES[name].table
    with pytest.raises(ValueError, match=said):
        made(name, write(tmp_path, **{table: {**ROWS[table], **changed}}))


@pytest.mark.parametrize("column", ["context", "multi_turns", "repo"])
def test_a_missing_column_is_named(tmp_path, column):
    row = {name: value for name, value in ROWS["scbench_repoqa"].items() if name != column}
    (tmp_path / "scbench_repoqa.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=f"scbench_repoqa, row 0 has no {column}; a row needs context, multi_turns, repo"):
        made("scbench_repoqa", str(tmp_path))


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "want"),
    [
        ("contained", 'It is "v1".', ["v1"], 1),
        ("contained", "V1", ["v1"], 0),
        ("first_integer", "It is 071, not 71", ["071"], 1),
        ("first_integer", "It is 7 and 71", ["71"], 0),
        ("first_integer", "", ["71"], 0),
        ("first_number", "17.9", ["17"], 1),
        ("first_number", "17.9", ["17.9"], 1),
        ("first_number", "8.33.", ["8.33"], 1),
        ("first_number", "-5", ["-5"], 0),  # as published: a sign is never read
        ("first_number", "1,234", ["1234"], 0),
        ("first_number", "none", ["0"], 0),
        ("choice", "D", ["The wind", "D"], 1),
        ("choice", "Don't know", ["The wind", "D"], 1),  # the first letter alone counts
        ("choice", "The wind", ["The wind", "D"], 1),
        ("choice", 'the answer is: "D."', ["The wind", "D"], 1),
        ("choice", "the answer is D", ["The wind", "D"], 1),
        ("choice", "the answer is C", ["The wind", "D"], 0),
        ("choice", "maybe (C), or D", ["The wind", "D"], 1),
        ("choice", "the wind", ["The wind", "D"], 0),
        ("choice", " ", ["The wind", "D"], 0),
        ("characters_f1", "大风。", ["大风"], 1),
        ("characters_f1", "是大风", ["大风"], 0.8),
        ("characters_f1", "Ａ，b！", ["ab"], 0.5),  # noqa: RUF001
        ("characters_f1", "", ["大风"], 0),
        ("rouge_lsum", "the cat sat", ["the cat sat"], 1),
        ("rouge_lsum", "c d\na b", ["a b\nc d"], 1),
        ("rouge_lsum", "a b c d", ["d c\nb a"], 0.5),
        ("rouge_lsum", "The-Cat!", ["the cat sat"], 0.8),
        ("rouge_lsum", "é", ["é"], 0),
        ("rouge_lsum", "", ["a"], 0),
        ("same_function", "a b c d", ["a b c d", "a b c e"], 1),
        ("same_function", "a b c e", ["a b c d", "a b c e"], 0),
        ("same_function", "", ["a b c d"], 0),
    ],
)
def test_a_metric_has_the_published_value(metric, prediction, references, want):
    assert vars(scbench_metrics)[metric](prediction, references) == pytest.approx(want)


@pytest.mark.parametrize(
    ("found", "wanted", "want"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", 1),
        ("the cat sat on the", "the cat sat on the mat", 0.8187307530779819),
        ("the cat", "the dog sat", 0.04096772609215166),
        ("a cat sat on", "a dog sat on it", 0.14498534696702547),
        ("x", "the cat", 0),
        ("", "the cat", 0),
    ],
)
def test_bleu_has_the_values_of_nltk(found, wanted, want):
    assert scbench_metrics.bleu(found.split(), wanted.split()) == pytest.approx(want)
