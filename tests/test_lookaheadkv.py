"""LookaheadKV: its loss, its published sizes, and an adapter that acts on its rows alone."""

import copy
import threading

import pytest
import torch

from learnkv.gates.lookaheadkv import LookaheadKV, LookaheadKVConfig, divergence, normalised
from learnkv.models import BaseModel, describe
from learnkv.policy import Policy
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from tests.probe_parts import gate_of, ids, model, moved_gate, rows_by_hand, served, trace
from tests.tiny_models import tiny
from tests.training_parts import batch_of


def test_divergence_of_the_worked_example():
    target, shares = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    assert divergence(target, shares).item() == pytest.approx(0.0724603, abs=1e-7)
    assert divergence(normalised(3 * target), normalised(0.2 * shares)).item() == pytest.approx(0.0724603, abs=1e-6)


# layers, KV heads, query heads, head_dim, hidden size, MLP width of the published configurations
PUBLISHED = {
    "meta-llama/Llama-3.2-1B": ((16, 8, 32, 64, 2048, 8192), 5_402_624),
    "meta-llama/Llama-3.2-3B": ((28, 8, 24, 128, 3072, 8192), 11_902_976),
    "meta-llama/Llama-3.1-8B": ((32, 8, 32, 128, 4096, 14336), 20_553_728),
    "Qwen/Qwen3-1.7B": ((28, 8, 16, 128, 2048, 6144), 8_527_872),
    "Qwen/Qwen3-4B": ((36, 8, 32, 128, 2560, 9728), 16_220_160),
    "Qwen/Qwen3-8B": ((36, 8, 32, 128, 4096, 12288), 21_454_848),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    (layers, kv_heads, heads, head_dim, hidden, width), count = PUBLISHED[name]
    base = BaseModel(name, "", layers, kv_heads, heads, head_dim, hidden, layers=tuple(range(layers)), intermediate_size=width)
    with torch.device("meta"):
        gate = LookaheadKV(LookaheadKVConfig(), base)
    assert sum(p.numel() for p in gate.parameters()) == count


# ---- scores


def with_deltas(gate, lm):
    """A copy of the model with the adapter added to its weights, no PEFT involved."""
    other = copy.deepcopy(lm)
    for path, a, b in gate.adapter.targets():
        other.model.get_submodule(path).weight.data += (gate.config.alpha / gate.config.rank * b @ a).to(lm.dtype)
    return other


def test_served_scores_are_the_formula_in_float64():
    gate, tokens = moved_gate("lookaheadkv"), ids(26)
    plain = copy.deepcopy(model()).double()
    shares = rows_by_hand(plain, with_deltas(gate, plain), tokens, gate.tokens.double())
    want = (shares / shares.sum(-1, keepdim=True)).unflatten(1, (2, 2)).mean(2)
    around = torch.stack([want[..., max(0, i - 1) : i + 2].amax(-1) for i in range(26)], -1)
    torch.testing.assert_close(torch.cat(served(gate, tokens)).double(), around, atol=1e-6, rtol=1e-4)


def test_loss_is_the_formula_in_float64():
    gate, recorded = moved_gate("lookaheadkv"), trace(26)
    plain = copy.deepcopy(model()).double()
    shares = rows_by_hand(plain, with_deltas(gate, plain), recorded.ids, gate.tokens.double())
    target, shares = (x.double() / x.double().sum(-1, keepdim=True) for x in (recorded.targets["attention"], shares))
    want = (target * (target / shares).log()).sum(-1).mean().item()
    assert gate.loss(batch_of(recorded))["loss"].item() == pytest.approx(want, rel=1e-4)


def test_without_its_adapter_it_scores_as_the_model_itself_would():
    gate = moved_gate("lookaheadkv")
    for name, weight in gate.named_parameters():
        if name.endswith(".b"):
            weight.data.zero_()
    plain = copy.deepcopy(model()).double()
    shares = rows_by_hand(plain, plain, ids(26), gate.tokens.double())
    want = (shares / shares.sum(-1, keepdim=True)).unflatten(1, (2, 2)).mean(2)
    quiet = type(gate)(LookaheadKVConfig(num_tokens=5, rank=2, kernel_size=0), gate.base)
    quiet.load_state_dict(gate.state_dict())
    torch.testing.assert_close(torch.cat(served(quiet, ids(26))).double(), want, atol=1e-6, rtol=1e-4)


# ---- the adapter acts on its rows alone


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_keys_and_values_of_the_prompt_differ_from_the_plain_models_by_exactly_0(family, dtype):
    lm = tiny(family, dtype=dtype)
    torch.manual_seed(0)
    gate = LookaheadKV(LookaheadKVConfig(num_tokens=5), describe(lm))
    tokens = torch.randint(2, 96, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = lm(tokens, use_cache=True)
        with attach(lm):
            cache = EvictionCache(Policy(gate, 1000), lm)
            got = lm(tokens, cache=cache)
    assert torch.equal(got.logits, want.logits)
    assert cache.get_seq_length() == 30 and (cache.lengths() == 30).all()
    for layer, state in zip(gate.base.layers, cache.states, strict=True):
        plain = want.cache.layers[layer]
        assert torch.equal(state.held.slots().keys, plain.keys) and torch.equal(state.held.slots().values, plain.values)


def test_the_model_is_as_it_was_after_its_gate_served():
    lm = copy.deepcopy(model()).requires_grad_(True)
    names, hooks = [name for name, _ in lm.named_modules()], [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in lm.modules()]
    served(moved_gate("lookaheadkv"), ids(26), lm)
    assert [name for name, _ in lm.named_modules()] == names
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in lm.modules()] == hooks
    assert all(p.requires_grad for p in lm.parameters())


def test_the_copy_that_carries_the_adapter_holds_no_second_set_of_weights():
    gate = moved_gate("lookaheadkv").bind(model())
    theirs = {t.data_ptr() for t in (*model().parameters(), *model().buffers())}
    added = [name for name, t in gate.own.twin.decoder.named_parameters() if t.data_ptr() not in theirs]
    assert added == []


def test_a_gate_is_bound_to_a_model_once_and_anew_when_it_moved():
    gate, lm = moved_gate("lookaheadkv"), copy.deepcopy(model())
    first = gate.bind(lm)
    assert gate.bind(lm) is first
    lm.model.rotary_emb.inv_freq = lm.model.rotary_emb.inv_freq.clone()
    second = gate.bind(lm)
    assert second is not first
    lm.model.norm.weight = torch.nn.Parameter(lm.model.norm.weight.clone())
    assert gate.bind(lm) is not second


def test_a_model_that_nobody_uses_any_more_is_not_kept_by_its_gate():
    import gc
    import weakref

    gate, lm = moved_gate("lookaheadkv"), copy.deepcopy(model())
    served(gate, ids(26), lm)
    gone = weakref.ref(lm.model)
    del lm
    gc.collect()
    assert gone() is None and not gate.bound


def test_threads_that_run_the_plain_model_never_see_the_adapter():
    gate, tokens, found = moved_gate("lookaheadkv"), ids(26)[None], []
    with torch.no_grad():
        want = model()(tokens).logits

    def plain() -> None:
        with torch.no_grad():
            for _ in range(30):
                found.append(model()(tokens).logits)

    with torch.no_grad(), attach(model()):
        thread = threading.Thread(target=plain)
        thread.start()
        scores = [torch.cat(served(gate, ids(26))) for _ in range(10)]
        thread.join()
    assert len(found) == 30 and all(torch.equal(logits, want) for logits in found)
    assert all(torch.equal(s, scores[0]) for s in scores)


def test_rows_see_the_models_weights_as_they_are_now():
    gate, lm = moved_gate("lookaheadkv"), copy.deepcopy(model())
    before = torch.cat(served(gate, ids(26), lm))
    with torch.no_grad():
        lm.model.layers[0].self_attn.q_proj.weight *= 2
    assert not torch.equal(torch.cat(served(gate, ids(26), lm)), before)


# ---- what is refused


@pytest.mark.parametrize(("knobs", "says"), [({"num_tokens": 1}, "2 or more"), ({"rank": 0}, "rank=0"), ({"alpha": 0.0}, r"alpha=0\.0")])
def test_impossible_knobs_are_refused(knobs, says):
    with pytest.raises(ValueError, match=says):
        gate_of("lookaheadkv", **knobs)


def test_a_model_with_fused_projections_is_refused():
    lm = tiny("phi3")
    gate = LookaheadKV(LookaheadKVConfig(), describe(lm))
    with pytest.raises(ValueError, match=r"Phi3Model has no layers\.0\.self_attn\.q_proj"):
        gate.bind(lm)


def test_a_base_without_the_width_of_its_mlps_is_refused():
    with pytest.raises(ValueError, match="how wide its MLPs are"):
        LookaheadKV(LookaheadKVConfig(), BaseModel("old", "", 3, 2, 4, 8, 32))


def test_an_adapter_of_another_width_is_refused_with_both():
    gate = moved_gate("lookaheadkv")
    with pytest.raises(ValueError, match=r"from 32 to 48, the model's from 32 to 64"):
        gate.bind(tiny("llama"))
