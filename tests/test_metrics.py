"""Metrics: the published functions' values, to the last digit."""

import random
import runpy

import pytest
from rouge import Rouge

from learnkv import assets
from learnkv.tasks import metrics


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "want"),
    [
        ("string_match_all", "It is 12 and THREE.", ["12", "three", "4", "5"], 0.5),
        ("string_match_part", "It is 12.", ["4", "12"], 1),
        ("string_match_part", "", ["4", "12"], 0),
        ("token_f1", "The cat, a dog!", ["cat"], 2 / 3),
        ("token_f1", "cat cat", ["cat dog", "cat cat bird"], 0.8),
        ("token_f1", "the", ["an"], 0),
        ("token_f1", "", ["cat"], 0),
        ("classification", "either City or State", ["State", "City", "State", "Country"], 0.5),
        ("classification", "Other city here", ["Other city", "city", "Other city"], 1),
        ("classification", "Other large city", ["Other large city", "city", "large", "Other large city"], 0.5),  # large is unseen
        ("classification", "nothing", ["City", "City", "State"], 0),
        ("count", "There are 7, or 17, or 7.", ["7"], 2 / 3),
        ("count", "seven", ["7"], 0),
        ("retrieval", "Paragraph 3, not 30", ["Paragraph 3"], 0.5),
        ("retrieval", "Paragraph 13", ["Paragraph 3", "Paragraph 13"], 1),
        ("edit_similarity", "\n\nreturn x\nreturn y", ["return x"], 1),
        ("edit_similarity", "# a comment\n// another\n`x`\nreturn z", ["return x"], 0.88),  # 87.5, rounded to even
        ("edit_similarity", "# only a comment", ["return x"], 0),
        ("edit_similarity", "abc", ["abd", "xyz"], 0.67),
        ("rouge_l", "the cat sat", ["the cat sat"], 1),
        ("rouge_l", "", ["the cat sat"], 0),
        ("rouge_l", "...", ["the cat sat"], 0),
        ("rouge_l", "x y", ["the cat sat", "x z"], 0.5),
        ("first_word", "Yes, they are.", ["yes"], 1),
        ("first_word", "not at all", ["no"], 0),
        ("first_word", "", ["no"], 0),
        ("last_number", "He has 3 + 4 = 7 left.", ["7"], 1),
        ("last_number", "It is 7.\n#### 8\nSo it is 9.", ["8"], 1),
        ("last_number", "#### 1. First we add\n2 + 3 = 5\n#### 2) Then\nThe answer is **5**.", ["5"], 1),
        ("last_number", "#### Step 1: 5\n#### -$1,234.00", ["-1234"], 1),
        ("last_number", "1,234.00", ["1,234"], 1),
        ("last_number", "$18.", ["18.00"], 1),
        ("last_number", "3, 4,5", ["5"], 1),
        ("last_number", "12,345,678", ["12345678"], 1),
        ("last_number", "16-3", ["-3"], 0),
        ("last_number", "x = -3", ["-3"], 1),
        ("last_number", "x = \N{MINUS SIGN}3", ["-3"], 1),
        ("last_number", "-3", ["3"], 0),
        ("last_number", ".5", ["0.50"], 1),
        ("last_number", "####", ["0"], 0),
        ("last_number", "zwölf, 十二", ["12"], 0),
        ("last_number", "", ["0"], 0),
    ],
)
def test_a_metric_has_the_published_value(metric, prediction, references, want):
    assert vars(metrics)[metric](prediction, references) == pytest.approx(want, abs=1e-6)


def test_an_answer_is_cleaned_as_its_benchmark_does():
    assert metrics.printable(" \ta\x00b\n ") == "a\nb"
    assert metrics.first_line("\n\nyes \nno") == "yes "


def random_text(rng):
    words = ["Blue", "blue", "12", "the", "a", "dog.", "...", ".", "", "\n", "Paragraph 3", "x,y", "é"]
    return " ".join(rng.choices(words, k=rng.randint(0, 12)))


def test_rouge_is_that_of_longbench_on_any_text():
    """Which asks the package for all its figures and takes any failure for 0."""
    rng = random.Random(0)
    for _ in range(300):
        prediction, reference = random_text(rng), random_text(rng)
        try:
            want = Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
        except ValueError:
            want = 0.0
        assert metrics.rouge_l(prediction, [reference]) == want


@pytest.mark.slow
@pytest.mark.parametrize("name", ["string_match_all", "string_match_part"])
def test_rulers_metrics_are_those_of_its_package(name):
    published = runpy.run_path(str(assets.fetch("ruler") / "long_context_eval" / "eval" / "synthetic" / "constants.py"))[name]
    rng = random.Random(1)
    predictions = [random_text(rng) for _ in range(500)]
    references = [rng.choices(["blue", "DOG", "12", "the a", "x,y", "zz"], k=rng.randint(1, 5)) for _ in predictions]
    ours = [vars(metrics)[name](prediction, asked) for prediction, asked in zip(predictions, references, strict=True)]
    assert round(100 * sum(ours) / len(ours), 2) == published(predictions, references)
    for value, prediction, asked in zip(ours, predictions, references, strict=True):
        assert round(100 * value, 2) == published([prediction], [asked])
