"""How a generated answer is judged: the benchmarks' own metrics, each from 0 to 1; published tables show them times 100.

A metric takes the prediction and the references of its question.  LongBench's (arXiv:2308.14508) take the best over references.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal

from rapidfuzz import fuzz
from rouge import Rouge

Metric = Callable[[str, Sequence[str]], float]


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """RULER: the share of the references that the prediction contains, in any case of letters."""
    return sum(reference.lower() in prediction.lower() for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """RULER's metric of its question answering: 1 where the prediction contains any of the references.

    lm-eval's metric of this name gives the share of the references instead, which is lower.
    """
    return float(any(reference.lower() in prediction.lower() for reference in references))


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """F1 of the words that prediction and reference share, after SQuAD's normalisation."""
    return max(shared_f1(normalised(prediction).split(), normalised(reference).split()) for reference in references)


def normalised(text: str) -> str:
    """SQuAD's normalisation: lower case, no ASCII punctuation, no articles, single blanks."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def shared_f1(found: list[str], wanted: list[str]) -> float:
    """Harmonic mean of precision and recall of `found` as a bag of words; 0 where they share none."""
    shared = sum((Counter(found) & Counter(wanted)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(found), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """F of the longest common subsequence, as the package `rouge` has it; 0 where either text holds nothing that it counts."""
    return max(rouge_l_of_one(prediction, reference) for reference in references)


def rouge_l_of_one(prediction: str, reference: str) -> float:
    try:
        return Rouge(metrics=["rouge-l"]).get_scores(prediction, reference)[0]["rouge-l"]["f"]
    except (ValueError, ZeroDivisionError, RecursionError):  # nothing but dots and blanks, or more words than it can trace back
        return 0.0


def edit_similarity(prediction: str, references: Sequence[str]) -> float:
    """Of code: likeness of the first line without a backquote, # or // to the reference, rounded to percents as LongBench's is."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return max(round(fuzz.ratio(line, reference)) / 100 for reference in references)


def classification(prediction: str, references: Sequence[str]) -> float:
    """1 / how many classes the prediction names, where the right one is among them.

    references  the right class, then every class in the benchmark's order
    """
    right, *classes = references
    named = [name for name in classes if name in prediction]
    for name in named:  # as published: taking one out while it is walked leaves the next one unseen
        if name in right and name != right:
            named.remove(name)
    return 1 / len(named) if right in named else 0.0


def count(prediction: str, references: Sequence[str]) -> float:
    """The share of the prediction's numbers that are the reference; 0 where it holds none."""
    return max(share_of_numbers(prediction, reference) for reference in references)


def retrieval(prediction: str, references: Sequence[str]) -> float:
    """The share of the prediction's numbers that are the reference's, which reads "Paragraph 7"."""
    return max(share_of_numbers(prediction, re.findall(r"Paragraph (\d+)", reference)[0]) for reference in references)


def share_of_numbers(prediction: str, number: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def first_word(prediction: str, references: Sequence[str]) -> float:
    """1 where the first word of the prediction, normalised as SQuAD does, is that of a reference: yes or no."""
    return float(normalised(prediction).split()[:1] in [normalised(reference).split()[:1] for reference in references])


def last_number(prediction: str, references: Sequence[str]) -> float:
    """GSM8K: 1 where the number that the prediction ends in is that of a reference: 18, 18.0 and $18.00 are the same.

    It is the last one that follows ####, or else the last one of all.
    """
    numbers = [value(number) for number in MARKED.findall(prediction) or NUMBER.findall(prediction)]
    return float(bool(numbers) and numbers[-1] in [value(reference) for reference in references])


def value(number: str) -> Decimal:
    """Of a number as texts write it: a minus of any kind, a currency, commas between thousands."""
    return Decimal(re.sub(r"[^0-9.-]", "", number.replace("\N{MINUS SIGN}", "-")))


DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
SIGNED = rf"(?:(?<![\w)])[-\N{{MINUS SIGN}}])?[$€£]?(?:(?<=[$€£])[-\N{{MINUS SIGN}}])?(?:{DIGITS})"  # 16-3 holds no -3
NUMBER = re.compile(SIGNED)
MARKED = re.compile(rf"####[^\w\n]*?({SIGNED})(?![0-9,]|[.):]\s*[^\W\d])")  # but not that of a heading, #### 1. First step


def as_it_is(prediction: str) -> str:
    """No cleaning."""
    return prediction


def printable(prediction: str) -> str:
    """RULER's cleaning: control characters become line breaks, blanks at both ends go."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def first_line(prediction: str) -> str:
    """LongBench's cleaning of few-shot tasks: what comes before the first line break, leading ones aside."""
    return prediction.lstrip("\n").split("\n")[0]
