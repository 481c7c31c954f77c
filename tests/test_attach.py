"""The bridge to transformers: what it leaves alone, what it refuses, and that it is gone afterwards."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama import modeling_llama

import learnkv
from learnkv.budgets import ALLOCATORS
from learnkv.heuristics.h2o import H2O
from learnkv.heuristics.key_diff import KeyDiff
from learnkv.heuristics.snapkv import SnapKV
from learnkv.methods import METHODS
from learnkv.observation import Scorer
from learnkv.policy import Policy
from learnkv.runtime.attach import attach, evict
from learnkv.runtime.cache import EvictionCache
from tests.tiny_models import masked_logits, tiny

SHAPE = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
SPECIAL = dict(pad_token_id=0, eos_token_id=96, bos_token_id=1, initializer_range=0.2)
POLICY = Policy(KeyDiff(), 12, num_sinks=2, num_recent=4)

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


def llama(attention="sdpa"):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **SPECIAL, head_dim=8, attn_implementation=attention)).eval()


def gemma():
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    shape = SHAPE | dict(num_hidden_layers=4, num_key_value_heads=1, head_dim=16, sliding_window=8, layer_types=kinds)
    return Gemma3ForCausalLM(Gemma3TextConfig(**shape, **SPECIAL, query_pre_attn_scalar=24)).eval()


@pytest.fixture
def model():
    return llama()


def prompt(n, rows=1, seed=1):
    return torch.randint(2, 96, (rows, n), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, n=8, **given):
    return model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False, **given)


def padded(n=20, pads=7):
    ids, mask = prompt(n, rows=2), torch.ones(2, n, dtype=torch.int64)
    ids[0, :pads], mask[0, :pads] = 0, 0
    return ids, mask


def hooks_of(model):
    return [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()]


# ---- what it leaves alone


@pytest.mark.parametrize("make", [llama, lambda: llama("eager"), gemma], ids=["sdpa", "eager", "gemma3"])
def test_other_caches_inside_attach_give_the_plain_result_exactly(make):
    model = make()
    ids, mask = padded()

    def results():
        yield model(ids, attention_mask=mask, cache=DynamicCache(config=model.config)).logits
        yield model(ids, attention_mask=mask, use_cache=False).logits
        yield generate(model, ids, attention_mask=mask)

    want = list(results())
    with attach(model):
        got = list(results())
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_an_eager_model_serves_an_eviction_cache_too():
    model = llama("eager")
    want = generate(model, prompt(20))
    with attach(model):
        assert torch.equal(generate(model, prompt(20), cache=EvictionCache(None, model)), want)
        cache = EvictionCache(POLICY, model)
        generate(model, prompt(20), cache=cache)
    assert (cache.lengths() == 12).all()


def test_the_model_is_as_before_after_the_block(model):
    before = hooks_of(model), model.config._attn_implementation
    with attach(model):
        assert hooks_of(model) != before[0]
    assert (hooks_of(model), model.config._attn_implementation) == before


class Broken(Scorer):
    def score(self, obs):
        raise RuntimeError("broken scorer")


def test_the_model_is_as_before_after_an_exception(model):
    before = hooks_of(model), model.config._attn_implementation
    want = model(prompt(20)).logits
    with pytest.raises(RuntimeError, match="broken scorer"), evict(model, Policy(Broken(), 12, num_recent=4)):
        generate(model, prompt(20))
    assert (hooks_of(model), model.config._attn_implementation) == before
    assert torch.equal(model(prompt(20)).logits, want)


def test_a_failed_forward_inside_the_block_does_not_touch_the_next(model):
    want = generate(model, prompt(20))
    with attach(model):
        with pytest.raises(RuntimeError, match="broken scorer"):
            model(prompt(20), cache=EvictionCache(Policy(Broken(), 12, num_recent=4), model))
        assert torch.equal(generate(model, prompt(20)), want)
        assert torch.equal(generate(model, prompt(20), cache=EvictionCache(None, model)), want)


def test_a_cache_whose_forward_stopped_half_way_says_so(model):
    cache = EvictionCache(Policy(Broken(), 12, num_recent=4), model)
    with attach(model):
        with pytest.raises(RuntimeError, match="broken scorer"):
            model(prompt(20), cache=cache)
        with pytest.raises(ValueError, match="stopped half way"):
            model(prompt(1), cache=cache)
        cache.reset()
        cache.frozen = True
        model(prompt(20), cache=cache)
    assert (cache.lengths() == 20).all()


def test_attach_inside_attach_stays_until_the_outer_one_ends(model):
    with attach(model):
        with attach(model):
            pass
        model(prompt(20), cache=EvictionCache(POLICY, model))
    assert model.config._attn_implementation == "sdpa"


def test_two_models_may_be_attached_at_once():
    one, two = llama(), llama("eager")
    want = one(prompt(20)).logits, two(prompt(20)).logits
    with attach(one), attach(two):
        got = one(prompt(20), cache=EvictionCache(None, one)).logits, two(prompt(20)).logits
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# ---- the two-line form


def test_evict_gives_every_generate_a_fresh_cache(model):
    with learnkv.evict(model, "snapkv", budget=24, num_recent=8):
        outs = [generate(model, prompt(40), return_dict_in_generate=True) for _ in range(2)]
    for out in outs:
        assert isinstance(out.cache, learnkv.EvictionCache)
        assert (out.cache.lengths() == 24).all()
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert outs[0].cache is not outs[1].cache


def test_evict_equals_a_cache_of_ones_own(model):
    with attach(model):
        want = generate(model, prompt(40), cache=EvictionCache(POLICY, model))
    with evict(model, POLICY):
        assert torch.equal(generate(model, prompt(40)), want)
        assert isinstance(model(prompt(30)).cache, EvictionCache)
        assert isinstance(model.model(prompt(30)).cache, EvictionCache)
        mine = DynamicCache(config=model.config)
        generate(model, prompt(40), cache=mine)
        assert mine.get_seq_length() == 47


def test_chunked_prefill_of_generate_goes_through_one_cache(model):
    with attach(model):
        cache = EvictionCache(POLICY, model)
        generate(model, prompt(40), cache=cache, prefill_chunk_size=15)
    assert cache.get_seq_length() == 47
    assert (cache.lengths() == 12).all()


def test_importing_learnkv_imports_neither_torch_nor_transformers():
    code = "import sys, learnkv; assert not {'torch', 'transformers'} & set(sys.modules); learnkv.Policy"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ctrl_c_while_a_command_still_imports_is_one_line():
    code = "import sys; sys.argv = ['-m']; import learnkv; raise KeyboardInterrupt"  # what python -m learnkv.train looks like by then
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "interrupted\n" and done.returncode in (130, -2)


@pytest.mark.parametrize("name", ["EvictionCache", "Policy", "Scorer", "attach", "evict", "load_gate", "load_model"])
def test_public_names_are_there(name):
    assert callable(getattr(learnkv, name))
    assert name in dir(learnkv)
    assert not hasattr(learnkv, name + "s")


def test_evict_says_what_is_wrong_before_anything_runs(model):
    with pytest.raises(ValueError, match="needs budget="):
        learnkv.evict(model, "snapkv")
    with pytest.raises(ValueError, match="snapkv"):
        learnkv.evict(model, "snapvk", budget=100)
    with pytest.raises(ValueError, match="drop budget"):
        learnkv.evict(model, POLICY, budget=100)
    with evict(model, POLICY), pytest.raises(ValueError, match="use_cache=False"):
        model(prompt(20), use_cache=False)


# ---- beams and other rows


@pytest.mark.parametrize("rows", [1, 2])
def test_beam_search_under_a_full_budget_is_the_plain_models(model, rows):
    ids = prompt(20, rows=rows)
    with attach(model):
        got = generate(model, ids, cache=EvictionCache(Policy(KeyDiff(), 64), model), num_beams=3)
    assert torch.equal(got, generate(model, ids, num_beams=3))


def test_beam_search_evicts_each_beam_down_to_the_budget(model):
    cache = EvictionCache(POLICY, model)
    with attach(model):
        generate(model, prompt(20, rows=2), cache=cache, num_beams=3)
    assert cache.lengths().shape[1] == 6 and (cache.lengths() <= POLICY.budget).all()


def test_rows_taken_from_a_cache_go_on_as_they_would_have():
    model = gemma()
    ids, mask = padded(20, 7)
    rows, step = torch.tensor([1, 0, 1]), prompt(1, rows=3, seed=5)
    with attach(model):
        cache = EvictionCache(Policy(SnapKV(observation_window=4), 12, num_sinks=2, num_recent=4), model)
        model(ids, attention_mask=mask, cache=cache)
        cache.pin(1, 0, 2)
        alone = [cache.clone() for _ in rows]
        cache.batch_select_indices(rows)
        assert cache.pins == [(0, 0, 2), (2, 0, 2)]
        for _ in range(3):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            got = model(step, attention_mask=mask[rows], cache=cache).logits
            for b, (row, own) in enumerate(zip(rows, alone, strict=True)):
                want = model(step[b].expand(2, 1), attention_mask=mask, cache=own).logits[row]
                assert torch.allclose(got[b], want, atol=1e-5)


# ---- what it refuses


def test_an_eviction_cache_outside_attach_says_so(model):
    with pytest.raises(ValueError, match=r"inside `with learnkv.attach\(model\):` only"):
        model(prompt(20), cache=EvictionCache(POLICY, model))


REFUSED = {
    "prompt lookup": (dict(prompt_lookup_num_tokens=2), "prompt_lookup_num_tokens|Assisted decoding requires"),
    "attentions": (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions=True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_generate_with_what_cannot_be_right_is_refused_by_name(model, case):
    given, message = REFUSED[case]
    with attach(model), pytest.raises(ValueError, match=message):
        generate(model, prompt(20), cache=EvictionCache(POLICY, model), **given)
    with evict(model, POLICY), pytest.raises(ValueError, match=message):
        generate(model, prompt(20), **given)


def test_an_assistant_model_is_refused_by_name(model):
    with attach(model), pytest.raises(ValueError, match="assistant_model"):
        generate(model, prompt(20), cache=EvictionCache(POLICY, model), assistant_model=llama())


def test_a_static_cache_is_refused_by_name(model):
    with attach(model), pytest.raises(ValueError, match="StaticCache evicts nothing"):
        model(prompt(20), cache=StaticCache(config=model.config, max_cache_len=64))


def test_masks_that_do_not_fit_are_refused_with_both_shapes(model):
    with attach(model):
        cache = EvictionCache(POLICY, model)
        with pytest.raises(ValueError, match="4-D mask"):
            model(prompt(20), cache=cache, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool))
        model(prompt(20), cache=cache)
        with pytest.raises(ValueError, match=r"\[1, 12\].*give \[1, 21\]"):
            model(prompt(1), cache=cache, attention_mask=torch.ones(1, 12))
        with pytest.raises(ValueError, match="holds 1 rows and the forward has 2"):
            model(prompt(1, rows=2), cache=cache)
        model(prompt(1), cache=cache, attention_mask=torch.ones(1, 21))


def test_a_prompt_of_no_tokens_is_refused(model):
    with attach(model), pytest.raises(ValueError, match="0 tokens"):
        model(torch.zeros(1, 0, dtype=torch.int64), cache=EvictionCache(POLICY, model))


def test_embeddings_instead_of_tokens_work_unless_tokens_are_read(model):
    embeddings = model.model.embed_tokens(prompt(20))
    with attach(model):
        cache = EvictionCache(POLICY, model)
        got = model(inputs_embeds=embeddings, cache=cache).logits
        assert torch.equal(got, model(prompt(20)).logits)
        with pytest.raises(ValueError, match="input_ids, not inputs_embeds"):
            model(inputs_embeds=embeddings, cache=EvictionCache(METHODS["keep_rare"](24, num_recent=8), model))


def test_a_cache_for_another_model_is_refused(model):
    other = LlamaForCausalLM(LlamaConfig(**SHAPE | dict(num_hidden_layers=2), **SPECIAL, head_dim=8))
    with attach(model), pytest.raises(ValueError, match="2 layers, the model 3"):
        model(prompt(20), cache=EvictionCache(POLICY, other))


@pytest.mark.parametrize(
    ("knobs", "sides"),
    [({"num_key_value_heads": 1}, "3 evictable layers x 1 KV heads x 8, the model has 3 x 2 x 8"), ({"head_dim": 16}, "x 16, the model")],
)
def test_a_cache_of_another_geometry_is_refused_and_stays_as_it_was(model, knobs, sides):
    other = LlamaForCausalLM(LlamaConfig(**SHAPE | {"head_dim": 8} | knobs, **SPECIAL))
    cache = EvictionCache(POLICY, other)
    with attach(other):
        other(prompt(20), cache=cache)
    with attach(model), pytest.raises(ValueError, match=sides):
        model(prompt(1), cache=cache)
    assert cache.lengths().shape[0] == 3


LATENT = SHAPE | dict(num_key_value_heads=4, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
EXPERTS = dict(n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1)
FOREIGN = {
    "soft-caps": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8)),
    "later tokens": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=8, use_bidirectional_attention=True)),
    "MLA": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT, **EXPERTS)),
    "sink logits": lambda: GptOssForCausalLM(GptOssConfig(**SHAPE, head_dim=8, num_local_experts=2, num_experts_per_tok=1)),
    "`self_attn`": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4)),
    "encoder-decoder": lambda: T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=32, d_ff=32, num_layers=1, num_heads=4, d_kv=8)),
}


def test_a_mask_that_lets_tokens_see_later_ones_is_refused(model, monkeypatch):
    """As prefixes of images do; without an EvictionCache it is the model's own affair."""
    sees_prefix = partial(modeling_llama.create_causal_mask, or_mask_function=lambda batch, head, q, kv: kv < 5)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", sees_prefix)
    want = model(prompt(20)).logits
    with attach(model):
        assert torch.equal(model(prompt(20)).logits, want)
        with pytest.raises(ValueError, match="a mask that is not causal"):
            model(prompt(20), cache=EvictionCache(POLICY, model))


