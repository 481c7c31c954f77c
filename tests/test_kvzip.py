"""KVzip: scores against the attention matrix of prompt and repetition written out, and probes that leave nothing behind."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from learnkv import budgets
from learnkv.budgets import Ratio
from learnkv.capture import capture
from learnkv.heuristics.kvzip import KVzip
from learnkv.observation import NOT_SCORED
from learnkv.policy import Policy
from learnkv.reconstruction import ONWARD, WHOLE
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache, prefill_many

SHAPE = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
SPECIAL = dict(pad_token_id=0, eos_token_id=96, initializer_range=0.2)

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


class Words:
    """A tokenizer of two sentences."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {WHOLE: [11, 12, 13], ONWARD: [14, 15, 16, 17]}[text]


def tiny(kv_heads=2):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **SPECIAL, num_key_value_heads=kv_heads)).eval()


@pytest.fixture(params=[1, 2, 4], ids=lambda h: f"G{4 // h}")
def model(request):
    return tiny(request.param)


def prompt(n, rows=1, seed=1):
    return torch.randint(1, 96, (rows, n), generator=torch.Generator().manual_seed(seed))


def policy(scorer=None, budget=14, allocate="adaptive_global", **settings):
    scorer = scorer or KVzip(Words(), chunk_size=15, overlap=2)
    return Policy(scorer, budget, budgets.ALLOCATORS[allocate], **{"num_sinks": 2, "num_recent": 4} | settings)


