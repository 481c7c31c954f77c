"""Where heads look, by hand and against the plain model's attention; what that suggests; and the command."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from learnkv import config
from learnkv.budgets import ALLOCATORS, Ratio
from learnkv.evaluation.compare import encode_prompt
from learnkv.evaluation.diagnosis import kept_mask
from learnkv.evaluation.judge import oracle_utility
from learnkv.evaluation.profile import BUDGETS, Profile, ProfileSettings, chosen, profile, row_figures, share_kept, top_share
from learnkv.heuristics.oracle import Oracle
from learnkv.policy import Policy
from learnkv.profile import ProfileCommand, run
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import prefill_many
from tests.comparison_parts import letter_tokenizer, short_prompt, tiny_model

SETTINGS = ProfileSettings(num_sinks=2, num_recent=8, num_local=10)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer():
    return letter_tokenizer()


# ---- figures


def test_a_rows_figures_by_hand():
    attention = torch.tensor([[0.5, 0.125, 0.125, 0.25, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]])
    (sinks, local, entropy), other = row_figures(attention, 3, ProfileSettings(num_sinks=1, num_local=2)).tolist()
    assert (sinks, local) == (0.5, 0.375)
    assert entropy == pytest.approx(-0.5 * math.log(0.5) - 0.25 * math.log(0.125) - 0.25 * math.log(0.25))
    assert other == [0.0, 0.0, 0.0]


def test_near_tokens_that_are_sinks_count_as_sinks():
    (sinks, local, _), *_ = row_figures(torch.tensor([[0.5, 0.25, 0.25]]), 2, ProfileSettings(num_sinks=2, num_local=64)).tolist()
    assert (sinks, local) == (0.75, 0.25)


def test_the_top_tenth_is_rounded_up_and_its_share_is_by_head():
    even, one = torch.ones(11), torch.tensor([9.0] + [0.1] * 10)
    assert top_share(torch.stack([even, one, torch.zeros(11)])[None]).tolist() == [pytest.approx([2 / 11, 9.1 / 10, 0.0])]


def test_the_share_kept_leaves_out_what_is_protected():
    utility = torch.tensor([[[8.0, 3.0, 1.0]]])
    kept = torch.tensor([[[True, True, False]]])
    assert share_kept(utility, kept, torch.tensor([True, False, False])) == 0.75
    assert share_kept(utility, kept, torch.ones(3, dtype=torch.bool)) == 1.0


def test_a_model_that_looks_at_all_tokens_alike_is_known_in_figures():
    flat = tiny_model()
    for block in flat.model.layers:
        torch.nn.init.zeros_(block.self_attn.q_proj.weight)
    prompt, tokenizer = short_prompt(), letter_tokenizer()
    found = profile(flat, tokenizer, [prompt], SETTINGS)
    (e,) = encode_prompt(flat, tokenizer, prompt)
    n, T = len(e.context), len(e.question) + len(e.answer)
    positions = n + np.linspace(0, T - 1, min(T, 32)).round()
    assert np.array(found.sinks) == pytest.approx(np.full((3, 2), (2 / (positions + 1)).mean()), rel=1e-4)
    assert np.array(found.local) == pytest.approx(np.full((3, 2), (10 / (positions + 1)).mean()), rel=1e-4)
    assert np.array(found.entropy) == pytest.approx(np.full((3, 2), np.log(positions + 1).mean()), rel=1e-4)
    assert np.array(found.top) == pytest.approx(np.full((3, 2), math.ceil((n - 2) / 10) / (n - 2)), rel=1e-4)
    assert all(head for layer in found.retrieval for head in layer)
    kept = found.coverage["uniform"]
    assert kept[0.5] == pytest.approx((n // 2 - 10) / (n - 10), rel=1e-4) and kept[0.03] == 0.0, "all of 3% is protected"


def test_figures_are_those_of_the_plain_models_attention(model, tokenizer):
    (e,) = encode_prompt(model, tokenizer, short_prompt())
    n, found = len(e.context), profile(model, tokenizer, [short_prompt()], SETTINGS)
    model.set_attn_implementation("eager")
    out = model(torch.cat([e.context, e.question, e.answer])[None], output_attentions=True)
    model.set_attn_implementation("sdpa")
    rows = torch.cat(out.attentions)[:, :, n:]  # [layers, Q, T, S]
    rows = rows[:, :, torch.linspace(0, rows.shape[2] - 1, 32).round().long()] if rows.shape[2] > 32 else rows
    by_group = rows[..., :2].sum(-1).mean(-1).unflatten(1, (2, 2)).mean(-1)
    assert np.array(found.sinks) == pytest.approx(by_group.numpy(), abs=1e-5)
    entropy = torch.special.entr(rows).sum(-1).mean(-1).unflatten(1, (2, 2)).mean(-1)
    assert np.array(found.entropy) == pytest.approx(entropy.numpy(), abs=1e-4)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_what_the_oracle_would_keep_is_what_a_cache_of_its_policy_keeps(model, tokenizer, name):
    encoded = encode_prompt(model, tokenizer, short_prompt())
    policy = Policy(Oracle(oracle_utility(model, encoded)), Ratio(0.4), ALLOCATORS[name], num_sinks=2, num_recent=8)
    with attach(model):
        (cache,) = prefill_many(model, encoded[0].context[None], [policy])
    assert torch.equal(chosen(policy), kept_mask(cache, len(encoded[0].context)))


def test_coverage_grows_with_the_budget_and_bytes_are_keys_and_values(model, tokenizer):
    found = profile(model, tokenizer, [short_prompt(), short_prompt(1, questions=2)], SETTINGS)
    for kept in found.coverage.values():
        assert list(kept) == list(BUDGETS) and list(kept.values()) == sorted(kept.values(), reverse=True)
    assert found.coverage["adaptive_global"][0.3] >= found.coverage["uniform"][0.3]
    assert found.nbytes == 3 * 2 * 2 * 8 * 4 and found.prompts == 2


def test_no_prompts_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="no prompts"):
        profile(model, tokenizer, [])


# ---- what is suggested


def made(coverage, sinks=0.5, local=0.2):
    return Profile([[sinks] * 2] * 2, [[local] * 2] * 2, [[1.0] * 2] * 2, [[0.9] * 2] * 2, 3, (50, 100), 2**20, coverage, SETTINGS)


def test_the_smallest_budget_that_keeps_enough_is_suggested_with_the_simplest_allocator_that_is_as_good():
    coverage = {"uniform": {0.5: 0.99, 0.2: 0.955, 0.1: 0.8}, "adaptive": {0.5: 0.99, 0.2: 0.96, 0.1: 0.9}}
    (said, _) = made(coverage).suggestions()
    assert said.startswith("start at a budget of 0.2 with uniform: 96% of") and "20.0 of 100.0 MiB" in said
    coverage["adaptive"][0.2] = 0.98
    assert made(coverage).suggestions()[0].startswith("start at a budget of 0.2 with adaptive: 98%")


def test_where_nothing_keeps_enough_little_should_be_evicted():
    assert made({"uniform": {0.5: 0.9, 0.2: 0.5}}).suggestions()[0].startswith("no budget up to 50% keeps 95%")


@pytest.mark.parametrize(("local", "count", "word"), [(0.2, 0, "no head should stream"), (0.45, 4, "duo_attention or headkv")])
def test_local_heads_are_those_whose_sinks_and_near_tokens_hold_nine_tenths(local, count, word):
    found = made({"uniform": {0.5: 1.0}}, local=local)
    assert found.suggestions()[1].startswith(f"{count} of 4 KV heads are local: sinks and 10 last tokens hold 90%")
    assert word in found.suggestions()[1] and sum(map(sum, found.retrieval)) == 4 - count


def test_cells_are_means_over_the_heads_of_a_layer():
    found = replace(made({"uniform": {0.5: 1.0, 0.1: 0.25}}), sinks=[[0.5, 0.9], [0.1, 0.1]])
    header, first, _ = found.cells()
    assert first == ["0", "0.70", "0.20", "0.10", "1.00", "0.90", "1 of 2"] and len(header) == len(first)
    assert found.coverage_cells() == [["the oracle keeps, at", "50%", "10%"], ["uniform", "100.0%", "25.0%"]]


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("profile")
    tiny_model().save_pretrained(made / "model")
    letter_tokenizer().save_pretrained(made / "model")
    asked = short_prompt().questions[0]
    record = {"context": short_prompt().context, "question": asked.text, "answer": asked.answer, "answer_prefix": asked.prefix}
    (made / "mine.jsonl").write_text(json.dumps(record) + "\n")
    return made


def test_the_command_prints_a_table_and_leaves_figures_and_a_picture(folder, tmp_path, capsys):
    given = [f"model={folder / 'model'}", f"prompts={folder / 'mine.jsonl'}", f"out={tmp_path / 'new' / 'out'}", "profile.num_recent=8"]
    assert config.main(run, ProfileCommand, given) == 0
    said = capsys.readouterr().out
    for part in (
        "prompts: 1, contexts of",
        "384 bytes a token",
        "retrieval heads",
        "adaptive_global",
        "KV heads are local",
        "next: python",
    ):
        assert part in said
    values = json.loads((tmp_path / "new" / "out" / "profile.json").read_text())
    assert np.array(values["sinks"]).shape == (3, 2) and values["settings"]["num_recent"] == 8
    assert all(line in said for line in values["suggestions"])
    assert (tmp_path / "new" / "out" / "profile.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argument", "said"),
    [("out=x", "prompts= is missing"), ("prompts=nowhere.jsonl", "nowhere.jsonl can't be read"), ("profile.num_local=0", "num_local=0")],
)
def test_mistakes_are_one_line(capsys, argument, said):
    assert config.main(run, ProfileCommand, [argument]) == 2
    assert said in capsys.readouterr().err
