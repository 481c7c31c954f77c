"""Tasks of our own on SQuAD's paragraphs and HotpotQA's documents: stand-ins for benchmarks that only a hub has.

Each is named after what it asks for, with `_synth`; its figures are no benchmark's.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from learnkv.prompts import Prompt, Question
from learnkv.tasks import metrics, ruler_data
from learnkv.tasks.drawn import endless, filled
from learnkv.tasks.ruler_data import HotpotQuestion, Paragraph
from learnkv.tasks.task import SPLIT, Size, Task

TURNS = 5  # questions asked of an article
FEWEST = 4  # paragraphs or documents of a prompt, so that there is something to tell apart

# ---- several questions on one article


def multi_turn(rng: Random, size: Size) -> Prompt | None:
    """An article's paragraphs from a random one on, and questions about them in random order; each is asked on its own."""
    article = [p for p in rng.choice(ruler_data.articles()) if p.questions]
    begin = rng.randrange(len(article))
    order, paragraphs = rng.random(), article[begin:] + article[:begin]
    return filled(lambda n: turns(Random(order), paragraphs[:n]), size, 1, len(paragraphs))


def turns(rng: Random, paragraphs: list[Paragraph]) -> Prompt:
    """The paragraphs with TURNS of their questions, or all where they have fewer."""
    context = f"{READ}{join(p.text for p in paragraphs)}\n\n"
    asked = [turn for p in paragraphs for turn in p.questions]
    chosen = rng.sample(asked, min(TURNS, len(asked)))
    questions = [Question(f"{BRIEFLY} {text.strip()}", "The answer is:", f" {answers[0]}", None, answers) for text, answers in chosen]
    return Prompt("multi_turn_synth", SPLIT, context, tuple(questions))


def join(paragraphs: Iterable[str]) -> str:
    """Paragraphs apart by an empty line."""
    return "\n\n".join(paragraphs)


# ---- paragraphs told apart


def retrieval(rng: Random, size: Size) -> Prompt | None:
    """Numbered paragraphs of all articles; asked which of them answers a question."""
    paragraphs = drawn_paragraphs(rng, size)
    share, pick = rng.random(), rng.random()

    def build(n: int) -> Prompt:
        right = int(share * n)
        asked = paragraphs[right].questions[int(pick * len(paragraphs[right].questions))][0]
        text = f"{WHICH} {asked.strip()}"
        question = Question(text, "The answer is in Paragraph", f" {right + 1}", None, (f"Paragraph {right + 1}",))
        return Prompt("passage_retrieval_synth", SPLIT, numbered(p.text for p in paragraphs[:n]), (question,))

    return filled(build, size, FEWEST, len(paragraphs))


def counting(rng: Random, size: Size) -> Prompt | None:
    """Numbered paragraphs of which some are repeated; asked how many different ones there are."""
    paragraphs = drawn_paragraphs(rng, size)
    share, order = rng.uniform(0.3, 1), rng.random()

    def build(n: int) -> Prompt:
        different = max(1, round(share * n))
        again = Random(order).choices(paragraphs[:different], k=n - different)
        listed = Random(order).sample([p.text for p in (*paragraphs[:different], *again)], n)
        question = Question(HOW_MANY, "The number of different paragraphs is", f" {different}", None, (str(different),))
        return Prompt("passage_count_synth", SPLIT, numbered(listed), (question,))

    return filled(build, size, FEWEST, len(paragraphs))


def drawn_paragraphs(rng: Random, size: Size) -> list[Paragraph]:
    """Paragraphs of all articles in random order, as many as a prompt could hold."""
    asked = [p for article in ruler_data.articles() for p in article if p.questions]
    return rng.sample(asked, min(len(asked), max(FEWEST, size.num_tokens // 20)))


def numbered(paragraphs: Iterable[str]) -> str:
    """Paragraph 1: ... and so on, an empty line after each."""
    return READ + "".join(f"Paragraph {i}: {text}\n\n" for i, text in enumerate(paragraphs, 1))


# ---- yes or no


def yes_or_no(rng: Random, size: Size) -> Prompt | None:
    """A comparison of HotpotQA that is answered by yes or no, in the documents that tell, their distractors and others."""
    asked = rng.choice([row for row in ruler_data.hotpotqa_rows() if row.kind == "comparison" and row.answer in ("yes", "no")])
    documents, order = [*asked.telling, *shuffled(rng, asked), *more_documents(rng, asked, size)], rng.random()

    def build(n: int) -> Prompt:
        context = READ + join(Random(order).sample(documents[:n], n)) + "\n\n"
        question = Question(f"{YES_OR_NO} {asked.question.strip()}", "The answer is:", f" {asked.answer}", None, (asked.answer,))
        return Prompt("yes_no_synth", SPLIT, context, (question,))

    return filled(build, size, max(FEWEST, len(asked.telling)), len(documents))


def shuffled(rng: Random, asked: HotpotQuestion) -> list[str]:
    """The question's documents that do not tell, in random order."""
    return rng.sample(asked.distracting, len(asked.distracting))


def more_documents(rng: Random, asked: HotpotQuestion, size: Size) -> list[str]:
    """Documents of other questions, more than a prompt can hold."""
    others = rng.sample(ruler_data.hotpotqa_rows(), 1 + size.num_tokens // 200)
    found = dict.fromkeys(document for row in others for document in row.documents)
    return [document for document in found if document not in asked.documents]


READ = "Read the following text. A question about it comes at the end.\n\n"
BRIEFLY = "Answer this question about the text in a few words."
WHICH = "One of the paragraphs answers the question that follows. Say the number of that paragraph."
HOW_MANY = "Some paragraphs stand in the text more than once. How many different paragraphs are there?"
YES_OR_NO = "Answer this question about the text with yes or no."

PASSAGES = (
    Task("multi_turn_synth", endless("multi_turn_synth", multi_turn), metrics.token_f1, 32),
    Task("passage_retrieval_synth", endless("passage_retrieval_synth", retrieval), metrics.retrieval, 32),
    Task("passage_count_synth", endless("passage_count_synth", counting), metrics.count, 32),
    Task("yes_no_synth", endless("yes_no_synth", yes_or_no), metrics.first_word, 8),
)
