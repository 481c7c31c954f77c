"""RULER's 13 tasks (arXiv:2404.06654), by generators of our own that draw as the original's do: the same seed gives the same prompts.

A prompt's text (context, question and answer's prefix put together) is the original's `input` at the same length and seed, byte for
byte, with a tokenizer that has no chat template.  Differs:
- vt: without the blank that the original puts before its example; chat templates drop it, and then the context could not be cut
- essays: sentences end as `ruler_data.sentences` says, not by nltk's punkt
- fwe: the original does not count the generation and may be longer than asked for; there ours holds a step fewer words
- a sample that can never fit is left out, where the original tries for ever; so is a length without any haystack
With a chat template, its tokens are taken from the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import Literal
from uuid import UUID

import numpy as np
from scipy.special import zeta

from learnkv.prompts import Prompt, Question
from learnkv.tasks import ruler_data
from learnkv.tasks.metrics import Metric, printable, string_match_all, string_match_part
from learnkv.tasks.ruler_data import Worded
from learnkv.tasks.task import SPLIT, Make, Size, Task

SHORT = 4096  # lengths below are easier and grow by smaller steps
RETRIES = 20  # draws of the least haystack before a sample counts as one that can never fit
MANY = 1 << 30  # samples, of a task that can always draw another
LEFT_OUT = 100  # samples in a row that can never fit before there are none

Draw = Callable[[int, int], Prompt]
"""(index, amount of haystack) -> a sample; every call goes on with the task's randomness."""


def grown(measure: Callable[[int], int], room: int, step: int, most: int) -> int:
    """How much haystack the samples of a length have: a step less than the first sample that is too long; 0 where a step is too much.

    measure  draws a sample of an amount; its tokens with the answer.  Every amount up to the result is drawn once, as in the original,
             whose samples go on with the same randomness: a search that skips amounts would give other prompts
    most     there is no more haystack than this
    """
    amount = step
    while True:
        tokens = measure(amount)
        if tokens > room:
            return amount - step
        amount += step
        if tokens == room or amount > most:
            return min(amount, most)


def series(draw: Draw, size: Size, amount: int, step: int, most: int = MANY) -> Iterator[Prompt]:
    """At most `most` samples of `amount` haystack, each with less where it would not fit; nothing where there is no haystack."""
    missing = 0
    for index in range(most if amount else 0):
        prompt = fitting(draw, size, index, amount, step)
        missing = 0 if prompt else missing + 1
        if missing == LEFT_OUT:
            return
        if prompt:
            yield prompt


