"""Prompts: equal on every call, apart between the splits, sized in tokens, and cut where the context ends."""

import json

import pytest
import torch

from learnkv.prompts import Prompt, Question, encode, load_prompts, make
from learnkv.prompts.haystack import SPLITS, documents, split_of
from learnkv.prompts.kinds import HELDOUT_KINDS, IDENTIFIER_KINDS, KINDS, TRAIN_KINDS
from tests.recording import byte_tokenizer

CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def made(tokenizer, kinds, split="train", count=4, num_tokens=2500, seed=0):
    return make(kinds, split=split, count=count, num_tokens=num_tokens, tokenizer=tokenizer, seed=seed)


def answers_of(tokenizer, kind, split):
    return {q.answer for p in made(tokenizer, [kind], split, count=12) for q in p.questions}


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_equal_on_every_call_and_differ_by_seed(tokenizer, kind):
    once, again, other = made(tokenizer, [kind]), made(tokenizer, [kind]), made(tokenizer, [kind], seed=1)
    assert once == again and [p.id for p in once] == [p.id for p in again]
    assert not {p.id for p in once} & {p.id for p in other}


@pytest.mark.parametrize("split", SPLITS)
def test_a_longer_run_begins_with_the_shorter_ones_prompts(tokenizer, split):
    kinds = list(TRAIN_KINDS)
    assert made(tokenizer, kinds, split, count=20)[:15] == made(tokenizer, kinds, split, count=15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1500, 3000])
def test_a_context_is_as_long_as_asked_and_never_longer(tokenizer, kind, num_tokens):
    sizes = [len(encode(tokenizer, p, p.questions[0]).context) for p in made(tokenizer, [kind], num_tokens=num_tokens)]
    assert max(sizes) <= num_tokens and min(sizes) > 0.7 * num_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_span_of_an_answer_holds_the_answer(tokenizer, kind):
    for prompt in made(tokenizer, [kind]):
        for question in prompt.questions:
            encoded = encode(tokenizer, prompt, question)
            if question.span:
                assert prompt.context[slice(*question.span)] == question.answer.strip()
                assert tokenizer.decode(encoded.context[slice(*encoded.span)]).strip() == question.answer.strip()


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("many_keys", "roll_call", "shopping", "many_values", "prose", "code")])
def test_no_answer_of_one_split_is_asked_for_in_another(tokenizer, kind):
    train, dev, heldout = (answers_of(tokenizer, kind, split) for split in SPLITS)
    assert not train & dev and not train & heldout and not dev & heldout


@pytest.mark.parametrize("style", ["prose", "docstrings", "code"])
def test_every_document_lies_in_one_split(style):
    texts = {split: {"\n".join(pieces) for pieces in documents(style, split)} for split in SPLITS}
    assert all(texts.values())
    assert not texts["train"] & texts["dev"] and not texts["train"] & texts["heldout"] and not texts["dev"] & texts["heldout"]
    assert split_of("topic strings") == split_of("topic strings")


def test_kinds_trained_on_and_held_out_kinds_are_apart():
    assert not set(TRAIN_KINDS) & set(HELDOUT_KINDS) and not set(TRAIN_KINDS) & set(IDENTIFIER_KINDS)
    assert len(TRAIN_KINDS) >= 4 and len(HELDOUT_KINDS) >= 4


