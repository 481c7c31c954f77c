"""Tasks on the bundled model: a cache that evicts nothing answers as the plain model does, whatever the task."""

from dataclasses import replace

import pytest
import torch

from learnkv.evaluation.compare import encode_prompt
from learnkv.evaluation.judge import judged
from learnkv.methods import policy
from learnkv.models import load_model
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import prefill_many
from learnkv.tasks import TASKS
from learnkv.tasks.registry import MADE_HERE
from learnkv.tasks.ruler import RULER

pytestmark = pytest.mark.slow
NEW = 24  # tokens of an answer, which are enough to differ in
NUM_TOKENS = 800  # of a prompt, but for tasks whose shortest is longer
LONGER = {task.name: 1024 for task in RULER} | {"qa_1": 2048, "qa_2": 2048}
EVERYTHING = 8192  # tokens per KV head


@pytest.fixture(scope="module")
def bundled():
    return load_model("smollm2-135m")


@pytest.mark.parametrize("name", [task.name for task in MADE_HERE])
def test_full_cache_and_full_budget_answer_as_the_plain_model(name, bundled, monkeypatch):
    model, tokenizer = bundled
    task = replace(TASKS[name], max_new_tokens=min(NEW, TASKS[name].max_new_tokens))
    monkeypatch.setitem(TASKS, name, task)
    (prompt,) = task.prompts(tokenizer, LONGER.get(name, NUM_TOKENS), 1, seed=3)
    (encoded, *_) = encode_prompt(model, tokenizer, prompt)
    with attach(model), torch.no_grad():
        caches = prefill_many(model, encoded.context[None], [None, policy("snapkv", EVERYTHING)])
        found = list(judged(model, tokenizer, caches, [(encoded, prompt.questions[0])] * 2, name))
    wanted = scored(model, encoded) if task.metric is None else said(model, tokenizer, encoded, task.max_new_tokens)
    assert [figures["accuracy" if task.metric is None else "prediction"] for figures in found] == [wanted] * 2


def said(model, tokenizer, encoded, count):
    ids = torch.cat([encoded.context, encoded.question])[None]
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True)


def scored(model, encoded):
    ids = torch.cat([encoded.context, encoded.question, encoded.answer])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, -len(encoded.answer) - 1 : -1]
    return pytest.approx((logits.argmax(-1) == encoded.answer).double().mean().item())
