"""What an EvictionCache keeps, and that attention over it is what the plain model gives with the same tokens masked."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from learnkv import budgets
from learnkv.budgets import Ratio
from learnkv.gates.kvp import KVP, KVPConfig
from learnkv.heuristics.criticalkv import CriticalKV, projected_norm
from learnkv.heuristics.expected_attention import ExpectedAttention
from learnkv.heuristics.h2o import H2O
from learnkv.heuristics.key_diff import KeyDiff
from learnkv.heuristics.key_norm import KeyNorm
from learnkv.heuristics.snapkv import SnapKV
from learnkv.heuristics.streaming_llm import StreamingLLM
from learnkv.heuristics.tova import TOVA
from learnkv.kernels import reference
from learnkv.methods import METHODS
from learnkv.models import describe
from learnkv.observation import Scorer, Slots
from learnkv.policy import Policy
from learnkv.runtime import step as runtime_step
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache, prefill_many, together
from learnkv.runtime.pages import PAGE
from tests.tiny_models import masked_logits
from tests.tiny_models import tiny as tiny_family

pytestmark = pytest.mark.usefixtures("no_grad")
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen": (Qwen3Config, Qwen3ForCausalLM)}
ALLOCATORS = ["uniform", "pyramid", "adaptive", "adaptive_global"]


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


def tiny(kind="llama", kv_heads=2, layers=3, dtype=torch.float32):
    torch.manual_seed(0)
    config, lm = MODELS[kind]
    shape = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, head_dim=8)
    special = dict(pad_token_id=0, eos_token_id=96, initializer_range=0.2)
    return lm(config(**shape, **special, num_key_value_heads=kv_heads, dtype=dtype)).to(dtype).eval()


@pytest.fixture(scope="module")
def llama():
    return tiny()


@pytest.fixture(params=[("llama", 4), ("llama", 2), ("llama", 1), ("qwen", 2)], ids=lambda p: f"{p[0]}-G{4 // p[1]}")
def model(request):
    return tiny(*request.param)


def prompt(n, rows=1, seed=1):
    return torch.randint(1, 96, (rows, n), generator=torch.Generator().manual_seed(seed))


def policy(scorer=None, budget=12, allocate="uniform", **settings):
    return Policy(scorer or KeyDiff(), budget, budgets.ALLOCATORS[allocate], **{"num_sinks": 2, "num_recent": 4, **settings})


def generate(model, ids, cache=None, n=8, **given):
    return model.generate(ids, cache=cache, max_new_tokens=n, min_new_tokens=n, do_sample=False, **given)


# ---- results


def test_full_budget_equals_plain_generation(model):
    ids = prompt(21, rows=2)
    want = generate(model, ids)
    with attach(model):
        for p in (None, policy(budget=10_000), policy(SnapKV(), 10_000, "adaptive_global")):
            assert torch.equal(generate(model, ids, EvictionCache(p, model)), want)


@pytest.mark.parametrize("allocate", ALLOCATORS)
@pytest.mark.parametrize("T", [1, 5])
def test_evicting_equals_masking_the_same_tokens_in_the_plain_model(model, allocate, T):
    ids, new = prompt(40), prompt(T, seed=2)
    with attach(model):
        cache = EvictionCache(policy(KeyNorm(), 14, allocate), model)
        model(ids, cache=cache)
        held = cache.kept_positions()
        got = model(new, cache=cache).logits
    assert all((positions >= 0).sum() < 40 * positions.shape[1] for positions in held)
    torch.testing.assert_close(got, masked_logits(model, ids, new, held), atol=1e-5, rtol=0)


def test_ragged_selection_keeps_other_numbers_in_other_heads(llama):
    with attach(llama):
        cache = EvictionCache(policy(KeyNorm(), 14, "adaptive"), llama)
        llama(prompt(40), cache=cache)
    assert torch.equal(cache.lengths().sum(2), torch.full((3, 1), 28))
    assert len(set(cache.lengths().flatten().tolist())) > 1


def test_a_pyramid_stays_within_its_budget_while_decoding(llama):
    with attach(llama):
        cache = EvictionCache(policy(KeyNorm(), 14, "pyramid"), llama)
        llama(prompt(40), cache=cache)
        for step in range(6):
            llama(prompt(1, seed=step), cache=cache)
            lengths = cache.lengths()[:, 0]
            assert lengths.sum() == 3 * 2 * 14 and (lengths[0] > lengths[1]).all() and (lengths[1] > lengths[2]).all()


def left_padded(rows):
    n = max(map(len, rows))
    ids = torch.stack([torch.cat([torch.zeros(n - len(r), dtype=torch.int64), r]) for r in rows])
    return ids, torch.stack([torch.cat([torch.zeros(n - len(r)), torch.ones(len(r))]) for r in rows]).long()


SCORERS = [KeyDiff(), H2O(), SnapKV(observation_window=6), TOVA(), ExpectedAttention(future=8), StreamingLLM(), CriticalKV(H2O())]


@pytest.mark.parametrize("scorer", SCORERS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("allocate", ALLOCATORS)
def test_a_left_padded_batch_gives_what_each_prompt_gives_alone(llama, scorer, allocate):
    rows = [prompt(n, seed=n)[0] for n in (33, 17, 3)]
    ids, mask = left_padded(rows)
    p = policy(scorer, 14, allocate, interval=3)
    with attach(llama):
        together = EvictionCache(p, llama)
        got = generate(llama, ids, together, attention_mask=mask)
        for b, row in enumerate(rows):
            alone = EvictionCache(p, llama)
            assert torch.equal(generate(llama, row[None], alone)[0, len(row) :], got[b, ids.shape[1] :])
            assert torch.equal(together.lengths()[:, b], alone.lengths()[:, 0])
            for mine, own in zip(together.kept_positions(), alone.kept_positions(), strict=True):
                assert torch.equal(mine[b, :, : own.shape[2]], own[0])


def made_kvp(model):
    torch.manual_seed(0)
    return KVP(KVPConfig(branch_width=6, width=10), describe(model))


@pytest.mark.parametrize("make", [lambda model: ExpectedAttention(future=8), made_kvp], ids=["ExpectedAttention", "KVP"])
def test_a_plain_left_padded_forward_keeps_what_the_prompt_alone_keeps(llama, make):
    """Without position_ids a forward counts its pads: keys are rotated further, and scorers that take RoPE off know how far."""
    ids, mask = left_padded([prompt(n, seed=n)[0] for n in (40, 23)])
    with attach(llama):
        together, alone = (EvictionCache(policy(make(llama), 12), llama) for _ in range(2))
        llama(ids, attention_mask=mask, cache=together)
        llama(ids[1:, 17:], cache=alone)
    for mine, own in zip(together.kept_positions(), alone.kept_positions(), strict=True):
        assert torch.equal(mine[1:, :, : own.shape[2]], own)


def test_scorers_that_take_rope_off_refuse_pads_inside_a_row(llama):
    with attach(llama):
        cache = EvictionCache(policy(ExpectedAttention(future=8), 12), llama)
        llama(prompt(20), cache=cache)
        ids, mask = torch.cat([torch.zeros(1, 3).long(), prompt(5)], 1), torch.ones(1, 28).long()
        mask[0, 20:23] = 0
        with pytest.raises(ValueError, match=r"ExpectedAttention: RoPE positions of row 0 jump .* pass position_ids"):
            llama(ids, attention_mask=mask, cache=cache)
        positions = torch.cat([torch.zeros(1, 3).long(), torch.arange(20, 25)[None]], 1)
        llama(ids, attention_mask=mask, position_ids=positions, cache=cache)
        assert cache.get_seq_length() == 28


def test_a_ratio_is_of_each_rows_own_tokens(llama):
    ids, mask = left_padded([prompt(n)[0] for n in (40, 20)])
    with attach(llama):
        cache = EvictionCache(policy(budget=Ratio(0.5)), llama)
        llama(ids, attention_mask=mask, cache=cache)
    assert cache.lengths()[0].tolist() == [[20, 20], [10, 10]]


def test_a_second_turn_and_a_plain_forward_go_on_at_the_right_positions(llama):
    ids, more = prompt(30), prompt(7, seed=3)
    with attach(llama):
        cache = EvictionCache(policy(), llama)
        first = generate(llama, ids, cache, n=4)
        history = torch.cat([first, more], 1)
        fed = []
        note = lambda module, args, kwargs: fed.append((kwargs["input_ids"], kwargs.get("position_ids")))  # noqa: E731
        handle = llama.model.register_forward_pre_hook(note, with_kwargs=True)
        generate(llama, history, cache, n=2)
        handle.remove()
        assert torch.equal(fed[0][0], history[:, 33:])  # the last new token was not fed before, then the second turn
        assert fed[0][1] is None or fed[0][1].flatten().tolist() == list(range(33, 41))
        assert cache.get_seq_length() == 42
        held = cache.kept_positions()
        got = llama(prompt(1, seed=4), cache=cache).logits
        assert held[0].amax() == 41
        assert cache.get_seq_length() == 43
    assert got.isfinite().all()


def test_a_second_turn_equals_masking_what_the_first_evicted(llama):
    ids, more = prompt(30), prompt(7, seed=3)
    with attach(llama):
        cache = EvictionCache(policy(), llama)
        llama(ids, cache=cache)
        held = cache.kept_positions()
        got = llama(more, cache=cache).logits
    torch.testing.assert_close(got, masked_logits(llama, ids, more, held), atol=1e-5, rtol=0)


def test_chunked_prefill_without_eviction_equals_one_prefill(llama):
    ids = prompt(40)
    want = llama(ids).logits
    with attach(llama):
        cache = EvictionCache(None, llama)
        got = [llama(chunk, cache=cache).logits for chunk in ids.split([16, 1, 23], 1)]
    torch.testing.assert_close(torch.cat(got, 1), want, atol=1e-5, rtol=0)


def test_a_padded_chunked_prefill_equals_each_row_alone(llama):
    rows = [prompt(n, seed=n)[0] for n in (30, 11)]
    ids, mask = left_padded(rows)
    rope = (mask.cumsum(-1) - 1).clamp(min=0)
    with attach(llama):
        cache = EvictionCache(None, llama)
        for start in (0, 24):
            stop = min(start + 24, 30)
            out = llama(ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=rope[:, start:stop], cache=cache).logits
    for b, row in enumerate(rows):
        torch.testing.assert_close(out[b, -1], llama(row[None]).logits[0, -1], atol=1e-5, rtol=0)


def test_chunked_prefill_holds_the_budget_after_every_chunk(llama):
    with attach(llama):
        cache = EvictionCache(policy(), llama)
        for chunk in prompt(50).split(20, 1):
            llama(chunk, cache=cache)
            assert (cache.lengths() == 12).all()


def test_evicted_slots_are_never_attended(llama):
    ids, new = prompt(40), prompt(3, seed=2)
    for allocate in ALLOCATORS:
        with attach(llama):
            cache = EvictionCache(policy(KeyNorm(), 21, allocate), llama)
            llama(ids, cache=cache)
            other = cache.clone()
            for state in other.states:
                state.pages = state.held.kept(state.held.all_slots()[1], 20)
                pool = state.held.pool
                empty = pool.positions < 0
                assert empty.any()
                pool.keys[empty], pool.values[empty] = 1e4, 1e4
            for step in new.split(1, 1):
                assert torch.equal(llama(step, cache=cache).logits, llama(step, cache=other).logits)


def test_a_prompt_of_one_token_generates_as_the_plain_model(llama):
    ids = prompt(1)
    with attach(llama):
        got = generate(llama, ids, EvictionCache(policy(budget=64), llama))
    assert torch.equal(got, generate(llama, ids))


def test_a_row_of_padding_only_holds_nothing_and_disturbs_no_other(llama):
    ids, mask = prompt(20, rows=2), torch.ones(2, 20, dtype=torch.int64)
    mask[0] = 0
    with attach(llama):
        cache, alone = EvictionCache(policy(), llama), EvictionCache(policy(), llama)
        llama(ids, attention_mask=mask, cache=cache)
        llama(ids[1:], cache=alone)
        assert cache.lengths()[:, 0].sum() == 0
        got = llama(prompt(2, rows=2), attention_mask=torch.cat([mask, mask[:, :2]], 1), cache=cache).logits
        want = llama(prompt(2, rows=2)[1:], cache=alone).logits
    assert got.isfinite().all()
    torch.testing.assert_close(got[1:], want, atol=1e-5, rtol=0)


def test_several_returned_sequences_have_rows_of_their_own(llama):
    with attach(llama):
        cache = EvictionCache(policy(), llama)
        out = llama.generate(prompt(20), cache=cache, num_return_sequences=2, do_sample=True, max_new_tokens=5, min_new_tokens=5)
    assert out.shape == (2, 25)
    assert cache.lengths().shape == (3, 2, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_held_in_half_precision(dtype):
    model = tiny(dtype=dtype)
    ids = prompt(20)
    with attach(model):
        cache = EvictionCache(policy(budget=64), model)
        got = model(ids, cache=cache).logits
        model(prompt(1), cache=cache)
    assert cache.states[0].held.pool.keys.dtype == dtype
    assert torch.equal(got, model(ids).logits)


# ---- what stays, and when


@pytest.mark.parametrize("allocate", ALLOCATORS)
def test_decode_eviction_keeps_lengths_at_the_budget(llama, allocate):
    with attach(llama):
        cache = EvictionCache(policy(KeyNorm(), 12, allocate), llama)
        llama(prompt(30, rows=2), cache=cache)
        for step in prompt(20, rows=2, seed=5).split(1, 1):
            llama(step, cache=cache)
            total = cache.lengths().sum((0, 2))
            assert total.tolist() == [12 * 2 * 3] * 2


def test_decode_evicts_every_interval_steps(llama):
    with attach(llama):
        cache = EvictionCache(policy(interval=4), llama)
        llama(prompt(30), cache=cache)
        lengths = []
        for step in prompt(9, seed=5).split(1, 1):
            llama(step, cache=cache)
            lengths.append(int(cache.lengths().max()))
    assert lengths == [13, 14, 15, 12, 13, 14, 15, 12, 13]


def test_decode_may_have_a_policy_of_its_own(llama):
    with attach(llama):
        cache = EvictionCache(policy(H2O(), 20), llama, decode=policy(TOVA(), 10, interval=2))
        llama(prompt(30), cache=cache)
        assert (cache.lengths() == 20).all()
        for step in prompt(2, seed=5).split(1, 1):
            llama(step, cache=cache)
        assert (cache.lengths() == 10).all()


def test_a_ratio_of_decode_holds_while_the_row_grows(llama):
    with attach(llama):
        cache = EvictionCache(None, llama, decode=policy(budget=Ratio(0.5), interval=2))
        llama(prompt(40), cache=cache)
        for step in prompt(20, seed=5).split(1, 1):
            llama(step, cache=cache)
            if cache.get_seq_length() % 2 == 0:
                assert (cache.lengths() == cache.get_seq_length() // 2).all()


def test_memory_of_kept_tokens_travels_with_them(llama):
    """H2O through many evictions equals the mass summed by hand over what was held."""
    with attach(llama):
        cache = EvictionCache(policy(H2O(), 10), llama)
        llama(prompt(30), cache=cache)
        before = memory_by_position(cache.states[1].held.slots())
        llama(prompt(1, seed=6), cache=cache)
        after = memory_by_position(cache.states[1].held.slots())
    assert all(mass >= before.get(token, 0) for token, mass in after.items())
    assert len(before.keys() & after.keys()) == 2 * 9


def memory_by_position(slots):
    """(head, position) -> the first float beside that token."""
    memory = slots.gathered(slots.memory_pages)[0, :, :, 0]
    return {(h, int(p)): float(memory[h, s]) for h in range(len(memory)) for s, p in enumerate(slots.positions[0, h])}


@pytest.mark.parametrize("method", ["h2o", "recency_hybrid", "vatp"])
def test_a_clone_scores_with_the_memory_that_it_has_just_written(llama, method, monkeypatch):
    """Its pages become its own in that very step."""
    p, scores = METHODS[method](20, num_recent=4), []
    score = type(p.scorer).score
    monkeypatch.setattr(type(p.scorer), "score", lambda self, obs: scores.append(score(self, obs)) or scores[-1])
    with attach(llama):
        cache = EvictionCache(p, llama)
        llama(prompt(30), cache=cache)
        copy = cache.clone()
        for held in (copy, cache):
            scores.append(None)
            llama(prompt(1, seed=3), cache=held)
    of_copy, of_cache = scores[-7:-4], scores[-3:]
    for got, want in zip(of_copy, of_cache, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("allocate", ["uniform", "adaptive_global"])
def test_criticalkvs_norms_are_those_of_the_values_held(llama, allocate):
    with attach(llama):
        cache = EvictionCache(policy(CriticalKV(H2O()), 14, allocate, interval=2), llama)
        generate(llama, prompt(30), cache, n=7)
    for state, block in zip(cache.states, llama.model.layers, strict=True):
        held = Slots.dense(*(getattr(state.held.slots(), name) for name in ("keys", "values", "positions")))
        slots = state.held.slots()
        got = slots.gathered(slots.memory_pages)[0, ..., 1]
        want = projected_norm(held.values, block.self_attn.o_proj.weight)[0]
        assert torch.allclose(got[held.filled[0]], want[held.filled[0]], rtol=1e-5)


def test_rows_within_their_budget_are_untouched(llama):
    ids, mask = left_padded([prompt(n)[0] for n in (40, 9)])
    with attach(llama):
        cache = EvictionCache(policy(budget=12), llama)
        llama(ids, attention_mask=mask, cache=cache)
    assert cache.lengths()[0].tolist() == [[12, 12], [9, 9]]
    assert cache.kept_positions()[0][1, 0].tolist() == [*range(9), -1, -1, -1]


def test_sinks_recent_tokens_and_pins_stay(llama):
    with attach(llama):
        cache = EvictionCache(policy(KeyNorm(), 14), llama)
        cache.pin(0, 10, 14)
        llama(prompt(30), cache=cache)
        for step in prompt(12, seed=5).split(1, 1):
            llama(step, cache=cache)
    for positions in cache.kept_positions():
        for held in positions[0].tolist():
            assert {0, 1, 10, 11, 12, 13, 38, 39, 40, 41} <= set(held)
            assert held == sorted(held)
    assert (cache.lengths() == 14).all()


def test_a_pin_on_evicted_tokens_is_refused(llama):
    with attach(llama):
        cache = EvictionCache(policy(StreamingLLM(), 14), llama)
        llama(prompt(30), cache=cache)
    cache.pin(0, 0, 2)
    with pytest.raises(ValueError, match="evicted some of it"):
        cache.pin(0, 5, 8)
    with pytest.raises(ValueError, match="holds 1 rows"):
        cache.pin(1, 0, 2)
    with pytest.raises(ValueError, match="start < stop"):
        cache.pin(0, 8, 5)


def test_pins_above_the_budget_stay_and_a_warning_says_so_once(llama):
    with attach(llama):
        cache = EvictionCache(policy(StreamingLLM(), 14), llama)
        cache.pin(0, 3, 20)
        with pytest.warns(UserWarning, match="row 0 keeps 23 tokens in each head .* more than its budget of 14; pin fewer"):
            llama(prompt(30), cache=cache)
        with warnings.catch_warnings(action="error"):
            llama(prompt(1), cache=cache)
    assert cache.kept_positions()[0][0, 0].tolist() == [0, 1, *range(3, 20), *range(27, 31)]


def test_pins_within_the_budget_are_no_matter_for_a_warning(llama):
    """A pin over sinks, one twice, one of tokens to come, one in a row that lacks most of it: none counts twice, or at all."""
    ids, mask = left_padded([prompt(n)[0] for n in (30, 9)])
    with attach(llama), warnings.catch_warnings(action="error"):
        cache = EvictionCache(policy(StreamingLLM(), 14), llama)
        for pin in ((0, 0, 10), (0, 5, 10), (0, 40, 60), (1, 0, 20)):
            cache.pin(*pin)
        llama(ids, attention_mask=mask, cache=cache)
    assert cache.lengths()[0].tolist() == [[14, 14], [9, 9]]


def test_a_prompt_that_is_pinned_whole_is_kept_whole(llama):
    with attach(llama):
        cache = EvictionCache(policy(budget=14), llama)
        cache.pin(0, 0, 30)
        with pytest.warns(UserWarning, match="budget of 14"):
            got = llama(prompt(30), cache=cache).logits
        want = llama(prompt(1, seed=2), cache=llama(prompt(30)).cache).logits
        assert torch.equal(got, llama(prompt(30)).logits)
        torch.testing.assert_close(llama(prompt(1, seed=2), cache=cache).logits, want, atol=1e-5, rtol=0)


# ---- what is held


@pytest.mark.parametrize("allocate", ALLOCATORS)
def test_bytes_are_really_freed(llama, allocate):
    with attach(llama):
        whole, cut = EvictionCache(None, llama), EvictionCache(policy(KeyNorm(), 32, allocate), llama)
        for cache in (whole, cut):
            llama(prompt(640), cache=cache)
    pages = cut.lengths().add(1 + PAGE - 1).div(PAGE, rounding_mode="floor").sum()
    page_bytes = PAGE * (2 * 8 * 4 + 4)
    held = sum(t.untyped_storage().nbytes() for state in cut.states for t in state.held.tensors())
    assert held == cut.nbytes()
    assert page_bytes * pages <= held <= page_bytes * pages + 3 * 2 * (8 + 4 * 8)
    assert cut.nbytes() < whole.nbytes() / 10


def test_pages_are_given_back_while_decoding(llama):
    with attach(llama):
        cache = EvictionCache(None, llama, decode=policy(budget=16, interval=4))
        llama(prompt(200), cache=cache)
        before = cache.nbytes()
        for step in prompt(4, seed=5).split(1, 1):
            llama(step, cache=cache)
    assert (cache.lengths() == 16).all()
    assert cache.nbytes() < before / 3


def test_what_one_cache_sees_changes_neither_another_nor_its_clones(llama):
    with attach(llama):
        p = policy(H2O())
        one, two = EvictionCache(p, llama), EvictionCache(p, llama)
        llama(prompt(30), cache=one)
        want = one.clone()
        llama(prompt(25, seed=9), cache=two)
        copy = one.clone()
        llama(prompt(4, seed=8), cache=copy)
        assert copy.get_seq_length() == 34 and one.get_seq_length() == 30
        step = prompt(1, seed=7)
        assert torch.allclose(llama(step, cache=one).logits, llama(step, cache=want).logits, atol=1e-5)


def test_reset_makes_it_new(llama):
    with attach(llama):
        cache = EvictionCache(policy(SnapKV()), llama)
        want = generate(llama, prompt(30), cache)
        cache.pin(0, 0, 1)
        cache.reset()
        assert cache.nbytes() == 0 and cache.get_seq_length() == 0 and not cache.pins
        assert torch.equal(generate(llama, prompt(30), cache), want)
        with pytest.raises(ValueError, match="is empty"):
            EvictionCache(policy(), llama).lengths()


# ---- one prefill for many policies

MANY = [
    Policy(scorer, budget, budgets.ALLOCATORS[allocate], num_sinks=2, num_recent=4)
    for allocate in ALLOCATORS
    for budget in (12, Ratio(0.3), Ratio(1.0))
    for scorer in SCORERS
]


@pytest.mark.parametrize("rows", [1, 2])
def test_prefill_many_equals_each_prefill_of_its_own(llama, rows):
    ids, mask = left_padded([prompt(40)[0], prompt(23, seed=4)[0]][:rows])
    with attach(llama):
        for p, cache in zip([None, *MANY], prefill_many(llama, ids, [None, *MANY], mask), strict=True):
            own = EvictionCache(p, llama)
            llama(ids, attention_mask=mask, cache=own)
            assert torch.equal(cache.lengths(), own.lengths())
            for mine, theirs in zip(cache.states, own.states, strict=True):
                assert torch.equal(mine.held.slots().keys, theirs.held.slots().keys)
                assert torch.equal(mine.held.slots().values, theirs.held.slots().values)
                assert torch.equal(mine.held.slots().positions, theirs.held.slots().positions)
                assert torch.equal(mine.queries, theirs.queries)
            own.frozen = True
            question = prompt(3, rows=rows, seed=8)
            longer = torch.cat([mask, torch.ones(rows, 3, dtype=torch.int64)], 1)
            want = llama(question, attention_mask=longer, cache=own).logits
            assert torch.equal(llama(question, attention_mask=longer, cache=cache).logits, want)


def test_caches_of_prefill_many_evict_nothing_until_thawed(llama):
    with attach(llama):
        (cache,) = prefill_many(llama, prompt(40), [policy(budget=12)])
        llama(prompt(5, seed=2), cache=cache)
        assert (cache.lengths() == 17).all()
        cache.frozen = False
        llama(prompt(1, seed=3), cache=cache)
        assert (cache.lengths() == 12).all()


@dataclass(frozen=True)
class Counting(Scorer):
    asked: list

    def score(self, obs) -> Tensor:
        self.asked.append(obs.layer)
        return obs.positions.float()

    def __hash__(self):
        return id(self)


def test_equal_scorers_are_asked_once_for_all_their_policies(llama):
    scorer = Counting([])
    with attach(llama):
        prefill_many(llama, prompt(40), [policy(scorer, budget, allocate) for budget in (12, 20) for allocate in ALLOCATORS])
    assert sorted(scorer.asked) == [0, 1, 2]


@pytest.mark.parametrize("name", sorted(name for name, method in METHODS.items() if not method.requires))
def test_every_method_runs_with_every_allocator(llama, name):
    for allocate in ALLOCATORS:
        with attach(llama):
            cache = EvictionCache(METHODS[name](24, allocate=allocate, num_recent=8, interval=2), llama)
            generate(llama, prompt(40, rows=2), cache, n=5)
        assert cache.lengths().sum((0, 2)).tolist() == [24 * 6] * 2


def test_caches_of_one_prefill_answer_together_as_each_alone(model):
    question = prompt(5, seed=9)
    policies = [None, policy(), policy(KeyNorm(), 17, "adaptive"), policy(H2O(), 9), policy(SnapKV(), 33, "adaptive_global")]
    with attach(model):
        caches = prefill_many(model, prompt(40), policies)
        alone = [model(question, cache=cache.clone()).logits[0] for cache in caches]
        found = model(question.expand(len(caches), -1), cache=together(caches, model)).logits
    assert torch.allclose(found, torch.stack(alone), atol=1e-5)
    assert {cache.get_seq_length() for cache in caches} == {40}


def test_caches_together_can_be_reordered_and_repeated(model):
    with attach(model):
        caches = prefill_many(model, prompt(40), [policy(), policy(KeyNorm(), 17)])
        swapped, doubled = together(caches, model), together(caches, model)
        swapped.reorder_cache(torch.tensor([1, 0]))
        doubled.batch_repeat_interleave(2)
        assert swapped.lengths()[0, :, 0].tolist() == [17, 12] and doubled.lengths()[0, :, 0].tolist() == [12, 12, 17, 17]
        question = prompt(3, seed=4)
        alone = [model(question, cache=cache.clone()).logits[0] for cache in caches]
        assert torch.allclose(model(question.expand(2, -1), cache=swapped).logits, torch.stack(alone[::-1]), atol=1e-5)
        model(question.expand(4, -1), cache=doubled)


def test_caches_that_saw_different_prompts_are_refused_together(llama):
    with attach(llama):
        caches = [prefill_many(llama, prompt(n), [None])[0] for n in (9, 11)]
    with pytest.raises(ValueError, match=r"9, 11"):
        together(caches, llama)


# ---- the memory report


def test_the_report_counts_what_is_held_and_the_peak_before_eviction(llama):
    cache = EvictionCache(policy(budget=16), llama)
    with attach(llama):
        llama(prompt(160), cache=cache)
    report = cache.report()
    assert (report.tokens == 16).all() and report.seen.tolist() == [160]
    assert report.total == cache.nbytes() >= int(report.nbytes.sum())
    page = PAGE * (2 * 8 * 4 + 4)  # key, value and position of 16 tokens
    assert (report.nbytes == 2 * page).all()  # 16 tokens and room for the next
    layer_before = 2 * 11 * page  # 160 tokens and room for the next, two heads
    assert layer_before < report.peak < 3 * layer_before  # a layer evicts before the next one stores


def test_the_report_of_a_selection_over_all_layers_has_them_all_at_its_peak(llama):
    cache = EvictionCache(policy(budget=16, allocate="adaptive_global"), llama)
    with attach(llama):
        llama(prompt(160), cache=cache)
    assert cache.report().peak >= 3 * 2 * 11 * PAGE * (2 * 8 * 4 + 4)


def test_the_report_prints_a_line_per_layer_and_draws(llama, tmp_path):
    cache = EvictionCache(policy(budget=16, allocate="adaptive"), llama)
    with attach(llama):
        llama(prompt(40, rows=2), cache=cache)
    lines = str(cache.report()).splitlines()
    assert len(lines) == 1 + 3 + 1 and "16.0" in lines[1] and "kept 40.0% of 40/40 tokens" in lines[-1]
    cache.report().draw(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_an_empty_cache_has_nothing_to_report(llama):
    with pytest.raises(ValueError, match="is empty; run a forward"):
        EvictionCache(policy(), llama).report()


def test_a_threshold_evicts_within_the_budget_and_again_as_tokens_come(llama):
    scorer = StreamingLLM()  # scores are positions
    with attach(llama):
        cache = EvictionCache(Policy(scorer, 1000, budgets.Threshold(30.0), num_sinks=2, num_recent=4), llama)
        llama(prompt(40), cache=cache)
        assert (cache.lengths() == 2 + 10).all()
        llama(prompt(1), cache=cache)
        assert (cache.lengths() == 2 + 11).all()


# ---- rows for themselves


@pytest.mark.parametrize("few", [0, 1 << 16], ids=["page by page", "at once"])
def test_a_row_of_nan_leaves_the_others_as_they_are_and_is_gone_when_it_is_dropped(llama, few, monkeypatch):
    monkeypatch.setattr(reference, "FEW_LOGITS", few)
    embeddings = llama.get_input_embeddings()(prompt(1, rows=2)).clone()
    with attach(llama):
        cache = EvictionCache(policy(KeyNorm(), 14, "adaptive"), llama)
        llama(prompt(40, rows=2), cache=cache)
        cache.frozen = True
        want = llama(inputs_embeds=embeddings, cache=cache.clone()).logits[0]
        embeddings[1] = torch.nan
        torch.testing.assert_close(llama(inputs_embeds=embeddings, cache=cache).logits[0], want)
        cache.batch_select_indices(torch.tensor([0]))
        for step in prompt(20, seed=4).split(1, 1):  # into pages that the other row has left
            assert llama(step, cache=cache).logits.isfinite().all()


def test_a_row_within_its_budget_keeps_everything_whatever_stands_beside_it(llama):
    p, lengths = policy(StreamingLLM(), Ratio(0.5), "pyramid", num_sinks=0, num_recent=0), []
    parts = [left_padded([prompt(n, seed=n)[0] for n in sizes]) for sizes in ([13, 30], [2, 2], [1, 2])]
    for rows in (1, 2):
        cache, mask = EvictionCache(p, llama), torch.zeros(rows, 0, dtype=torch.long)
        with attach(llama):
            for ids, real in parts:
                mask = torch.cat([mask, real[:rows]], 1)
                llama(ids[:rows], attention_mask=mask, cache=cache)
        lengths.append(cache.lengths()[:, 0])
    assert torch.equal(*lengths)


@pytest.mark.parametrize("method", [m for m in METHODS if not METHODS[m].requires])
def test_a_first_forward_of_padding_only_holds_nothing(llama, method):
    with attach(llama):
        cache = EvictionCache(METHODS[method](40), llama)
        llama(prompt(6, rows=2), attention_mask=torch.zeros(2, 6, dtype=torch.long), cache=cache)
        assert not cache.lengths().any()


def test_a_pin_in_a_row_that_the_forward_lacks_is_refused(llama):
    cache = EvictionCache(policy(), llama)
    cache.pin(3, 5, 8)
    with attach(llama), pytest.raises(ValueError, match=r"pin\(row=3, start=5, stop=8\): the forward has 2 rows"):
        llama(prompt(20, rows=2), cache=cache)


def test_rows_counted_from_the_end_bring_their_pins_along(llama):
    with attach(llama):
        cache = EvictionCache(policy(), llama)
        cache.pin(1, 5, 8)
        llama(prompt(20, rows=2), cache=cache)
    cache.batch_select_indices(torch.tensor([-1]))
    assert cache.pins == [(0, 5, 8)]


def test_a_deep_copy_is_a_clone(llama):
    with attach(llama):
        cache = EvictionCache(policy(), llama)
        llama(prompt(20), cache=cache)
        other = copy.deepcopy(cache)
        llama(prompt(3), cache=other)
    assert (cache.get_seq_length(), other.get_seq_length()) == (20, 23)


def test_what_stopped_half_way_is_neither_cloned_nor_reported(llama):
    class Breaks(KeyNorm):
        def score(self, obs):
            raise KeyboardInterrupt

    cache = EvictionCache(policy(Breaks()), llama)
    with attach(llama), pytest.raises(KeyboardInterrupt):
        llama(prompt(20), cache=cache)
    for use in (cache.clone, cache.report, cache.lengths, lambda: cache.batch_repeat_interleave(2)):
        with pytest.raises(ValueError, match="stopped half way"):
            use()


def test_the_peak_counts_sliding_layers(llama):
    gemma = tiny_family("gemma3", sliding_window=64)
    with attach(gemma):
        cache = EvictionCache(policy(StreamingLLM(), 8), gemma)
        gemma(prompt(100), cache=cache)
    sliding = sum(t.nbytes for layer in cache.sliding for t in (layer.keys, layer.values))
    stored = 2 * 100 * (2 * 8 * 4 + 4)  # keys, values and positions of one layer before it evicts
    assert cache.report().peak >= sliding + stored


@pytest.mark.parametrize(
    ("pin", "text"),
    [((0, 5, 10**30), "pin: stop=10+ is above"), ((0, 1.5, 3), r"pin: start=1\.5 is no whole number"), (("a", 1, 3), "row='a'")],
)
def test_a_pin_that_counts_no_tokens_is_refused(llama, pin, text):
    with pytest.raises(ValueError, match=text):
        EvictionCache(policy(), llama).pin(*pin)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_window_far_above_the_prompt_holds_what_was_seen_and_scores_as_one_of_its_length(llama, rows, monkeypatch):
    monkeypatch.setattr(runtime_step, "WHOLE_WINDOW", 2)
    (ids, mask), kept = left_padded([prompt(21)[0], prompt(13)[0]][:rows]), []
    for window in (2**31 - 1, 40):
        cache = EvictionCache(policy(SnapKV(observation_window=window)), llama)
        with attach(llama):
            generate(llama, ids, cache, attention_mask=mask)
        kept.append(cache.kept_positions())
        assert cache.states[0].queries.shape[2] <= 64
    assert all(torch.equal(mine, other) for mine, other in zip(*kept, strict=True))


def test_no_cache_is_made_of_anything_but_a_policy(llama):
    for make in (lambda: EvictionCache("snapkv", llama), lambda: EvictionCache(policy(), llama, decode="snapkv")):
        with pytest.raises(ValueError, match=r"takes a Policy, this is 'snapkv'; methods\.METHODS"):
            make()


def test_taking_no_row_is_refused(llama):
    cache = EvictionCache(policy(), llama)
    with attach(llama):
        llama(prompt(9, rows=2), cache=cache)
    with pytest.raises(ValueError, match="holds 2 rows and 0 are asked for"):
        cache.reorder_cache(torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="repeats=0 leaves no row of 2"):
        cache.batch_repeat_interleave(0)


def test_a_cache_that_holds_tokens_is_not_saved(llama, tmp_path):
    cache = EvictionCache(policy(), llama)
    with attach(llama):
        llama(prompt(9), cache=cache)
    with pytest.raises(ValueError, match="can't be pickled or saved"):
        torch.save(cache, tmp_path / "cache.pt")
