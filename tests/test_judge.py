"""What answers are worth: generated ones are the model's own after eviction, each as if it were asked alone; caches stay as they were."""

from dataclasses import replace

import pytest
import torch

from learnkv.budgets import Ratio
from learnkv.evaluation.compare import compare, encode_prompt, plan
from learnkv.evaluation.contenders import contenders_of
from learnkv.evaluation.judge import evicted_further, generated, judged
from learnkv.methods import policy
from learnkv.prompts import Prompt, Question
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache, prefill_many
from learnkv.tasks import TASKS, Task
from tests.comparison_parts import letter_tokenizer, short_prompt, tiny_model

NEW = 9  # tokens of an answer
POLICIES = [
    None,
    policy("snapkv", 30, observation_window=8, num_recent=8),
    policy("streaming_llm", 24, num_recent=8),
    policy("h2o", Ratio(0.4), num_recent=8),
]


def length_score(prediction, references):
    return len(prediction.replace(" ", "")) / 100


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer():
    return letter_tokenizer()


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """A task that generates, one that goes on evicting, and one whose answer's own tokens are scored."""
    for name, metric, decode in (("toy", length_score, False), ("toy_decode", length_score, True), ("toy_text", None, False)):
        monkeypatch.setitem(TASKS, name, Task(name, lambda size, seed: iter(()), metric, NEW, decode=decode))


def asked_by(name, questions=2) -> Prompt:
    prompt = short_prompt(1, questions=2)
    texts = (" What is the code of Anna?", " And, what else is the code of it?")[:questions]
    return replace(prompt, task=name, questions=tuple(Question(text, " It is", " 72", None, ("72",)) for text in texts))


def plain_answer(model, encoded):
    ids = torch.cat([encoded.context, encoded.question])[None]
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]


def same_answer(got, want):
    """Rows of one generation go on until the last has ended; what follows an end is padding."""
    assert torch.equal(got[: len(want)], want)


def test_the_full_caches_answers_are_the_plain_models(model, tokenizer):
    encoded = encode_prompt(model, tokenizer, asked_by("toy"))
    with attach(model):
        caches = prefill_many(model, encoded[0].context[None], [None, None])
        got = list(generated(model, caches, encoded, "toy"))
    for (answer, _), e in zip(got, encoded, strict=True):
        same_answer(answer, plain_answer(model, e))


def test_each_cache_answers_as_it_would_alone(model, tokenizer):
    (encoded,) = encode_prompt(model, tokenizer, asked_by("toy", 1))
    ids = torch.cat([encoded.context, encoded.question])[None]
    with attach(model):
        caches = prefill_many(model, encoded.context[None], POLICIES)
        together = [answer for answer, _ in generated(model, caches, [encoded] * len(caches), "toy")]
        for cache, answer in zip(caches, together, strict=True):
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache.clone(), max_new_tokens=NEW, do_sample=False)
            same_answer(answer, alone[0, ids.shape[1] :])
    assert len({tuple(answer.tolist()) for answer in together}) > 1, "the policies should not all say the same here"


@pytest.mark.parametrize("task", ["", "toy", "toy_decode", "toy_text"])
def test_caches_are_left_as_they_were(task, model, tokenizer):
    (encoded,) = encode_prompt(model, tokenizer, asked_by("toy", 1))
    asked = [(encoded, asked_by("toy", 1).questions[0])] * len(POLICIES)
    with attach(model):
        caches = prefill_many(model, encoded.context[None], POLICIES)
        first, second = (list(judged(model, tokenizer, caches, asked, task)) for _ in range(2))
    assert first == second


def test_a_policy_that_goes_on_evicts_what_is_generated_as_its_own_generation_would(model, tokenizer):
    (encoded,) = encode_prompt(model, tokenizer, asked_by("toy_decode", 1))
    ids = torch.cat([encoded.context, encoded.question])[None]
    own = policy("streaming_llm", 24, num_recent=8)
    with attach(model):
        ((answer, after),) = evicted_further(model, prefill_many(model, encoded.context[None], [own]), [encoded], "toy_decode")
        cache = EvictionCache(own, model)
        model(ids[:, : len(encoded.context)], cache=cache)
        want = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
    same_answer(answer, want)
    assert int(after.lengths().max()) <= 24 + 1 and torch.equal(after.lengths(), cache.lengths())


def test_a_task_that_goes_on_evicting_shows_what_is_held_at_the_end(model, tokenizer):
    rows = compare(model, tokenizer, [asked_by("toy_decode", 1)], plan(contenders_of(["streaming_llm"], model, tokenizer), [24]))
    full, own = (next(row for row in rows if row.scorer == scorer) for scorer in ("full", "streaming_llm"))
    assert own.kept_max <= 25 and full.kept_mean > full.num_tokens


def test_the_score_is_the_tasks_of_the_answer_that_is_shown(model, tokenizer):
    rows = compare(model, tokenizer, [asked_by("toy")], plan(contenders_of(["h2o"], model, tokenizer), [0.3]))
    assert all(row.accuracy == length_score(row.prediction, ()) and row.task == row.topic == "toy" for row in rows)
    assert len(rows) == 2 * 4 and any(row.prediction for row in rows)


def test_without_a_metric_the_score_is_the_share_of_right_tokens(model, tokenizer):
    prompt = replace(asked_by("toy_text", 1), questions=(Question("", "", " 72 is the code of Anna"),))
    rows = compare(model, tokenizer, [prompt], plan(contenders_of([], model, tokenizer), [0.5]))
    (encoded,) = encode_prompt(model, tokenizer, prompt)
    ids = torch.cat([encoded.context, encoded.question, encoded.answer])
    right = model(ids[None]).logits[0, -len(encoded.answer) - 1 : -1].argmax(-1) == encoded.answer
    assert rows[0].accuracy == pytest.approx(right.double().mean().item()) and rows[0].prediction == ""


def test_an_answer_that_would_pass_the_last_position_is_refused(tokenizer):
    with pytest.raises(ValueError, match="the model has 138 positions"):
        encode_prompt(tiny_model(138), tokenizer, asked_by("toy"))
    encode_prompt(tiny_model(138), tokenizer, replace(asked_by("toy"), task=""))
