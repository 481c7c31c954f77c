"""A policy beside the oracle: regret and overlap by hand, retention by count, and the text that survived."""

import numpy as np
import pytest
import torch

from learnkv.budgets import Ratio
from learnkv.evaluation.compare import encode_prompt
from learnkv.evaluation.diagnosis import COLUMNS, Diagnosis, Survival, beside_oracle, diagnose, text_lines
from learnkv.evaluation.judge import oracle_utility
from learnkv.heuristics.oracle import Oracle
from learnkv.methods import METHODS
from learnkv.policy import Policy
from learnkv.prompts import Prompt, Question
from tests.comparison_parts import letter_tokenizer, short_prompt, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer():
    return letter_tokenizer()


def test_regret_is_what_the_same_number_of_tokens_by_the_oracles_order_would_have_kept_more():
    utility = torch.tensor([[[4.0, 1.0, 3.0, 2.0, 0.0, 10.0]]])
    protected = torch.tensor([False] * 5 + [True])
    kept = torch.tensor([[[True, True, False, False, False, True]]])
    regret, overlap = beside_oracle(kept, utility, protected)
    assert regret.item() == pytest.approx((4 + 3 - 4 - 1) / 20) and overlap.item() == 0.5, "the oracle keeps the 4 and the 3"


def test_heads_are_judged_by_as_many_tokens_as_each_of_them_kept():
    utility = torch.tensor([[[4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0]]])
    kept = torch.tensor([[[True, True, True, False], [False, False, False, True]]])
    regret, overlap = beside_oracle(kept, utility, torch.zeros(4, dtype=torch.bool))
    assert regret.tolist() == [[0.0, pytest.approx(0.3)]] and overlap.tolist() == [[1.0, 0.0]]


def test_a_head_that_had_nothing_to_choose_has_no_overlap_and_one_that_receives_nothing_no_regret():
    kept = torch.tensor([[[True, False]]])
    regret, overlap = beside_oracle(kept, torch.zeros(1, 1, 2), torch.tensor([True, False]))
    assert regret.item() == 0.0 and np.isnan(overlap.item())


def test_the_oracles_own_choice_has_no_regret_and_overlaps_itself(model, tokenizer):
    prompt = short_prompt()
    utility = oracle_utility(model, encode_prompt(model, tokenizer, prompt))
    found = diagnose(model, tokenizer, [prompt], Policy(Oracle(utility), Ratio(0.4), num_recent=8))
    assert found.regret.shape == found.overlap.shape == (1, 3, 2)
    assert np.abs(found.regret).max() == 0 and (found.overlap == 1).all()


@pytest.mark.parametrize("allocate", ["uniform", "adaptive_global"])
def test_retention_is_what_the_budget_says(model, tokenizer, allocate):
    found = diagnose(model, tokenizer, [short_prompt(), short_prompt(1)], METHODS["random"](Ratio(0.5), allocate=allocate, num_recent=8))
    n = len(found.texts[0].tokens)
    assert found.retention.shape == (2, 3, 2) and found.retention.mean() == pytest.approx(n // 2 / n)
    assert (np.ptp(found.retention) > 0) == (allocate == "adaptive_global")
    assert (found.regret > 0).any() and (found.regret >= 0).all() and (found.regret <= 1).all()


def test_the_whole_context_is_kept_without_regret(model, tokenizer):
    found = diagnose(model, tokenizer, [short_prompt()], METHODS["snapkv"](Ratio(1.0), num_recent=8))
    assert (found.retention == 1).all() and (found.regret == 0).all() and (found.texts[0].kept == 1).all()


def test_the_text_that_survived_is_the_contexts_and_what_is_protected_survived_whole(model, tokenizer):
    prompt = Prompt("user", "user", short_prompt().context, short_prompt().questions, pins=((30, 36),))
    (text,) = diagnose(model, tokenizer, [prompt], METHODS["random"](Ratio(0.3), num_sinks=3, num_recent=5)).texts
    assert "".join(text.tokens) == prompt.context
    for part in (slice(0, 3), slice(-5, None), slice(30, 36)):
        assert (text.kept[part] == 1).all()
    assert text.kept.mean() == pytest.approx(int(0.3 * len(text.tokens)) / len(text.tokens)) and text.kept.min() < 0.5


def test_a_question_inside_is_part_of_the_text(model, tokenizer):
    policy = METHODS["snapkv"](Ratio(0.4), num_recent=8)
    (text,) = diagnose(model, tokenizer, [short_prompt()], policy, question="inside").texts
    assert "".join(text.tokens) == short_prompt().context + " What is the code of Anna?  It i"


def test_no_prompts_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="no prompts"):
        diagnose(model, tokenizer, [], METHODS["snapkv"](Ratio(0.4)))


def test_means_leave_out_prompts_that_had_nothing_to_choose():
    found = diagnose_like(overlap=[[[0.5, np.nan]], [[np.nan, np.nan]]])
    means = found.means()["overlap"]
    assert means[0, 0] == 0.5 and np.isnan(means[0, 1])


def diagnose_like(overlap):
    overlap = np.array(overlap)
    return Diagnosis(np.zeros_like(overlap), overlap, np.ones_like(overlap), ())


def test_lines_of_the_picture_hold_every_letter_with_its_tokens_share():
    lines = text_lines(Survival(("ab\n", "c" * COLUMNS), np.array([0.25, 1.0])))
    assert [len(line) for line in lines] == [COLUMNS, 3]
    assert lines[0][:4] == [("a", 0.25), ("b", 0.25), (" ", 0.25), ("c", 1.0)]


def test_it_is_drawn_as_a_png(model, tokenizer, tmp_path):
    prompt = Prompt("user", "user", "A $ sign, a_b and \\ more $\n" + short_prompt().context, (Question("?", "", " 71"),))
    diagnose(model, tokenizer, [prompt], METHODS["snapkv"](Ratio(0.4), num_recent=8)).draw(tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")
