"""SCBench's metrics (arXiv:2412.10319), in words of ours, each from 0 to 1."""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from learnkv.tasks.metrics import shared_f1


def contained(prediction: str, references: Sequence[str]) -> float:
    """Key and value, prefix and suffix: 1 where the prediction contains the reference, letter by letter."""
    return float(any(reference in prediction for reference in references))


def first_integer(prediction: str, references: Sequence[str]) -> float:
    """Passkey: 1 where the first digits of the prediction are the reference."""
    return float(any(digits in references for digits in re.findall(r"[0-9]+", prediction)[:1]))


def first_number(prediction: str, references: Sequence[str]) -> float:
    """Numbers to find: 1 where the first number of the prediction, its sign aside, is the reference; without what follows its point where
    the reference has none."""
    found = re.search(r"[0-9]+(\.[0-9]+)?", prediction)
    if not found:
        return 0.0
    whole = found[0].partition(".")[0]
    return float(any(float(whole if re.fullmatch(r"-?[0-9]+", wanted) else found[0]) == float(wanted) for wanted in references))


def choice(prediction: str, references: Sequence[str]) -> float:
    """Multiple choice: 1 where what the prediction chooses is the right option's text or letter, its references.

    It chooses by its first letter; or by what follows "answer is" and the like; or by its first word made of A, B, C, D.
    """
    text = prediction.strip()
    if text[:1] and text[0] in "ABCD":
        return float(text[0] in references)
    if text in references:
        return 1.0
    text = re.sub(r"[\n\"'.,?!{} ]+", " ", text)
    for opening in OPENINGS:
        if opening in text:
            return float(text.partition(opening)[2][1:].startswith(tuple(references)))
    word = next((word for word in text.split() if word in "ABCD"), None)
    return float(word in references)


OPENINGS = ("answer is:", "answer:", "answer is", "option is")


def characters_f1(prediction: str, references: Sequence[str]) -> float:
    """Chinese questions: F1 of the characters that prediction and reference share, without punctuation and blanks.

    Differs: the published script walks the characters of the reference as if each were a reference of its own, and lists the punctuation;
    here the reference is whole, and punctuation is what Unicode calls so.
    """
    return max(shared_f1(characters(prediction), characters(reference)) for reference in references)


def characters(text: str) -> list[str]:
    """Of a text in lower case, without blanks and punctuation."""
    return [c for c in text.lower() if not c.isspace() and not is_punctuation(c)]


def is_punctuation(character: str) -> bool:
    """Unicode's, and the signs of ASCII and those of full width that stand for them."""
    return unicodedata.category(character).startswith("P") or unicodedata.normalize("NFKC", character) in string.punctuation


# ---- ROUGE-Lsum, as the package rouge_score has it


def rouge_lsum(prediction: str, references: Sequence[str]) -> float:
    """F of the words that each line of the reference has in common, in order, with any line of the prediction, each counted once."""
    return max(rouge_lsum_of_one(word_lines(prediction), word_lines(reference)) for reference in references)


def word_lines(text: str) -> list[list[str]]:
    """The words of each line, made of a to z and 0 to 9."""
    return [re.findall(r"[a-z0-9]+", line.lower()) for line in text.split("\n")]


def rouge_lsum_of_one(found: list[list[str]], wanted: list[list[str]]) -> float:
    hits = 0
    left_found, left_wanted = (Counter(word for line in lines for word in line) for lines in (found, wanted))
    total_found, total_wanted = left_found.total(), left_wanted.total()
    for line in wanted:
        common = {place for other in found for place in common_places(line, other)}
        for word in (line[place] for place in sorted(common)):
            if left_found[word] > 0 and left_wanted[word] > 0:
                hits, left_found[word], left_wanted[word] = hits + 1, left_found[word] - 1, left_wanted[word] - 1
    return 2 * hits / (total_found + total_wanted) if hits else 0.0


def common_places(line: list[str], other: list[str]) -> list[int]:
    """Where in `line` the words of a longest subsequence stand that `other` has too."""
    lengths = [[0] * (len(other) + 1)]  # of the longest one of the first i and the first j words
    for word in line:
        row = [0]
        for j, against in enumerate(other):
            row.append(lengths[-1][j] + 1 if word == against else max(row[j], lengths[-1][j + 1]))
        lengths.append(row)
    places, i, j = [], len(line), len(other)
    while i and j:
        if line[i - 1] == other[j - 1]:
            i, j = i - 1, j - 1
            places.append(i)
        elif lengths[i][j - 1] > lengths[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return places


# ---- a function told from the others of its repository


def same_function(prediction: str, references: Sequence[str]) -> float:
    """RepoQA: 1 where the prediction is more like the right function than like any other, with a BLEU of 0.8 at least.

    references  the right function, then the others that are asked for in the repository
    Differs: of the prediction's first code block the published script takes what tree-sitter finds to be the first function, here it is
    taken whole; a tie with another function goes to the right one.
    """
    block = re.search(r"^```\w*\s*\n(.*?)^```", prediction.strip(), re.DOTALL | re.MULTILINE)
    said = (block[1] if block else prediction).split()
    right, *others = (bleu(said, reference.split()) for reference in references)
    return float(right >= LIKE and right >= max(others, default=0.0))


LIKE = 0.8


def bleu(found: list[str], wanted: list[str]) -> float:
    """BLEU of up to four words, as nltk has it with the fourth smoothing of Chen and Cherry (2014)."""
    precisions = [precision(runs(found, n), runs(wanted, n)) for n in range(1, 5)]
    if not found or not precisions[0][0]:
        return 0.0
    zeros, logs = 0, 0.0
    for matched, total in precisions:
        if not matched and len(found) > 1:
            zeros += 1
            logs += math.log(math.log(len(found)) / (5 * 2**zeros) / total) / 4
        elif matched:
            logs += math.log(Fraction(matched, total)) / 4
    return math.exp(logs + min(0.0, 1 - len(wanted) / len(found)))


def runs(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    """Every n words that follow each other."""
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def precision(found: Counter[tuple[str, ...]], wanted: Counter[tuple[str, ...]]) -> tuple[int, int]:
    """How many of the first are among the second, and how many they are, 1 at least."""
    return (found & wanted).total(), max(1, found.total())