@pytest.mark.parametrize("template", [None, CHAT], ids=["plain", "chat"])
def test_context_question_and_answer_put_together_are_the_whole_text(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    prompt = Prompt("user", "user", "Ann has 3 cats.\n", (Question("How many cats?", "She has", " 3"),))
    encoded = encode(tokenizer, prompt, prompt.questions[0])
    text = tokenizer.decode(torch.cat([encoded.context, encoded.question, encoded.answer]))
    want = (
        "<|user|>Ann has 3 cats.\nHow many cats?<|end|><|assistant|>She has 3" if template else "Ann has 3 cats.\nHow many cats? She has 3"
    )
    assert text == want and tokenizer.decode(encoded.context).endswith("Ann has 3 cats.\n")


def test_a_template_that_changes_the_context_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT.replace("m.content", "m.content | upper")
    with pytest.raises(ValueError, match="changes the context 'abc"):
        encode(tokenizer, Prompt("user", "user", "abc", (Question("d", "", "e"),)), Question("d", "", "e"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kinds": ["coeds"]}, "'coeds'; nearest: codes"),
        ({"kinds": []}, "no kinds"),
        ({"split": "test"}, "'test' is unknown"),
        ({"num_tokens": 63}, "num_tokens=63"),
        ({"kinds": ["mixture"], "num_tokens": 100}, "num_tokens=100"),
    ],
)
def test_what_cannot_be_made_is_said_in_one_line(tokenizer, changes, said):
    with pytest.raises(ValueError, match=said) as error:
        made(tokenizer, **({"kinds": ["codes"]} | changes))
    assert "\n" not in str(error.value)


# ---- the user's own


def written(tmp_path, *records):
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def test_own_records_become_prompts_in_their_order(tmp_path):
    path = written(
        tmp_path,
        {"context": "Ann is 7.", "question": "How old?", "answer": "7"},
        {"context": "x\n", "question": "", "answer": " y", "answer_prefix": "z"},
    )
    first, second = load_prompts(path)
    assert first.context == "Ann is 7.\n\n" and first.questions == (Question("How old?", "", " 7", (7, 8)),)
    assert second.context == "x\n" and second.questions == (Question("", "z", " y"),)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([{"context": "a", "question": "b"}], "line 1 has no answer; every line needs"),
        ([{"context": "a", "answer": "b"}], "line 1 has no question"),
        ([{"context": "a", "question": "b", "answer": 5}], "line 1: 'answer' is 5, which is no text"),
        ([{"context": "a", "question": "b", "answer": "c"}, {"context": "", "question": "b", "answer": "c"}], "line 2 has no context"),
        ([{"context": "a", "question": "b", "answer": "  "}], "line 1 has no answer"),
        ([{"context": "a", "question": "b", "answer": "c"}, "", "{no json"], "line 3 is not JSON"),
        ([{"context": "a", "question": "b", "answer": "c", "answer_prefix": 5}], "line 1: 'answer_prefix' is 5"),
        ([{"context": "a \ud800", "question": "b", "answer": "c"}], "line 1: 'context' holds half a character"),
        ([{"context": "a", "question": "b\udfff", "answer": "c"}], "line 1: 'question' holds half a character"),
        (["1"], "line 1 holds a int"),
        ([""], "is empty"),
    ],
)
def test_a_record_that_lacks_something_is_named(tmp_path, records, said):
    with pytest.raises(ValueError, match=said):
        load_prompts(written(tmp_path, *records))


def test_texts_that_look_like_something_else_stay_texts_and_a_path_is_no_pattern(tmp_path):
    path = tmp_path / "own[1]*.jsonl"
    path.write_text(json.dumps({"context": "a\u2028b", "question": "When?", "answer": "2024-01-01"}, ensure_ascii=False))
    (prompt,) = load_prompts(path)
    assert prompt.questions[0].answer == " 2024-01-01" and prompt.context == "a\u2028b\n\n"


def test_a_file_that_is_not_there_is_named_with_what_to_do(tmp_path):
    for name in ("own.jsonl", "own.txt", "."):
        with pytest.raises(ValueError, match=r"can't be read \(.*\); give a text file, or .jsonl"):
            load_prompts(tmp_path / name)


def test_a_text_file_without_text_is_refused(tmp_path):
    (tmp_path / "own.txt").write_text(" " * 40)
    with pytest.raises(ValueError, match="needs a context"):
        load_prompts(tmp_path / "own.txt")


def test_a_text_file_is_continued_from_nine_tenths(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("0123456789" * 10)
    (prompt,) = load_prompts(path)
    assert prompt.context == "0123456789" * 9 and prompt.questions[0].answer == "0123456789" and not prompt.chat
