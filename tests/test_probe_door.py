"""The door for rows after a prompt: ids or embeddings, the model's decoder or another, after each chunk or after the last one only."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from learnkv.heuristics.kvzip import KVzip
from learnkv.heuristics.streaming_llm import StreamingLLM
from learnkv.observation import Observation, Probe, ProbeScorer
from learnkv.policy import Policy
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from tests.probe_parts import ids, model, served
from tests.test_kvzip import Words
from tests.tiny_models import left_padded, tiny
from tests.training_parts import Noting

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@dataclass(frozen=True, eq=False)
class Eye(ProbeScorer):
    """Scores by the largest product of a row's query with a key, and counts its probes."""

    rows: Tensor
    decoder: nn.Module | None = None
    asked: list[int] = field(default_factory=list)

    def probe(self, token_ids: Tensor) -> list[Probe]:
        self.asked.append(len(token_ids))
        return [Probe(self.rows, 0, len(token_ids), position=len(token_ids), decoder=self.decoder)]

    def absorb(self, obs: Observation, probe: Probe, queries: Tensor, keys: Tensor) -> Tensor:
        products = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3) @ obs.keys.mT
        return products.amax(2)[..., None]


def test_embeddings_are_as_good_as_the_tokens_that_they_belong_to():
    tokens = torch.tensor([7, 8, 9])
    by_ids, by_embeddings = Eye(tokens), Eye(model().get_input_embeddings()(tokens))
    assert torch.equal(torch.cat(served(by_ids, ids(20))), torch.cat(served(by_embeddings, ids(20))))


def test_rows_run_through_the_decoder_that_their_probe_brings():
    other = copy.deepcopy(model().model)
    other.layers[0].self_attn.q_proj.weight *= 2
    tokens = torch.tensor([7, 8, 9])
    plain, moved = (torch.cat(served(Eye(tokens, decoder), ids(20))) for decoder in (None, other))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in other.modules())
    # in the first layer its queries are twice as long, over keys that are the model's own
    assert torch.allclose(moved[0], 2 * plain[0], atol=1e-4) and not torch.allclose(moved[1], plain[1])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("rows", ["ids", "embeddings"])
def test_logits_keys_and_values_of_a_padded_batch_differ_from_the_plain_models_by_exactly_0(family, rows):
    lm = tiny(family)
    seen = torch.tensor([7, 8, 9]) if rows == "ids" else torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    tokens, mask = left_padded([ids(20) % 90 + 2, ids(13) % 90 + 2])
    with attach(lm):
        caches = [EvictionCache(policy, lm) for policy in (None, Policy(Eye(seen), 1000))]
        plain, probed = (lm(tokens, attention_mask=mask, cache=cache).logits for cache in caches)
    assert torch.equal(plain, probed)
    for mine, own in zip(caches[0].states, caches[1].states, strict=True):
        assert mine.columns == own.columns == 20
        assert torch.equal(mine.held.slots().keys, own.held.slots().keys)
        assert torch.equal(mine.held.slots().values, own.held.slots().values)
    for mine, own in zip(caches[0].sliding, caches[1].sliding, strict=True):
        assert torch.equal(mine.keys, own.keys) and mine.get_seq_length() == own.get_seq_length()


def test_rows_run_after_each_chunk_unless_the_prompts_length_is_announced():
    eyes, tokens = [Eye(torch.tensor([7, 8, 9])) for _ in range(2)], ids(26)[None]
    with attach(model()):
        for eye, announced in zip(eyes, (None, 26), strict=True):
            cache = EvictionCache(Policy(eye, 10, num_sinks=0, num_recent=0), model())
            cache.prefill_length = announced
            for chunk in tokens.split([10, 9, 7], 1):
                model()(chunk, cache=cache)
                assert announced or (cache.lengths() <= 10).all()
            assert (cache.lengths() == 10).all()
    assert [eye.asked for eye in eyes] == [[10, 9, 7], [26]]


@pytest.mark.parametrize("sizes", [[26], [20, 6], [1, 24, 1], [13, 1, 11, 1]], ids=str)
def test_an_announced_prompt_is_scored_as_in_one_forward_whatever_its_chunks(sizes):
    for scorer in (Eye(torch.tensor([7, 8, 9])), KVzip(Words(), chunk_size=15, overlap=2)):
        want, policy = torch.cat(served(scorer, ids(26))), Noting(scorer, 8, num_sinks=1, num_recent=2)
        with attach(model()):
            cache = EvictionCache(policy, model())
            cache.prefill_length = 26
            for chunk in ids(26)[None].split(sizes, 1):
                assert not policy.given
                model()(chunk, cache=cache)
        torch.testing.assert_close(torch.cat(policy.scores), want, atol=1e-5, rtol=1e-5)


def test_an_announced_batch_may_be_reordered_and_cloned_between_its_chunks():
    tokens, mask = left_padded([ids(26), ids(21)])
    policy = Policy(KVzip(Words(), chunk_size=15, overlap=2), 8, num_sinks=1, num_recent=2)
    with attach(model()):
        whole, first = EvictionCache(policy, model()), EvictionCache(policy, model())
        whole.prefill_length = first.prefill_length = 26
        model()(tokens.flip(0), attention_mask=mask.flip(0), cache=whole)
        model()(tokens[:, :14], attention_mask=mask[:, :14], cache=first)
        second = first.clone()
        second.reorder_cache(torch.tensor([1, 0]))
        model()(tokens.flip(0)[:, 14:], attention_mask=mask.flip(0), cache=second)
        model()(tokens[:, 14:], attention_mask=mask, cache=first)
    for want, reordered, cloned in zip(whole.kept_positions(), second.kept_positions(), first.kept_positions(), strict=True):
        assert torch.equal(reordered, want) and torch.equal(cloned, want.flip(0))


def test_scorers_without_rows_evict_between_the_chunks_of_an_announced_prompt():
    with attach(model()):
        cache = EvictionCache(Policy(StreamingLLM(), 9, num_sinks=1, num_recent=2), model())
        cache.prefill_length = 26
        for chunk in ids(26)[None].split(13, 1):
            model()(chunk, cache=cache)
            assert (cache.lengths() == 9).all()


def test_an_announcement_holds_for_one_prompt():
    eye = Eye(torch.tensor([7, 8, 9]))
    with attach(model()):
        cache = EvictionCache(Policy(eye, 1000), model())
        cache.prefill_length = 20
        for chunk in (ids(20), ids(5, 1), ids(6, 2)):
            model()(chunk[None], cache=cache)
        cache.reset()
        assert cache.prefill_length is None
    assert eye.asked == [20, 5, 6]


def test_tokens_of_an_announced_prompt_that_come_alone_are_prefill_and_those_after_it_are_not():
    eye = Eye(torch.tensor([7, 8, 9]))
    with attach(model()):
        cache = EvictionCache(Policy(eye, 6, num_sinks=1, num_recent=2), model())
        cache.prefill_length = 9
        for token in ids(12)[None].split(1, 1):
            model()(token, cache=cache)
    assert eye.asked == [9] and (cache.lengths() == 6).all()


@pytest.mark.parametrize("rows", [torch.zeros(8, dtype=torch.int64), torch.zeros(8, 32)], ids=["ids", "embeddings"])
def test_rows_beyond_the_models_positions_are_refused(rows):
    with attach(model()), pytest.raises(ValueError, match="ends at position 516, the model has 512"):
        model()(ids(508)[None], cache=EvictionCache(Policy(Eye(rows), 1000), model()))
