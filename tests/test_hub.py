"""Benchmarks whose rows come from a hub or a folder: BoolQ, GovReport, OASST2 (LongBench and SCBench have files of their own)."""

import json

import pytest

from learnkv.prompts import encode
from learnkv.tasks import TASKS, named
from learnkv.tasks.task import prompt_tokens
from tests.recording import byte_tokenizer
from tests.task_parts import CHAT, word_tokenizer

FROM_A_HUB = [name for name, task in TASKS.items() if task.read]
ASKED_OF_A_HUB = {
    "boolq": ("google/boolq", None, "validation"),
    "govreport": ("ccdv/govreport-summarization", "document", "test"),
    "oasst2": ("OpenAssistant/oasst2", None, "validation"),
    "longbench_lcc": ("Xnhyacinth/LongBench", "lcc", "test"),
    "scbench_kv": ("microsoft/SCBench", "scbench_kv", "test"),
    "scbench_repoqa_and_kv_kv": ("microsoft/SCBench", "scbench_repoqa_and_kv", "test"),
}
BOOLQ = [
    {"question": "do cats bark", "passage": "Dogs bark, which cats don't.", "answer": False},
    {"question": "do dogs bark", "passage": "Dogs bark.", "answer": True, "title": "Dog"},
]
GOVREPORT = [{"report": f"{i} " + "The office spent much. " * 300, "summary": f"Office {i} spent much."} for i in range(3)]


def write(folder, name, rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder)


def made(name, source, num_tokens=2000, count=1, tokenizer=None, seed=0):
    tokenizer = tokenizer or (byte_tokenizer() if name == "govreport" else word_tokenizer())  # words can't be put together again
    return named(name, source).prompts(tokenizer, num_tokens, count, seed)


# ---- reading


@pytest.mark.parametrize("name", FROM_A_HUB)
def test_without_network_one_line_says_what_to_do(name, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach it on the Hub (LocalEntryNotFoundError)\nand more")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(ValueError) as failed:
        TASKS[name].prompts(word_tokenizer(), 2000, 1, 0)
    said = str(failed.value)
    assert "\n" not in said and said.endswith(".jsonl, or run with network") and "/" in said.partition("can't be read from ")[2]


@pytest.mark.parametrize("name", ASKED_OF_A_HUB)
def test_a_hub_is_asked_for_the_benchmarks_own_table_and_split(name, monkeypatch):
    asked = []

    def load(source, config, split):
        asked.append((source, config, split))
        return []

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(ValueError, match=f"task {name} can't be made"):
        TASKS[name].prompts(word_tokenizer(), 2000, 1, 0)
    assert asked == [ASKED_OF_A_HUB[name]]


@pytest.mark.parametrize("name", FROM_A_HUB)
def test_a_folder_without_the_rows_says_what_to_give(name, tmp_path):
    with pytest.raises(ValueError, match=r"can't be read from .*; give a folder with \w.*\.jsonl, or run with network"):
        made(name, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "rows", "said"),
    [
        ("boolq", [BOOLQ[0], {"question": "x", "passage": "y"}], "boolq, row 1 has no answer; a row needs question, passage, answer"),
        ("boolq", [{**BOOLQ[0], "answer": "no"}], "boolq, row 0 has the answer 'no'; give true or false"),
        ("boolq", [{**BOOLQ[0], "question": " "}], "boolq, row 0 has no text as its question; give some"),
        ("govreport", [GOVREPORT[0], {**GOVREPORT[1], "summary": None}], "govreport, row 1 has no text as its summary"),
        ("govreport", [{"summary": "x"}], "govreport, row 0 has no report; a row needs report, summary"),
        ("oasst2", [{"text": "x"}], "oasst2, row 0 has no message_id"),
    ],
)
def test_a_row_that_lacks_something_is_named(tmp_path, name, rows, said):
    with pytest.raises(ValueError, match=said):
        made(name, write(tmp_path, name, rows), count=len(rows))


@pytest.mark.parametrize("name", ["boolq", "govreport", "oasst2"])
def test_prompts_come_in_the_order_of_the_rows_whatever_the_seed(tmp_path, name):
    source = write(tmp_path, name, {"boolq": BOOLQ, "govreport": GOVREPORT, "oasst2": TREES}[name])
    long = made(name, source, 900, 2)
    assert made(name, source, 900, 1) == long[:1] and made(name, source, 900, 2, seed=7) == long


# ---- BoolQ and GovReport


def test_yes_or_no_is_asked_of_a_paragraph_that_does_not_hold_the_question(tmp_path):
    first, second = made("boolq", write(tmp_path, "boolq", BOOLQ), count=2)
    assert [p.questions[0].references for p in (first, second)] == [("no",), ("yes",)]
    assert "do cats bark?" in first.questions[0].text and "do cats bark" not in first.context
    for prompt, right, wrong in ((first, " No, they don't.", "Yes."), (second, "Yes", "no")):
        (question,) = prompt.questions
        assert [TASKS["boolq"].score(said, question) for said in (question.answer, right, wrong, "☃", "")] == [1, 1, 0, 0, 0]


