"""The runtime on real weights: full budget and eviction, with sliding-window layers and one KV head, and without."""

import pytest
import torch

from learnkv import methods
from learnkv.evaluation.stream import text_of
from learnkv.models import load_model
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from tests.tiny_models import generate, masked_logits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def bundled(request):
    model, tokenizer = load_model(request.param)
    ids = text_of(tokenizer, 706)[None]
    return model, ids[:, :700], ids[:, 700:]


@torch.no_grad()
def test_real_text_is_less_surprising_than_chance(bundled):
    """Weights that were put together wrongly would not read."""
    model, ids, _ = bundled
    logits = model(ids).logits[0, 300:-1]
    assert torch.nn.functional.cross_entropy(logits, ids[0, 301:]) < 4


@torch.no_grad()
def test_full_budget_equals_the_plain_model_token_for_token(bundled):
    model, ids, _ = bundled
    want = generate(model, ids, n=12)
    with attach(model):
        assert torch.equal(generate(model, ids, EvictionCache(methods.policy("snapkv", 10_000), model), n=12), want)


@torch.no_grad()
@pytest.mark.parametrize("method", ["ada_snapkv", "key_diff", "criticalkv"])
def test_evicting_equals_masking_the_same_tokens(bundled, method):
    model, ids, new = bundled
    with attach(model):
        cache = EvictionCache(methods.policy(method, 100), model)
        model(ids, cache=cache)
        held = cache.kept_positions()
        got = model(new, cache=cache).logits
    assert cache.lengths().double().mean() == 100
    torch.testing.assert_close(got, masked_logits(model, ids, new, held), atol=2e-3, rtol=0)