def fitting(draw: Draw, size: Size, index: int, amount: int, step: int) -> Prompt | None:
    """A sample that fits, drawn anew a step smaller until it does; None where the smallest does not either."""
    for _ in range(amount // step + RETRIES):
        prompt = draw(index, amount)
        if size.fits(prompt):
            return prompt
        amount = amount - step if amount > step else amount
    return None


def prompt_of(kind: str, worded: Worded, answers: list[str], said: str) -> Prompt:
    """A sample as our prompt; `said` is how the answer goes on after the prefix, `answers` are what the metric looks for."""
    only = answers[0] if len(set(answers)) == 1 else ""
    begin = worded.context.find(only) if only and worded.context.count(only) == 1 else -1
    span = (begin, begin + len(only)) if begin >= 0 else None
    return Prompt(kind, SPLIT, worded.context, (Question(worded.question, worded.prefix, said, span, tuple(answers)),))


def text_of(prompt: Prompt) -> str:
    """What the original calls a sample's input."""
    question = prompt.questions[0]
    return Worded(prompt.context, question.text, question.prefix).text


def answers_of(prompt: Prompt) -> list[str]:
    return list(prompt.questions[0].references)


# ---- needles

Kind = Literal["numbers", "words", "uuids"]


@dataclass(frozen=True)
class Needles:
    """A needle task: what the needles lie in, how many keys and values of which kinds they have, how many keys are asked for."""

    haystack: Literal["repeat", "essay", "needle"]
    keys: int = 1
    values: int = 1
    queries: int = 1
    key: Kind = "words"
    value: Kind = "numbers"

    def step(self, num_tokens: int) -> int:
        """Haystack grows by so many words of an essay, or sentences."""
        if self.haystack == "essay":
            return 500
        return 5 if num_tokens < SHORT else 25


def needles(name: str, needles: Needles) -> Make:
    """Sentences with a key and a value hidden in a haystack; asked for the values of some keys."""

    def make(size: Size, seed: int) -> Iterator[Prompt]:
        rng, step = Random(seed), needles.step(size.num_tokens)

        def draw(index: int, amount: int) -> Prompt:
            return needle_sample(name, needles, rng, seed, amount)

        def measure(amount: int) -> int:
            prompt = draw(0, amount)
            return size.of(text_of(prompt) + " ".join(answers_of(prompt)))

        most = len(ruler_data.essays()) + step if needles.haystack == "essay" else size.num_tokens
        yield from series(draw, size, grown(measure, size.room, step, most), step)

    return make


def needle_sample(name: str, needles: Needles, rng: Random, seed: int, amount: int) -> Prompt:
    """One sample with `amount` words or sentences of haystack."""
    keys, values, hidden = [], [], []
    for _ in range(max(needles.keys, needles.queries)):
        keys.append(drawn(needles.key, rng))
        values.append([drawn(needles.value, rng) for _ in range(needles.values)])
        hidden += [needle_sentence(needles.value, keys[-1], value) for value in values[-1]]
    Random(seed).shuffle(hidden)
    context = essay_with(hidden, rng, amount) if needles.haystack == "essay" else lines_with(hidden, needles, rng, amount)
    asked = rng.sample(range(len(keys)), needles.queries)
    *others, last = [keys[i] for i in asked]
    answers = [value for i in asked for value in values[i]]
    worded = needle_words(needles, context, f"{', '.join(others)}, and {last}" if others else last)
    return prompt_of(name, worded, answers, " " + ", ".join(answers))


def needle_words(needles: Needles, context: str, query: str) -> Worded:
    """The prompt in its words: the singular where one value is asked for."""
    template, kind = ruler_data.template("niah"), str(needles.value)
    if needles.queries * needles.values == 1:
        template = template.replaced("Some", "A").replaced("are all", "is").replaced("are", "is").replaced("answers", "answer")
        kind = kind.removesuffix("s")
    return template.filled(context, type_needle_v=kind, query=query)


def drawn(kind: Kind, rng: Random) -> str:
    """A key or value."""
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    if kind == "uuids":
        return str(UUID(int=rng.getrandbits(128), version=4))
    return rng.choice(ruler_data.word_pairs())


def needle_sentence(kind: Kind, key: str, value: str) -> str:
    return ruler_data.text("niah.py", "needle").format(type_needle_v=kind, key=key, value=value)


def essay_with(hidden: list[str], rng: Random, num_words: int) -> str:
    """Essays' first words with the sentences at random depths: 40 of them from the beginning to the end."""
    sentences = ruler_data.sentences(" ".join(ruler_data.essays()[:num_words]))
    depths = np.linspace(0, 100, num=40).round().astype(int).tolist()
    places = sorted(int(len(sentences) * (depth / 100)) for depth in rng.sample(depths, len(hidden)))
    pieces, begin = [], 0
    for place, sentence in zip(places, hidden, strict=True):
        pieces += [" ".join(sentences[begin:place]), sentence]
        begin = place
    return " ".join([*pieces, " ".join(sentences[begin:])])


def lines_with(hidden: list[str], needles: Needles, rng: Random, num_lines: int) -> str:
    """One sentence repeated, or needles that nobody asks for, with the sentences at random lines."""
    if needles.haystack == "repeat":
        lines = [ruler_data.text("niah.py", "haystack")] * num_lines
    else:
        lines = [needle_sentence(needles.value, drawn(needles.key, rng), drawn(needles.value, rng)) for _ in range(num_lines)]
    for place, sentence in zip(sorted(rng.sample(range(num_lines), len(hidden)), reverse=True), hidden, strict=True):
        lines.insert(place, sentence)
    return "\n".join(lines)


# ---- variables


def variable_tracking(name: str, hops: int) -> Make:
    """A number handed on from variable to variable in noise, after a worked example; asked for the variables that hold it."""

    def make(size: Size, seed: int) -> Iterator[Prompt]:
        rng, numbers = Random(seed), np.random.RandomState(seed)
        example = worked_example(name, size, rng, numbers, hops)
        if example is None:
            return
        tokens = size.of(example)

        def measure(amount: int) -> int:
            plain = chain_sample(name, rng, numbers, amount, hops)
            return tokens + size.of(f"{text_of(plain)} {answers_of(plain)}")

        def draw(index: int, amount: int) -> Prompt:
            drawn = (chain_sample(name, rng, numbers, amount, hops) for _ in range(RETRIES))
            plain = next((p for p in drawn if tokens + size.of(text_of(p)) <= size.room), None) or next(drawn)
            return with_example(plain, renamed(example, rng))

        amount = grown(measure, size.room, NOISE, size.num_tokens)
        yield from series(draw, size, amount, max(1, amount))  # never with less noise, as in the original

    return make


NOISE = 10  # noise sentences grow by this many
EXAMPLE = 500  # tokens of the worked example at most, generation included
EXAMPLE_NOISE = 5


def worked_example(name: str, size: Size, rng: Random, numbers: np.random.RandomState, hops: int) -> str | None:
    """A short sample with its answer, of variables with three letters; None where the tokenizer needs too many tokens for one."""
    room = EXAMPLE - size.max_new_tokens

    def measure(amount: int) -> int:
        plain = chain_sample(name, rng, numbers, amount, hops, letters=3)
        return size.of(f"{text_of(plain)} {answers_of(plain)}")

    amount = grown(measure, room, EXAMPLE_NOISE, EXAMPLE)
    for _ in range(RETRIES if amount else 0):
        plain = chain_sample(name, rng, numbers, amount, hops, letters=3)
        if size.of(text_of(plain)) <= room:
            return f"{text_of(plain)} {' '.join(answers_of(plain))}\n\n"
    return None


def chain_sample(name: str, rng: Random, numbers: np.random.RandomState, amount: int, hops: int, letters: int = 5) -> Prompt:
    """One sample without its example; its noise is repeated `amount` times."""
    variables = variable_names(rng, hops + 1, letters)
    value = str(numbers.randint(10_000, 99_999))
    lines = [f"VAR {variables[0]} = {value}", *(f"VAR {new} = VAR {old} " for old, new in pairwise(variables))]
    noise = ruler_data.text("variable_tracking.py", "noise")
    sentences = [noise] * amount
    if amount <= len(lines):
        sentences = [piece + "." if piece.strip() else piece for sentence in sentences for piece in sentence.split(".")]
    for shift, (place, line) in enumerate(zip(sorted(rng.sample(range(len(sentences)), len(lines))), lines, strict=True)):
        sentences.insert(place + shift, line)
    context = " ".join(sentences).replace(". \n", ".\n")
    worded = ruler_data.template("variable_tracking").filled(context, query=value, num_v=str(len(variables)))
    return prompt_of(name, worded, variables, " " + " ".join(variables))


def variable_names(rng: Random, count: int, letters: int) -> list[str]:
    """Different names of upper-case letters."""
    names = ["".join(rng.choices(ascii_uppercase, k=letters)) for _ in range(count)]
    while len(set(names)) < count:
        names.append("".join(rng.choices(ascii_uppercase, k=letters)))
    return list(dict.fromkeys(names))


def renamed(example: str, rng: Random) -> str:
    """The example with other variables, so that no two samples have the same."""
    ending = ruler_data.template("variable_tracking").prefix[-10:]
    for old in example[example.index(ending) + len(ending) :].split():
        example = example.replace(old, "".join(rng.choices(ascii_uppercase, k=len(old))))
    return example


def with_example(plain: Prompt, example: str) -> Prompt:
    """The sample after a worked example."""
    return Prompt(plain.kind, plain.split, f"{example}\n\n{plain.context}", plain.questions)


# ---- words


def common_words(name: str, common: int, times: int, times_other: int) -> Make:
    """A numbered list in which some words stand more often; asked for them, after an example.  Easier below 4,096 tokens."""

    def make(size: Size, seed: int) -> Iterator[Prompt]:
        rng, words = Random(seed), shuffled(sorted(set(ruler_data.vocabulary("noun", "adjective", "verb"))), seed)
        listed = partial(word_list, rng, seed, words, common)

        def draw(index: int, amount: int) -> Prompt:
            if size.num_tokens < SHORT:
                example, (context, answers) = listed(20, 3, 1), listed(amount, 6, 1)
            else:
                example, (context, answers) = listed(40, 10, 3), listed(amount, times, times_other)
            return common_sample(name, example, context, answers)

        def measure(amount: int) -> int:
            prompt = draw(0, amount)
            return size.of(f"{text_of(prompt)} {numbered(answers_of(prompt))}")

        yield from series(draw, size, grown(measure, size.room, 10, len(words)), 10)

    return make


def common_sample(name: str, example: tuple[str, list[str]], context: str, answers: list[str]) -> Prompt:
    template = ruler_data.template("common_words_extraction")
    shown, worded = template.filled(example[0], query=""), template.filled(context, query="")
    before = f"{shown.text}{numbered(example[1])}\n"
    return prompt_of(name, Worded(before + worded.context, worded.question, worded.prefix), answers, " " + numbered(answers))


def word_list(rng: Random, seed: int, words: list[str], common: int, count: int, times: int, times_other: int) -> tuple[str, list[str]]:
    """A list of `count` different words as text, the first `common` of them `times` times each, and those."""
    drawn = rng.sample(words, count)
    often, seldom = drawn[:common], drawn[common:]
    return numbered(shuffled(often * times + seldom * times_other, seed)), often


def numbered(words: list[str]) -> str:
    """1. apple 2. pear"""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def shuffled(items: list[str], seed: int) -> list[str]:
    """The items in an order that is the seed's own, whatever was drawn before."""
    items = list(items)
    Random(seed).shuffle(items)
    return items


def frequent_words(name: str, alpha: float, letters: int = 6) -> Make:
    """Words of random letters whose frequencies follow a zeta distribution, the first shown as dots; asked for the next three."""

    def make(size: Size, seed: int) -> Iterator[Prompt]:
        rng, step = Random(seed), size.num_tokens // 32
        longest = size.room + size.max_new_tokens  # the original does not count the generation

        def samples(amounts: Iterable[int]) -> Iterator[tuple[int, Prompt]]:
            words = coded_words(rng, seed, size.num_tokens // 50, letters)
            return ((amount, frequent_sample(name, seed, words, amount, alpha)) for amount in amounts)

        growing = samples(count(longest // letters, step))
        amount = next(n for n, prompt in growing if size.of(text_of(prompt)) >= longest) - step
        while fits := next((prompt for _, prompt in samples(range(amount, 0, -step)) if size.fits(prompt)), None):
            yield fits

    return make


def coded_words(rng: Random, seed: int, count: int, letters: int) -> list[str]:
    """`count` different words of random letters in order of frequency; the first is dots."""
    words = ["".join(rng.choices(ascii_lowercase, k=letters)) for _ in range(count)]
    while len(set(words)) < count:
        words.append("".join(rng.choices(ascii_lowercase, k=letters)))
    return ["...", *shuffled(sorted(set(words)), seed)[1:]]


def frequent_sample(name: str, seed: int, words: list[str], amount: int, alpha: float) -> Prompt:
    """A text of about `amount` words, the k-th of `words` k ** -alpha as often as the first."""
    times = (amount * np.arange(1, len(words) + 1) ** -alpha / zeta(alpha)).astype(int)
    text = shuffled([word for word, n in zip(words, times.tolist(), strict=True) for _ in range(n)], seed)
    worded = ruler_data.template("freq_words_extraction").filled(" ".join(text), query="")
    return prompt_of(name, worded, words[1:4], " " + ", ".join(words[1:4]))


# ---- documents


def documents(name: str, library: Callable[[], ruler_data.Library]) -> Make:
    """A question, the documents that it was made from, and others until the prompt is full."""

    def make(size: Size, seed: int) -> Iterator[Prompt]:
        rng, shelf = Random(seed), library()

        def draw(index: int, amount: int) -> Prompt:
            return document_sample(name, shelf, shelf.questions[index], rng, seed, amount)

        def measure(amount: int) -> int:
            prompt = draw(0, amount)
            return size.of(f"{text_of(prompt)} {answers_of(prompt)}")

        amount = grown(measure, size.room, 10, len(shelf.documents))
        yield from series(draw, size, amount, 10, len(shelf.questions))

    return make


def document_sample(name: str, shelf: ruler_data.Library, asked: ruler_data.Asked, rng: Random, seed: int, amount: int) -> Prompt:
    """One sample of `amount` documents: the question's own, related ones, then any."""
    more = amount - len(asked.documents)
    if more > len(asked.related):
        near = {*asked.documents, *asked.related}
        others = [i for i in range(len(shelf.documents)) if i not in near]
        chosen = [*asked.related, *rng.sample(others, min(more - len(asked.related), len(others)))]
    else:
        chosen = rng.sample(asked.related, more)
    ordered = shuffled([shelf.documents[i] for i in (*asked.documents, *chosen)], seed)
    put = ruler_data.text("qa.py", "DOCUMENT_PROMPT")
    context = "\n\n".join(put.format(i=i, document=document) for i, document in enumerate(ordered, 1))
    worded = ruler_data.template("qa").filled(context, query=asked.question)
    return prompt_of(name, worded, list(asked.answers), " " + asked.answers[0])


# ---- the tasks


def task(name: str, make: Make, max_new_tokens: int, metric: Metric = string_match_all) -> Task:
    return Task(name, make, metric, max_new_tokens, benchmark="RULER", paper="2404.06654", count=500, clean=printable)


NEEDLES = {
    "niah_single_1": Needles("repeat"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", queries=4),
}
RULER = (
    *(task(name, needles(name, settings), 128) for name, settings in NEEDLES.items()),
    task("vt", variable_tracking("vt", hops=4), 30),
    task("cwe", common_words("cwe", common=10, times=30, times_other=3), 120),
    task("fwe", frequent_words("fwe", alpha=2.0), 50),
    task("qa_1", documents("qa_1", ruler_data.squad), 32, string_match_part),
    task("qa_2", documents("qa_2", ruler_data.hotpotqa), 32, string_match_part),
)
