"""Renumbered positions: what is held stands where it would stand if evicted tokens had never been."""

import pytest
import torch
from transformers import GlmConfig, GlmForCausalLM, LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from learnkv import budgets
from learnkv.heuristics.expected_attention import ExpectedAttention
from learnkv.heuristics.key_norm import KeyNorm
from learnkv.heuristics.kvzip import KVzip
from learnkv.heuristics.snapkv import SnapKV
from learnkv.heuristics.streaming_llm import StreamingLLM
from learnkv.observation import Slots
from learnkv.policy import Policy
from learnkv.rope import turn_back
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from learnkv.runtime.positions import RenumberedSlots
from tests.test_cache import left_padded, policy, prompt
from tests.tiny_models import masked_logits

FREQUENCIES = torch.tensor([1.0, 0.1, 0.01])  # of 6 of 8 dimensions


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def tiny(layers):
    """Keys and values of a model of one layer hang on their own token alone."""
    torch.manual_seed(0)
    shape = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=layers, initializer_range=0.2, max_position_embeddings=64)).eval()


def renumbered(model, scorer, budget=12, **settings):
    return EvictionCache(policy(scorer, budget, **settings), model, positions="renumbered")


def turned(keys, positions):
    """keys [..., D] without RoPE as they are at positions [...]."""
    angle = positions[..., None] * FREQUENCIES
    return turn_back(keys.double(), angle.double().cos(), -angle.double().sin()).float()


@pytest.mark.parametrize("T", [1, 3])
def test_a_stream_equals_the_plain_model_on_the_tokens_held_for_far_more_positions_than_it_has(T):
    model, stream = tiny(1), prompt(300)
    with attach(model):
        cache = renumbered(model, StreamingLLM())
        for chunk in stream.split(T, 1):
            held = [] if not cache.get_seq_length() else cache.kept_positions()[0][0, 0].tolist()
            begin = cache.get_seq_length()
            got = model(chunk, cache=cache).logits
            alone = model(torch.cat([stream[:, held], stream[:, begin : begin + T]], 1)).logits[:, -T:]
            torch.testing.assert_close(got, alone, atol=1e-4, rtol=0)
    assert (cache.lengths() == 12).all()


def test_keys_stand_where_tokens_held_follow_each_other_whatever_each_head_holds():
    born = torch.randn(1, 2, 5, 8)
    positions = torch.tensor([[[0, 3, 7, 8, 9], [5, 9, -1, -1, -1]]], dtype=torch.int32)
    slots = Slots.dense(turned(born, positions), torch.zeros(1, 2, 5, 8), positions)
    got = RenumberedSlots.of(slots, torch.tensor([10]), FREQUENCIES)
    want = turned(born, torch.tensor([[[5, 6, 7, 8, 9], [8, 9, 0, 0, 0]]]))
    torch.testing.assert_close(got.keys[0, 0], want[0, 0])
    torch.testing.assert_close(got.keys[0, 1, :2], want[0, 1, :2])
    assert torch.equal(got.keys[0, 0, 2:], slots.keys[0, 0, 2:])  # nothing after them was evicted
    assert torch.equal(got.positions, slots.positions)


def test_keys_in_half_precision_are_turned_from_how_they_were_born_and_rounded_once():
    born, positions = torch.randn(1, 1, 3, 8), torch.tensor([[[0, 6, 9]]], dtype=torch.int32)
    slots = Slots.dense(turned(born, positions).bfloat16(), torch.zeros(1, 1, 3, 8), positions)
    exact = Slots.dense(slots.keys.float(), slots.values, positions)
    half, full = (RenumberedSlots.of(s, torch.tensor([10]), FREQUENCIES).keys for s in (slots, exact))
    assert torch.equal(half, full.bfloat16())


def test_with_nothing_evicted_positions_are_the_original_ones():
    model, ids = tiny(3), prompt(20)
    with attach(model):
        cache = renumbered(model, StreamingLLM(), budget=100)
        model(ids[:, :15], cache=cache)
        got = model(ids[:, 15:], cache=cache).logits
    torch.testing.assert_close(got, model(ids).logits[:, 15:], atol=1e-5, rtol=0)


def test_evicting_at_the_front_alone_leaves_all_distances_as_they_were():
    """Without sinks a window's tokens follow each other anyway."""
    model, ids, new = tiny(3), prompt(40), prompt(5, seed=2)
    with attach(model):
        cache = renumbered(model, StreamingLLM(), num_sinks=0)
        model(ids, cache=cache)
        held = cache.kept_positions()
        got = model(new, cache=cache).logits
    torch.testing.assert_close(got, masked_logits(model, ids, new, held), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scorer", [KeyNorm(), SnapKV(observation_window=4)], ids=lambda s: type(s).__name__)
def test_a_left_padded_batch_gives_what_each_row_gives_alone(scorer):
    model, rows = tiny(3), [prompt(n, seed=n)[0] for n in (30, 19)]
    ids, mask = left_padded(rows)

    def answer(ids, **given):
        cache = renumbered(model, scorer, allocate="adaptive", num_sinks=2, num_recent=4)
        out = model.generate(ids, cache=cache, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, **given)
        return out[:, -8:]

    with attach(model):
        together = answer(ids, attention_mask=mask)
        for row, got in zip(rows, together, strict=True):
            assert torch.equal(got, answer(row[None])[0])


def test_scorers_see_the_keys_that_attention_sees():
    seen = []

    class Spy(KeyNorm):
        def score(self, obs):
            seen.append(obs.keys)
            return super().score(obs)

    model = tiny(1)
    with attach(model):
        cache = renumbered(model, Spy())
        model(prompt(30), cache=cache)
        model(prompt(1), cache=cache)
    held = cache.states[0].held.slots()
    assert not torch.equal(seen[1][:, :, :5], held.keys[:, :, :5])


@pytest.mark.parametrize(
    ("scorer", "positions", "says"),
    [
        (ExpectedAttention(), "renumbered", "ExpectedAttention reads keys as they were born"),
        (KVzip(None), "renumbered", "KVzip reads keys as they were born"),
        (KeyNorm(), "new", "positions='new' is neither"),
    ],
)
def test_what_can_not_be_renumbered_is_refused_by_name(scorer, positions, says):
    with pytest.raises(ValueError, match=says):
        EvictionCache(Policy(scorer, 64, budgets.uniform), tiny(1), positions=positions)


SHAPE = dict(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0
)


@pytest.mark.parametrize(
    ("lm", "config"),
    [
        (GlmForCausalLM, GlmConfig(**SHAPE, head_dim=8)),  # interleaved pairs
        (SmolLM3ForCausalLM, SmolLM3Config(**SHAPE, no_rope_layers=[1, 0])),  # a layer without
        (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})),
    ],
    ids=["interleaved", "not in all layers", "dynamic"],
)
def test_a_model_whose_keys_one_rope_does_not_turn_is_refused(lm, config):
    torch.manual_seed(0)
    model = lm(config).eval()
    with pytest.raises(ValueError, match='use "original"'):
        EvictionCache(policy(StreamingLLM()), model, positions="renumbered")
    if config.model_type == "glm":
        with pytest.raises(ValueError, match="ExpectedAttention turns keys by one RoPE"):
            EvictionCache(policy(ExpectedAttention()), model)