def test_a_report_is_cut_to_the_length_and_summarised(tmp_path):
    for prompt in made("govreport", write(tmp_path, "govreport", GOVREPORT), 900, 3):
        assert prompt_tokens(byte_tokenizer(), prompt) + 512 == 900
        (question,) = prompt.questions
        assert TASKS["govreport"].score(question.answer, question) == pytest.approx(1)
        assert TASKS["govreport"].score("☃", question) == 0
        assert question.references[0] not in prompt.context


# ---- OASST2


def message(name, parent, text, rank=None, role=None, lang="en", deleted=False):
    depth = name.count(".")
    role = role or ("assistant" if depth % 2 else "prompter")
    columns = {"message_id": name, "parent_id": parent, "message_tree_id": name[0], "text": text, "role": role}
    return {**columns, "lang": lang, "rank": rank, "deleted": deleted}


TREES = [
    message("a", None, "Which is the sea?"),
    message("a.1", "a", "The worse one.", rank=1),
    message("a.2", "a", "The blue one.", rank=0),
    message("a.2.1", "a.2", "And the hill?"),
    message("a.2.1.1", "a.2.1", "A reply without a rank."),
    message("a.2.1.2", "a.2.1", "The green one, " + "which is far and wide " * 100, rank=2),
    message("a.2.1.2.1", "a.2.1.2", "A question without an answer."),
    message("b", None, "Welcher ist es?", lang="de"),
    message("b.1", "b", "Der.", lang="de"),
    message("c", None, "Nobody answers this."),
    message("d", None, "Who is there?"),
    message("d.1", "d", "A deleted answer.", rank=0, deleted=True),
    message("d.2", "d", "It is the wind. " * 30, rank=3),
    message("e", None, "What is long?" * 3000),
    message("e.1", "e", "This."),
    message("f", None, "What is last?"),
    message("f.1", "f", "This is."),
]


def test_the_best_ranked_paths_follow_each_other_and_the_last_answer_is_scored(tmp_path):
    (prompt,) = made("oasst2", write(tmp_path, "oasst2", TREES), 3000)
    (question,) = prompt.questions
    wide = "which is far and wide " * 100
    said = (
        "User: Which is the sea?\n\nAssistant: The blue one.\n\nUser: And the hill?\n\nAssistant: The green one, "
        + wide.strip()
        + "\n\nUser: Who is there?\n\nAssistant: "
        + ("It is the wind. " * 30).strip()
        + "\n\nUser: "
    )
    assert prompt.context == said
    assert (question.text, question.answer) == ("What is last?\n\nAssistant:", " This is.")
    assert TASKS["oasst2"].metric is None and not prompt.chat


def test_a_prompt_holds_as_many_paths_as_fit_and_the_next_goes_on(tmp_path):
    first, second = made("oasst2", write(tmp_path, "oasst2", TREES), 450, 2)
    assert first.questions[0].text.startswith("Who is there?") or "And the hill?" in first.questions[0].text
    assert first.questions[0].text != second.questions[0].text
    assert all(prompt_tokens(word_tokenizer(), p) + 256 <= 450 for p in (first, second))


def test_a_long_last_answer_is_scored_up_to_the_tokens_that_the_task_has(tmp_path):
    (prompt,) = made("oasst2", write(tmp_path, "oasst2", TREES[:7]), 3000)
    (question,) = prompt.questions
    assert len(word_tokenizer()(question.answer)["input_ids"]) == 256
    assert question.answer.startswith(" The green one, which is far")


def test_a_models_own_template_puts_the_turns(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    (prompt,) = made("oasst2", write(tmp_path, "oasst2", TREES[-2:]), 3000, tokenizer=tokenizer)
    e = encode(tokenizer, prompt, prompt.questions[0])
    said = tokenizer.decode([*e.context, *e.question, *e.answer])
    assert said == "<|user|>What is last?<|end|><|assistant|>This is."
    assert tokenizer.decode(e.context) == "<|user|>"


def test_a_question_that_stands_in_the_template_is_found_where_it_is_asked(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    rows = [message("a", None, "assistant"), message("a.1", "a", "Yes?")]
    (prompt,) = made("oasst2", write(tmp_path, "oasst2", rows), 3000, tokenizer=tokenizer)
    assert prompt.context == "<|user|>" and prompt.questions[0].text == "assistant<|end|><|assistant|>"


def test_a_role_that_is_none_of_a_chat_is_named(tmp_path):
    with pytest.raises(ValueError, match="oasst2, row 0 has the role 'system'; give one of prompter, assistant"):
        made("oasst2", write(tmp_path, "oasst2", [message("a", None, "x", role="system")]))