@pytest.mark.parametrize("problem", FOREIGN)
def test_a_model_whose_attention_cannot_be_served_is_refused_by_name(problem):
    model = FOREIGN[problem]()
    with pytest.raises(ValueError, match=f"{type(model).__name__}.*{problem}"), attach(model):
        pass


def test_a_transformers_that_loses_the_handle_is_named(model):
    lose = lambda module, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "learnkv"})  # noqa: E731
    with attach(model):
        handle = model.model.layers[1].self_attn.register_forward_pre_hook(lose, with_kwargs=True)
        with pytest.raises(RuntimeError, match=r"transformers 5\.\d+"):
            model(prompt(20), cache=EvictionCache(POLICY, model))
        handle.remove()


# ---- families of models and shapes of heads

FAMILIES = {family: lambda family=family: tiny(family) for family in ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3")}
HEADS = {"MHA": (4, 4), "G=3": (6, 2), "G=4": (8, 2), "G=7": (14, 2), "G=8": (16, 2), "MQA": (4, 1)}


def llama_of(heads, kv_heads):
    """Its weights shrink as it widens, so that its logits are as large as the others'."""
    shape = dict(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    return tiny("llama", **shape, initializer_range=0.2 * (4 / heads) ** 0.5)


SERVED = FAMILIES | {name: lambda heads=heads: llama_of(*heads) for name, heads in HEADS.items()}
READING = {  # everything that a scorer may ask of a model: queries, mass, queries before rotation
    "snapkv": dict(allocate="adaptive"),
    "h2o": dict(allocate="adaptive_global"),
    "expected_attention": dict(allocate="uniform", future=8),
}


@pytest.mark.parametrize("served", SERVED)
def test_every_family_under_a_full_budget_is_the_plain_model(served):
    model = SERVED[served]()
    ids, mask = padded(30, 7)
    want = generate(model, ids, attention_mask=mask)
    with attach(model):
        for name, knobs in READING.items():
            assert torch.equal(generate(model, ids, attention_mask=mask, cache=EvictionCache(METHODS[name](1000, **knobs), model)), want)


@pytest.mark.parametrize("name", READING)
@pytest.mark.parametrize("served", SERVED)
def test_what_every_family_evicts_is_as_if_masked(served, name):
    model, new = SERVED[served](), prompt(5, seed=2)
    with attach(model):
        cache = EvictionCache(METHODS[name](14, num_sinks=2, num_recent=4, **READING[name]), model)
        model(prompt(40), cache=cache)
        held = cache.kept_positions()
        got = model(new, cache=cache).logits
    assert all((positions >= 0).sum() < 40 * positions.shape[1] for positions in held)
    torch.testing.assert_close(got, masked_logits(model, prompt(40), new, held), atol=1e-5, rtol=0)


def test_queries_before_rotation_are_taken_from_a_fused_projection_too():
    """A Phi-3 and a Llama of the same weights keep the same."""
    fused, split = tiny("phi3"), tiny("llama")
    for theirs, ours in zip(fused.model.layers, split.model.layers, strict=True):
        attention, mlp = ours.self_attn, ours.mlp
        parts = attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
        theirs.self_attn.qkv_proj.weight.copy_(torch.cat(parts))
        theirs.self_attn.o_proj.weight.copy_(attention.o_proj.weight)
        theirs.mlp.gate_up_proj.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        theirs.mlp.down_proj.weight.copy_(mlp.down_proj.weight)
    fused.model.embed_tokens.weight.copy_(split.model.embed_tokens.weight)
    held = []
    for model in (fused, split):
        with attach(model):
            cache = EvictionCache(METHODS["expected_attention"](12, num_sinks=2, num_recent=4, future=8), model)
            model(prompt(40), cache=cache)
        held.append(torch.stack(cache.kept_positions()))
    assert torch.equal(*held)


def test_a_scorer_of_queries_before_rotation_names_a_model_whose_queries_it_cannot_find(model):
    for block in model.model.layers:
        block.self_attn.q_proj = torch.nn.Linear(32, 64)  # twice as wide: queries and gates, say
    with pytest.raises(ValueError, match="ExpectedAttention reads queries before rotation, and LlamaForCausalLM projects them in a way"):
        EvictionCache(METHODS["expected_attention"](40), model)
    EvictionCache(METHODS["snapkv"](40), model)


def test_a_model_of_sliding_windows_only_is_refused_by_name_and_runs_as_ever_without_an_eviction_cache():
    model = tiny("mistral", sliding_window=8)
    want = generate(model, prompt(30))
    with pytest.raises(ValueError, match="MistralForCausalLM has sliding-window layers only"):
        learnkv.evict(model, "snapkv", budget=24, num_recent=8).__enter__()
    with attach(model):
        assert torch.equal(generate(model, prompt(30)), want)


# ---- number types


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", READING)
def test_under_autocast_a_full_budget_is_the_plain_model_and_a_small_one_is_held(model, name, dtype):
    whole, cache = EvictionCache(METHODS[name](1000), model), EvictionCache(METHODS[name](24, num_recent=8, **READING[name]), model)
    with torch.autocast("cpu", dtype), attach(model):
        assert torch.equal(model(prompt(40), cache=whole).logits, model(prompt(40)).logits)
        assert generate(model, prompt(40), cache=cache).shape == (1, 48)
    assert cache.lengths().sum() == 24 * 6


@pytest.mark.parametrize("allocate", ["uniform", "adaptive_global"])
def test_scorers_compute_without_autocast(model, allocate):
    class Asking(Scorer):
        memory_size = 1

        def remember(self, obs):
            autocast.append(torch.is_autocast_enabled("cpu"))
            return obs.memory

        def score(self, obs):
            autocast.append(torch.is_autocast_enabled("cpu"))
            return obs.positions.float()

    autocast = []
    cache = EvictionCache(Policy(Asking(), 12, ALLOCATORS[allocate], num_recent=4), model)
    with torch.autocast("cpu", torch.bfloat16), attach(model):
        generate(model, prompt(20), cache=cache)
    assert autocast and not any(autocast)


def test_a_forward_in_another_number_type_is_refused_with_both(model):
    cache = EvictionCache(POLICY, model)
    with attach(model):
        model(prompt(20), cache=cache)
        model.bfloat16()
        with pytest.raises(ValueError, match="holds keys and values in float32 and float32, this forward brings bfloat16 and bfloat16"):
            model(prompt(1), cache=cache)


def test_a_cache_filled_in_inference_mode_says_that_it_goes_on_there_only(model):
    cache = EvictionCache(POLICY, model)
    with attach(model):
        with torch.inference_mode():
            model(prompt(20), cache=cache)
        with pytest.raises(ValueError, match=r"filled inside torch.inference_mode\(\)"):
            model(prompt(1), cache=cache)
        with torch.inference_mode():
            model(prompt(1), cache=cache)
    assert cache.get_seq_length() == 21


def test_a_clone_that_ran_in_inference_mode_is_named_to_its_siblings(model):
    with attach(model):
        base = EvictionCache(POLICY, model)
        model(prompt(60), cache=base)
        first, second = base.clone(), base.clone()
        with torch.inference_mode():
            for _ in range(3):
                model(prompt(20, seed=3), cache=first)
        with pytest.raises(ValueError, match="or a clone that shares its pages"):
            model(prompt(20, seed=3), cache=second)


def test_a_mask_that_hides_what_was_seen_is_refused_with_both_numbers(model):
    mask = torch.ones(1, 23, dtype=torch.long)
    mask[0, 2:15] = 0
    with attach(model):
        cache = EvictionCache(None, model)
        model(prompt(20), cache=cache)
        with pytest.raises(ValueError, match="shows 7 of the earlier tokens of row 0, this EvictionCache saw 20"):
            model(prompt(3), attention_mask=mask, cache=cache)
        model(prompt(3), attention_mask=torch.ones_like(mask), cache=cache)


def test_a_gradient_through_a_cache_is_refused_rather_than_wrong(model):
    ids = prompt(20)
    with attach(model), torch.enable_grad():
        model.requires_grad_(True)
        loss = model(ids, labels=ids, cache=EvictionCache(None, model)).loss
        with pytest.raises(ValueError, match="no gradient goes through an EvictionCache"):
            loss.backward()


# ---- sliding-window layers stay transformers' own


@pytest.mark.parametrize("scorer", [KeyDiff(), H2O(), SnapKV()], ids=lambda s: type(s).__name__)
def test_a_hybrid_model_evicts_in_its_full_layers_only(scorer):
    model = gemma()
    want = generate(model, prompt(30))
    with attach(model):
        assert torch.equal(generate(model, prompt(30), cache=EvictionCache(Policy(scorer, 1000), model)), want)
        cache = EvictionCache(Policy(scorer, 12, num_sinks=2, num_recent=4), model)
        generate(model, prompt(30), cache=cache)
    assert cache.lengths().tolist() == [[[12]], [[12]]]
    assert cache.layers[0].keys.shape[2] == 7
    assert cache.get_seq_length() == 37


def test_a_left_padded_hybrid_batch_gives_what_each_prompt_gives_alone():
    model = gemma()
    ids, mask = padded(20, 7)
    p = Policy(KeyDiff(), 12, num_sinks=2, num_recent=4)
    with attach(model):
        got = generate(model, ids, attention_mask=mask, cache=EvictionCache(p, model))[:, 20:]
        for b, start in enumerate((7, 0)):
            assert torch.equal(generate(model, ids[b : b + 1, start:], cache=EvictionCache(p, model))[0, 20 - start :], got[b])


def test_a_clone_and_a_reset_take_the_sliding_layers_along():
    model = gemma()
    with attach(model):
        cache = EvictionCache(POLICY, model)
        model(prompt(20), cache=cache)
        copy = cache.clone()
        want = model(prompt(1, seed=3), cache=copy).logits
        assert torch.allclose(model(prompt(1, seed=3), cache=cache).logits, want, atol=1e-5)  # one of them lies in runs, the other not
        cache.reset()
        model(prompt(20), cache=cache)
        assert torch.allclose(model(prompt(1, seed=3), cache=cache).logits, want, atol=1e-5)
