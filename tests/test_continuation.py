"""Texts that go on, prose and code: the parts are the tokens of the whole, and what is asked for can be known from what stands before."""

import re

import pytest

from learnkv.prompts import encode, haystack
from learnkv.tasks import TASKS, ruler_data
from learnkv.tasks.code_completion import MODULES, NEAR, SHORTEST, completable, names_of, parted, read
from learnkv.tasks.task import Size, prompt_tokens
from tests.task_parts import bpe_tokenizer, package, word_tokenizer  # noqa: F401

pytestmark = pytest.mark.usefixtures("package")
LINE_BREAKS_LAST = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # as tokenizers after GPT-2 have it


def parts(tokenizer, prompt):
    """Tokens of context, question and answer, and those of the whole text."""
    (question,) = prompt.questions
    e = encode(tokenizer, prompt, question)
    assert len(e.question) == 0
    return [*e.context.tolist(), *e.answer.tolist()], tokenizer(prompt.context + question.answer)["input_ids"]


# ---- perplexity


@pytest.fixture(scope="module")
def prose(package):  # noqa: F811
    return bpe_tokenizer(" ".join(ruler_data.essays()))


@pytest.mark.parametrize("num_tokens", [300, 1000])
def test_context_and_what_follows_are_the_tokens_of_the_text(prose, num_tokens):
    essays = " ".join(ruler_data.essays())
    for prompt in TASKS["perplexity"].prompts(prose, num_tokens, 5, 0):
        separate, whole = parts(prose, prompt)
        assert separate == whole
        assert prompt.context + prompt.questions[0].answer in essays and prompt.questions[0].answer.startswith(" ")


def test_context_and_what_is_scored_fill_the_length(prose):
    for prompt in TASKS["perplexity"].prompts(prose, 600, 5, 0):
        scored = len(prose(prompt.questions[0].answer)["input_ids"])
        assert 128 - 12 <= scored <= 128 and 600 - 12 <= prompt_tokens(prose, prompt) + 128 <= 600


def test_a_text_is_cut_before_the_word_that_does_not_fit():
    size = Size(word_tokenizer(), 100, 4, False)
    assert size.beginning(" a b c d e") == " a b c d"
    assert size.beginning("a b. c, d") == "a b."
    assert size.beginning("a  b\n\nc") == "a  b\n\nc"
    assert size.beginning("") == ""


# ---- code


@pytest.fixture(scope="module")
def code():
    return bpe_tokenizer("\n".join(read(MODULES[0]).lines))


@pytest.fixture(scope="module")
def code_of_others():
    return bpe_tokenizer("\n".join(read(MODULES[0]).lines), pattern=LINE_BREAKS_LAST)


@pytest.mark.parametrize("tokenizer", ["code", "code_of_others"])
def test_context_and_line_are_the_tokens_of_the_code(tokenizer, request):
    tokenizer = request.getfixturevalue(tokenizer)
    for prompt in TASKS["code_completion_synth"].prompts(tokenizer, 1500, 8, 0):
        separate, whole = parts(tokenizer, prompt)
        assert separate == whole


def test_code_is_parted_where_the_line_starts_unless_a_tokenizer_joins_what_is_there(code, code_of_others):
    before, line = "def f(self):\n    if self:", "        return self.names[0]"
    assert parted(code, before, line) == (before, f"\n{line}")
    assert parted(code, f"{before}\n\n", line) == (before, f"\n\n\n{line}")
    assert parted(code_of_others, before, line) == (f"{before}\n", line)
    assert parted(code, before, line.strip()) == (f"{before}\n", line.strip())


@pytest.mark.parametrize("num_tokens", [700, 2000])
def test_the_names_of_a_line_stand_before_it_but_not_all_just_before(num_tokens):
    tokenizer = word_tokenizer()
    for prompt in TASKS["code_completion_synth"].prompts(tokenizer, num_tokens, 8, 0):
        (line,) = prompt.questions[0].references
        assert len(line.strip()) >= SHORTEST and prompt.questions[0].answer.lstrip("\n") == line
        lines = prompt.context.rstrip("\n").split("\n")
        known = names_of("if 1:\n" + "    " * 9 + line.strip() + "\n").get(1, set()) if balanced(line) else set()
        assert known <= set(re.findall(r"\w+", prompt.context))
        assert not known or not known <= set(re.findall(r"\w+", "\n".join(lines[-NEAR:])))
        assert any(f"\n{line}\n" in "\n".join(read(module).lines) for module in MODULES)


def balanced(line):
    try:
        compile(line.strip() + ("\n    pass" if line.rstrip().endswith(":") else ""), "", "exec")
    except SyntaxError:
        return False
    return not line.rstrip().endswith(":")


@pytest.mark.parametrize(
    ("last", "asked"),
    [
        ("total(amounts, currency)", True),
        ("totals = 1; total(amounts)", False),  # totals is new
        ("total(amounts)", False),  # short
        ("import total, amounts, currency", False),
        ("total(amounts, currency)  # of all", False),  # the metric passes over comments
        ('"""total(amounts, currency)"""', False),
        ('"""\ntotal(amounts, currency)"""', False),
        ("total(amounts)\ntotal(amounts, currency)", True),  # currency still lies back
        ("amounts, currency, total\ntotal(amounts, currency)", False),
    ],
)
def test_code_is_asked_for_whose_names_all_lie_back_but_neither_texts_nor_imports(last, asked):
    source = "def total(amounts, currency):\n" + "    pass\n" * NEAR + last + "\n"
    lines = source.splitlines()
    back = len(lines) - 1
    assert completable(lines, names_of(source)).get(back) == (back if asked else None)


def test_no_module_is_one_that_prompts_of_training_hold():
    assert not {name for name, _ in haystack.library()} & set(MODULES)
    assert all("/" in module for module in MODULES)  # those lie at the top


def test_a_module_that_is_missing_is_named():
    with pytest.raises(ValueError, match=r"code_completion_synth reads .*nowhere.py, which this Python installation lacks"):
        read("nowhere.py")