def scores_by_hand(model, ids, chunk_size, overlap, num_prefix=4):
    """[layers, H, n]: prompt and repetition in one plain forward; a softmax per row over prefix, chunk and rows."""
    n, H = ids.shape[1], model.config.num_key_value_heads
    scores = torch.zeros(2, H, n)
    for start in range(0, n, chunk_size):
        stop = min(start + chunk_size, n)
        instruction = torch.tensor(Words().encode(ONWARD if start else WHOLE, add_special_tokens=False))
        rows = torch.cat([instruction, ids[0, max(0, start - overlap) : start], ids[0, start:stop]])
        with capture(model, {"queries", "keys"}) as taken:
            model(torch.cat([ids, rows[None]], 1))
        seen = torch.zeros(n + len(rows), n + len(rows), dtype=torch.bool)
        seen[n:, list({*range(num_prefix), *range(start, stop)})] = True
        seen[n:, n:] = torch.ones(len(rows), len(rows)).tril().bool()
        for layer in range(2):
            keys = taken.keys[layer].repeat_interleave(4 // H, 1)
            logits = (taken.queries[layer] @ keys.mT * 8**-0.5)[:, :, n:].masked_fill(~seen[n:], -torch.inf)
            most = logits.softmax(-1)[0].amax(1)[:, start:stop]
            scores[layer, :, start:stop] = most.unflatten(0, (H, -1)).amax(1)
    return scores


def held_scores(cache):
    """[layers, H, n] memory of a cache that evicted nothing."""
    n = int(cache.lengths().max())
    return torch.stack([state.held.pool.memory.view(state.held.lengths.shape[1], -1)[:, :n] for state in cache.states])


@pytest.mark.parametrize("chunk_size", [2048, 15])
def test_scores_equal_the_attention_matrix_written_out(model, chunk_size):
    ids = prompt(40)
    with attach(model):
        cache = EvictionCache(policy(KVzip(Words(), chunk_size=chunk_size, overlap=2), budget=100), model)
        model(ids, cache=cache)
    torch.testing.assert_close(held_scores(cache), scores_by_hand(model, ids, chunk_size, 2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("allocate", ["uniform", "adaptive", "adaptive_global"])
def test_kept_are_the_highest_scored_beside_the_protected(model, allocate):
    ids = prompt(40)
    want = scores_by_hand(model, ids, 15, 2)
    want[..., :2] = want[..., -4:] = 2
    with attach(model):
        cache = EvictionCache(policy(allocate=allocate), model)
        model(ids, cache=cache)
    kept = torch.zeros_like(want, dtype=torch.bool)
    for layer, positions in enumerate(cache.kept_positions()):
        for h, held in enumerate(positions[0]):
            kept[layer, h, held[held >= 0].long()] = True
    shape = {"uniform": want.shape, "adaptive": (2, -1), "adaptive_global": (-1,)}[allocate]
    kept, want = kept.view(shape), want.view(shape)
    if allocate == "uniform" or allocate == "adaptive_global":
        lowest = want.masked_fill(~kept, torch.inf).amin(-1)
        assert (lowest >= want.masked_fill(kept, -torch.inf).amax(-1) - 1e-6).all()
    assert (kept.sum(-1) == 14 * want.shape[-1] // 40).all()


def test_probes_leave_nothing_behind(model):
    ids = prompt(40)
    with attach(model):
        cache = EvictionCache(policy(budget=100), model)
        got = model(ids, cache=cache).logits
        assert cache.get_seq_length() == 40
        assert (cache.lengths() == 40).all()
        following = model(prompt(1, seed=2), cache=cache).logits
    assert torch.equal(got, model(ids).logits)
    whole = model(torch.cat([ids, prompt(1, seed=2)], 1)).logits
    torch.testing.assert_close(following[:, -1], whole[:, -1], atol=1e-5, rtol=0)


def test_probes_leave_sliding_layers_alone():
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SHAPE, **SPECIAL, num_key_value_heads=1, sliding_window=8, layer_types=kinds)
    model = Gemma3ForCausalLM(config).eval()
    ids, mask = prompt(20, rows=2), torch.ones(2, 20, dtype=torch.int64)
    ids[0, :6], mask[0, :6] = 0, 0
    with attach(model):
        plain, probed = EvictionCache(None, model), EvictionCache(policy(budget=100), model)
        for cache in (plain, probed):
            model(ids, attention_mask=mask, cache=cache)
        assert torch.equal(plain.layers[0].keys, probed.layers[0].keys)
        assert plain.layers[0].get_seq_length() == probed.layers[0].get_seq_length() == 20
        want, got = (model(prompt(1, rows=2, seed=2), cache=cache).logits for cache in (plain, probed))
    assert torch.equal(got, want)


def test_a_left_padded_batch_keeps_what_each_prompt_keeps_alone():
    model = tiny()
    rows = [prompt(n, seed=n)[0] for n in (40, 23)]
    ids = torch.stack([rows[0], torch.cat([torch.zeros(17, dtype=torch.int64), rows[1]])])
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :17] = 0
    for plain_positions in (False, True):
        rope = None if plain_positions else (mask.cumsum(-1) - 1).clamp(min=0)
        with attach(model):
            together = EvictionCache(policy(), model)
            model(ids, attention_mask=mask, position_ids=rope, cache=together)
            for b, row in enumerate(rows):
                alone = EvictionCache(policy(), model)
                model(row[None], cache=alone)
                for mine, own in zip(together.kept_positions(), alone.kept_positions(), strict=True):
                    assert torch.equal(mine[b, :, : own.shape[2]], own[0])


def test_a_second_chunk_is_scored_by_its_own_rows_and_the_first_keeps_its_scores():
    model = tiny()
    with attach(model):
        cache = EvictionCache(policy(budget=100), model)
        model(prompt(20), cache=cache)
        first = held_scores(cache)
        model(prompt(10, seed=3), cache=cache)
        both = held_scores(cache)
    assert torch.equal(both[..., :20], first)
    assert ((both[..., 20:] > 0) & (both[..., 20:] <= 1)).all()


def test_generated_tokens_stay_and_scored_ones_leave():
    model = tiny()
    with attach(model):
        cache = EvictionCache(policy(allocate="uniform", num_recent=0), model)
        model(prompt(40), cache=cache)
        for step in prompt(9, seed=5).split(1, 1):
            model(step, cache=cache)
    for positions in cache.kept_positions():
        assert (positions[..., -9:] == torch.arange(40, 49)).all()
    assert (cache.lengths() == 14).all()
    assert NOT_SCORED > 1


class CountingKVzip(KVzip):
    asked = 0

    def probe(self, token_ids):
        type(self).asked += 1
        return super().probe(token_ids)


def test_policies_that_share_kvzip_share_its_passes_and_keep_what_each_would_alone():
    model, ids = tiny(), prompt(40)
    scorer = CountingKVzip(Words(), chunk_size=15)
    many = [policy(scorer, budget, a) for budget in (14, Ratio(0.5)) for a in ("uniform", "adaptive", "adaptive_global")]
    with attach(model):
        caches = prefill_many(model, ids, many)
        assert CountingKVzip.asked == 1
        for p, cache in zip(many, caches, strict=True):
            own = EvictionCache(p, model)
            model(ids, cache=own)
            for mine, theirs in zip(cache.states, own.states, strict=True):
                assert torch.equal(mine.held.slots().positions, theirs.held.slots().positions)
                assert torch.equal(mine.held.slots().keys, theirs.held.slots().keys)
                assert torch.equal(mine.held.pool.memory, theirs.held.pool.memory)


def test_settings_that_count_nothing_are_refused():
    with pytest.raises(ValueError, match="chunk_size=0"):
        KVzip(Words(), chunk_size=0)


def test_a_repetition_beyond_the_models_positions_is_refused():
    short = LlamaForCausalLM(LlamaConfig(**SHAPE, **SPECIAL, num_key_value_heads=2, max_position_embeddings=64)).eval()
    with attach(short), pytest.raises(ValueError, match=r"ends at position 69, the model has 64"):
        short(prompt(51), cache=EvictionCache(policy(), short))
