"""Tasks: prompts that fit the model at hand with their generation, the same on every call, judged by what their benchmark says."""

import dataclasses

import pytest

from learnkv.prompts import Prompt, Question, encode
from learnkv.tasks import TASKS, named
from learnkv.tasks.metrics import string_match_all
from learnkv.tasks.needle import DEPTHS
from learnkv.tasks.passages import FEWEST, TURNS
from learnkv.tasks.task import SPLIT, Size, Task, largest, prompt_tokens
from tests.task_parts import CHAT, package, word_tokenizer  # noqa: F401

pytestmark = pytest.mark.usefixtures("package")
NUM_TOKENS = 1200
MADE_HERE = [name for name, task in TASKS.items() if not task.read]  # others come as rows, see test_hub.py and what it names
JUDGED = [name for name in MADE_HERE if TASKS[name].metric]
DRAWN = [name for name in MADE_HERE if name != "gsm8k"]  # that comes in an order of its own
SHORT = ("multi_turn_synth", "gsm8k")  # an article may end, and a problem is of a few sentences
TOKENIZERS = {"plain": word_tokenizer(), "chat": word_tokenizer(CHAT)}


def made(name, tokenizer="plain", num_tokens=NUM_TOKENS, count=4, seed=42):
    return TASKS[name].prompts(TOKENIZERS[tokenizer], num_tokens, count, seed)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", MADE_HERE)
def test_prompt_and_generation_fit_the_length_and_come_near_it(name, tokenizer):
    task = TASKS[name]
    for num_tokens in (900, NUM_TOKENS, 1700):
        for prompt in made(name, tokenizer, num_tokens):
            encoded = [encode(TOKENIZERS[tokenizer], prompt, question) for question in prompt.questions]
            tokens = max(len(e.context) + len(e.question) for e in encoded) + task.max_new_tokens
            assert num_tokens / 3 < tokens <= num_tokens or (name in SHORT and tokens <= num_tokens)


@pytest.mark.parametrize("name", MADE_HERE)
def test_prompts_are_equal_on_every_call_and_a_longer_run_begins_with_the_shorter_ones(name):
    short, long = made(name, count=3), made(name, count=5)
    assert short == long[:3] and len({p.id for p in long}) == 5


@pytest.mark.parametrize("name", DRAWN)
def test_another_seed_gives_other_prompts(name):
    assert not {p.id for p in made(name)} & {p.id for p in made(name, seed=1)}


@pytest.mark.parametrize("name", JUDGED)
def test_the_references_are_worth_everything_and_another_answer_nothing(name):
    for prompt in made(name):
        assert prompt.kind.startswith(name) and prompt.split == SPLIT and prompt.chat == TASKS[name].chat
        for question in prompt.questions:
            assert TASKS[name].score(question.answer, question) == 1
            assert TASKS[name].score("☃", question) == 0


@pytest.mark.parametrize("name", MADE_HERE)
def test_the_span_of_an_answer_holds_it(name):
    spans = [(p.context[slice(*q.span)], q) for p in made(name) for q in p.questions if q.span]
    assert all(text == q.answer.strip() for text, q in spans)
    assert len(spans) == 4 or name not in ("needle", "niah_single_1", "niah_single_2", "niah_single_3")


@pytest.mark.parametrize("name", MADE_HERE)
def test_a_length_that_holds_no_haystack_is_refused_with_it(name):
    with pytest.raises(ValueError, match=f"task {name} can't be made of num_tokens=40, .* of them generated; give more"):
        made(name, num_tokens=40)


def test_more_prompts_than_a_task_has_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"task qa_1 has 60 prompts of num_tokens=1200, not count=61; ask for fewer"):
        made("qa_1", count=61)


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown task 'niah_singel_1'; nearest: niah_single_1"):
        named("niah_singel_1")


def test_an_answer_is_cleaned_before_it_is_judged():
    task = Task("one", lambda size, seed: iter(()), lambda said, _: float(said == "a b"), 1, clean=lambda said: said.replace("_", " "))
    assert task.score("a_b", Question("", "", "")) == 1


def test_without_references_the_answer_is_the_reference():
    task = Task("one", lambda size, seed: iter(()), string_match_all, 1)
    assert task.score("it is 7", Question("", "", " 7")) == 1


def test_the_room_leaves_out_the_generation_and_the_template():
    plain, chat = (Size(tokenizer, 500, 50, True).room for tokenizer in TOKENIZERS.values())
    assert plain == 450 and 420 < chat < 450
    assert Size(TOKENIZERS["chat"], 500, 50, False).room == 450


def test_a_prompt_of_several_questions_is_as_long_as_its_longest():
    asked = tuple(Question(f"{'why ' * n}?", "a b", "") for n in (3, 9, 5))
    prompt = Prompt("x", SPLIT, "one two three\n", asked)
    alone = [prompt_tokens(TOKENIZERS["chat"], dataclasses.replace(prompt, questions=(question,))) for question in asked]
    assert prompt_tokens(TOKENIZERS["chat"], prompt) == max(alone) == alone[1]


@pytest.mark.parametrize("room", [0, 1, 7, 20, 21, 30])
def test_the_largest_prompt_that_fits_is_found(room):
    size = Size(TOKENIZERS["plain"], room, 0, True)
    assert largest(lambda n: Prompt("x", SPLIT, "word " * n, (Question("", "", ""),)), size, 21) == min(room, 21)


# ---- the tasks of our own


def test_needles_lie_at_every_depth_in_turn():
    prompts = made("needle", count=2 * len(DEPTHS))
    for prompt, depth in zip(prompts, DEPTHS * 2, strict=True):
        assert prompt.kind == f"needle_{depth:03d}"
        assert prompt.questions[0].span[0] / len(prompt.context) == pytest.approx(depth / 100, abs=0.09)


def test_a_needle_task_fills_the_length_to_the_last_sentence():
    assert all(prompt_tokens(TOKENIZERS["plain"], p) + 32 > NUM_TOKENS - 10 for p in made("needle"))


def test_several_questions_are_asked_of_one_article():
    for prompt in made("multi_turn_synth"):
        assert len({q.text for q in prompt.questions}) == len(prompt.questions) == TURNS
        assert all(q.references[0] in prompt.context for q in prompt.questions)


def test_the_paragraph_to_find_holds_the_answer():
    for prompt in made("passage_retrieval_synth"):
        (question,) = prompt.questions
        right = prompt.context.partition(f"{question.references[0]}: ")[2].partition("\n\n")[0]
        assert question.text.split()[-2] in right  # the word that the question of the small package asks about


def test_the_number_to_count_is_that_of_different_paragraphs():
    for prompt in made("passage_count_synth", count=8):
        paragraphs = [text.partition(": ")[2] for text in prompt.context.split("\n\n") if text.startswith("Paragraph")]
        assert len(paragraphs) >= FEWEST and str(len(set(paragraphs))) == prompt.questions[0].answer.strip()


def test_yes_and_no_are_both_asked_for_and_what_tells_is_there():
    prompts = made("yes_no_synth", count=20)
    assert {q.answer for p in prompts for q in p.questions} == {" yes", " no"}
    assert all(p.context.count(f" {p.questions[0].text.split()[-1].strip('?')}\n") >= 2 for p in prompts)


def test_no_stand_in_carries_the_name_of_a_benchmark():
    stand_ins = [name for name in TASKS if name.endswith("_synth")]
    assert stand_ins and not any(
        word in name for name in stand_ins for word in ("boolq", "squad", "hotpot", "longbench", "ruler", "scbench")
    )
    assert {name for name, task in TASKS.items() if task.benchmark} & set(stand_ins) == set()
