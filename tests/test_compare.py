"""Comparisons on a tiny random model: the same as plain forwards, resumable to the row, refusals in words."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from learnkv.budgets import Ratio
from learnkv.checkpoint import save_gate
from learnkv.evaluation import compare as comparison
from learnkv.evaluation import judge
from learnkv.evaluation.compare import Bench, Plan, compare, encode_prompt, plan, plan_chosen, quick_table, served
from learnkv.evaluation.contenders import contenders_of, gate_contender
from learnkv.evaluation.judge import oracle_utility
from learnkv.evaluation.report import summarise
from learnkv.evaluation.rows import line_of, read_rows
from learnkv.gates import GATES
from learnkv.gates.kvp import KVP
from learnkv.models import describe
from learnkv.prompts import Prompt, Question
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import prefill_many
from tests.comparison_parts import letter_tokenizer, short_prompt, tiny_model


@pytest.fixture(scope="module")
def tokenizer():
    return letter_tokenizer()


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def plans(model, tokenizer):
    return plan(contenders_of(["snapkv(observation_window=8)+adaptive", "keep_digits", "h2o+adaptive_global"], model, tokenizer), [0.3, 32])


def without_seconds(rows):
    return {replace(row, prefill_seconds=0.0, extra_seconds=0.0) for row in rows}


# ---- what is measured


def test_a_table_of_heads_is_named_in_the_entry_and_in_its_rows(model, tokenizer, tmp_path):
    (tmp_path / "heads.json").write_text("[[1, 0], [0, 1], [1, 1]]")
    entry = f"headkv(beta=1 table={tmp_path}/heads.json)"
    rows = compare(model, tokenizer, [short_prompt()], plan(contenders_of([entry], model, tokenizer), [0.3]))
    (row,) = (row for row in rows if row.scorer == "headkv")
    assert row.method == entry and "of 3 x 2 heads, beta=1)" in row.allocator
    assert row.kept_mean == int(0.3 * row.num_tokens) < row.kept_max


@pytest.mark.parametrize("entry, said", [("headkv", "method headkv: no table was given"), ("headkv(table=no.json)", "no.json is no file")])
def test_a_table_that_is_not_there_is_one_line(model, tokenizer, entry, said):
    with pytest.raises(ValueError, match=said):
        contenders_of([entry], model, tokenizer)


def test_full_cache_random_and_oracle_are_always_among_the_rows(model, tokenizer, plans):
    rows = compare(model, tokenizer, [short_prompt()], plans)
    assert rows[0].line == "full cache"
    assert {row.scorer for row in rows} == {"full", "random", "oracle", "snapkv", "keep_digits", "h2o"}
    assert len(rows) == 1 + 5 * 2


def test_full_cache_row_equals_the_plain_model(model, tokenizer, plans):
    (encoded,) = encode_prompt(model, tokenizer, short_prompt())
    ids = torch.cat([encoded.context, encoded.question, encoded.answer])
    logits = model(ids[None]).logits[0, -len(encoded.answer) - 1 : -1]
    (row,) = compare(model, tokenizer, [short_prompt()], [p for p in plans if p.contender.scorer == "full"])
    assert row.nll == pytest.approx(F.cross_entropy(logits, encoded.answer).item(), abs=1e-5)
    assert row.accuracy == float((logits.argmax(-1) == encoded.answer).all())
    assert (row.kept_mean, row.kept_max, row.span_kept) == (len(encoded.context), len(encoded.context), 1.0)


def test_budget_over_the_whole_context_equals_the_full_cache_row_exactly(model, tokenizer):
    rows = compare(model, tokenizer, [short_prompt()], plan(contenders_of(["snapkv", "h2o+adaptive"], model, tokenizer), [200]))
    figures = {(row.accuracy, row.nll, row.span_kept, row.kept_mean, row.kept_max) for row in rows}
    assert len(rows) == 5 and len(figures) == 1


def test_row_equals_a_plain_forward_that_masks_what_was_evicted(model, tokenizer, plans):
    (encoded,) = encode_prompt(model, tokenizer, short_prompt())
    n, rest = len(encoded.context), torch.cat([encoded.question, encoded.answer])
    chosen = [p for p in plans if p.contender.scorer == "snapkv"]
    for row, each in zip(compare(model, tokenizer, [short_prompt()], chosen), chosen, strict=True):
        with attach(model), torch.no_grad():
            (cache,) = prefill_many(model, encoded.context[None], [each.contender.at(each.budget)])
        kept = cache.kept_positions()
        logits = masked_forward(model, torch.cat([encoded.context, rest]), kept, n)[-len(encoded.answer) - 1 : -1]
        assert row.nll == pytest.approx(F.cross_entropy(logits, encoded.answer).item(), abs=1e-5)
        assert row.accuracy == float((logits.argmax(-1) == encoded.answer).all())
        assert row.kept_mean < n


def masked_forward(model, ids, kept, num_context):
    """Logits of the plain model whose rows after the context see, of the context, `kept` only; per layer and KV head."""
    T = len(ids)
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    group = model.config.num_attention_heads // model.config.num_key_value_heads

    def mask(layer):
        seen = torch.zeros(model.config.num_key_value_heads, T, dtype=torch.bool)
        for head, positions in enumerate(kept[layer][0]):
            seen[head, positions[positions >= 0].long()] = True
        seen[:, num_context:] = True
        rows = (torch.arange(T) < num_context)[None, :, None] | seen[:, None]  # [H, T, T]
        return torch.where(rows & causal, 0.0, float("-inf")).repeat_interleave(group, 0)[None]

    def replace_mask(module, args, kwargs):
        return args, kwargs | {"attention_mask": mask(module.layer_idx)}

    hooks = [block.self_attn.register_forward_pre_hook(replace_mask, with_kwargs=True) for block in model.model.layers]
    try:
        return model(ids[None], use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()


def test_oracle_utility_is_the_attention_of_question_and_answer(model, tokenizer):
    encoded = encode_prompt(model, tokenizer, short_prompt(questions=2))
    n, want = len(encoded[0].context), 0
    model.set_attn_implementation("eager")
    for e in encoded:
        out = model(torch.cat([e.context, e.question, e.answer])[None], output_attentions=True)
        attention = torch.cat(out.attentions)  # [layers, Q, T, T]
        want = want + attention[:, :, n:, :n].unflatten(1, (2, 2)).amax(2).sum(2)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(oracle_utility(model, encoded), want, atol=1e-5, rtol=1e-4)


def test_each_question_has_rows_of_its_own(model, tokenizer, plans):
    both = compare(model, tokenizer, [short_prompt(questions=2)], plans[:2])
    assert [row.question for row in both] == [0, 0, 1, 1]
    one, two = both[0], both[2]
    assert one.nll != two.nll and one.kept_mean == two.kept_mean


def test_a_question_inside_is_compressed_with_its_context_and_has_a_prefill_of_its_own(model, tokenizer, plans):
    prompt = short_prompt(questions=2)
    rows = compare(model, tokenizer, [prompt], plans[:2], question="inside")
    assert [row.question for row in rows] == [0, 0, 1, 1] and all(row.question_in_prefix for row in rows)
    for row, e in zip(rows[::2], encode_prompt(model, tokenizer, prompt), strict=True):
        assert row.num_tokens == len(e.context) + len(e.question) - 1
        logits = model(torch.cat([e.context, e.question, e.answer])[None]).logits[0, -len(e.answer) - 1 : -1]
        assert row.nll == pytest.approx(F.cross_entropy(logits, e.answer).item(), abs=1e-5)
    outside = compare(model, tokenizer, [prompt], plans[:2])
    assert not {row.key for row in rows} & {row.key for row in outside}


def test_a_question_without_tokens_borrows_the_last_of_the_context(model, tokenizer, plans):
    text = Prompt("user", "user", "Some plain text that goes on and", (Question("", "", " on"),), chat=False)
    (encoded,) = encode_prompt(model, tokenizer, text)
    assert tokenizer.decode(encoded.question) == "d"
    (row,) = compare(model, tokenizer, [text], plans[:1])
    logits = model(torch.cat([encoded.context, encoded.question, encoded.answer])[None]).logits[0, -4:-1]
    assert row.nll == pytest.approx(F.cross_entropy(logits, encoded.answer).item(), abs=1e-5) and row.span_kept is None


def test_span_survival_counts_the_answers_tokens(model, tokenizer, plans):
    rows = {row.scorer: row for row in compare(model, tokenizer, [short_prompt()], plans)}
    assert rows["keep_digits"].span_kept == 1.0
    assert 0 <= rows["random"].span_kept < 1.0


def test_protected_tokens_come_with_the_contender(model, tokenizer):
    contenders = contenders_of(["snapkv(num_recent=2)"], model, tokenizer, 1, 3)
    rows = {row.scorer: row for row in compare(model, tokenizer, [short_prompt()], plan(contenders, [8]))}
    assert (rows["snapkv"].num_sinks, rows["snapkv"].num_recent) == (1, 2)
    assert (rows["random"].num_sinks, rows["random"].num_recent) == (1, 3)
    assert rows["random"].kept_max == 8


def test_model_is_left_as_it_was(model, tokenizer, plans):
    compare(model, tokenizer, [short_prompt()], plans)
    assert model.config._attn_implementation == "sdpa" and not any(m._forward_pre_hooks for m in model.modules())


# ---- the file


def test_stopped_and_resumed_equals_uninterrupted(model, tokenizer, plans, tmp_path):
    prompts = [short_prompt(i, questions=2) for i in range(3)]
    whole = compare(model, tokenizer, prompts, plans, path=tmp_path / "whole.jsonl")

    def stop(tasks):
        yield tasks[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(model, tokenizer, prompts, plans, path=tmp_path / "rows.jsonl", progress=stop)
    lines = (tmp_path / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_bytes(b"".join(lines[:10]) + lines[10][:40])  # killed within a row
    resumed = compare(model, tokenizer, prompts, plans, path=tmp_path / "rows.jsonl")
    assert without_seconds(read_rows(tmp_path / "rows.jsonl")) == without_seconds(read_rows(tmp_path / "whole.jsonl"))
    assert len(resumed) == len(whole) and without_seconds(resumed) == without_seconds(whole)


def test_rows_that_are_there_are_not_measured_again(model, tokenizer, plans, tmp_path):
    first = compare(model, tokenizer, [short_prompt()], plans, path=tmp_path / "rows.jsonl")
    size = (tmp_path / "rows.jsonl").stat().st_size
    assert compare(model, tokenizer, [short_prompt()], plans, path=tmp_path / "rows.jsonl") == first
    assert (tmp_path / "rows.jsonl").stat().st_size == size


def test_progress_counts_the_prompts_that_are_left(model, tokenizer, plans, tmp_path):
    path, counts = tmp_path / "rows.jsonl", []
    for prompts in ([short_prompt()], [short_prompt(), short_prompt(1)], [short_prompt(1)]):
        compare(model, tokenizer, prompts, plans[:1], path=path, progress=lambda tasks: counts.append(len(tasks)) or tasks)
    assert counts == [1, 1, 0]


def test_file_is_one_json_object_per_line(model, tokenizer, plans, tmp_path):
    rows = compare(model, tokenizer, [short_prompt()], plans, path=tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == [row.key for row in rows]


# ---- which methods


def test_unknown_names_come_with_the_nearest(model, tokenizer):
    for text, near in (("snapvk", "snapkv"), ("snapkv(observation_windw=8)", "observation_window"), ("snapkv+adaptve", "adaptive")):
        with pytest.raises(ValueError, match=f"nearest: .*{near}"):
            contenders_of([text], model, tokenizer)


@pytest.mark.parametrize("text", ["full+adaptive", "oracle(utility=1)", "snapkv:checkpoints/run", "kvp(width=8)"])
def test_settings_that_mean_nothing_are_refused(model, tokenizer, text):
    with pytest.raises(ValueError, match="method "):
        contenders_of([text], model, tokenizer)


def test_missing_gate_is_named(model, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        contenders_of([f"kvp:{tmp_path}/nowhere"], model, tokenizer)


@pytest.mark.parametrize(("budget", "said"), [(5, "smaller than"), (0, "neither"), (1.5, "neither")])
def test_impossible_budget_is_refused_before_anything_runs(model, tokenizer, budget, said):
    with pytest.raises(ValueError, match=said):
        plan(contenders_of([], model, tokenizer), [budget])


def test_chosen_lines_run_what_the_development_rows_say(model, tokenizer):
    tried = plan(contenders_of(["snapkv(observation_window=8)", "snapkv+adaptive", "key_diff"], model, tokenizer), [0.3])
    dev = compare(model, tokenizer, [replace(short_prompt(i), split="dev") for i in (10, 11)], tried)
    plans = plan_chosen(dev, [0.3], model, tokenizer, 4, 16)
    assert {"best heuristic (chosen)", "snapkv (chosen)", "key_diff (chosen)"} <= {p.contender.line for p in plans}
    rows = compare(model, tokenizer, [short_prompt()], plans)
    best = next(row for row in rows if row.line == "best heuristic (chosen)")
    assert best.key in {row.key for row in rows if row.line != best.line}


# ---- gates


@pytest.fixture(scope="module")
def gate(model):
    torch.manual_seed(1)
    return KVP(KVP.Config(), describe(model)).eval().requires_grad_(False)


def test_a_gate_is_a_contender_with_its_hash(model, tokenizer, gate):
    contender = gate_contender(gate, "checkpoints/run", "kvp", "adaptive")
    (row,) = compare(model, tokenizer, [short_prompt()], [Plan(contender, Ratio(0.3))])
    assert (row.line, row.method, row.run) == ("kvp", "kvp+adaptive", "checkpoints/run") and len(row.gate) == 16


def test_folders_that_match_are_training_runs_of_one_line(model, tokenizer, gate, tmp_path):
    for seed in (2, 3):
        torch.manual_seed(seed)
        save_gate(KVP(KVP.Config(), describe(model)), tmp_path / f"run-{seed}", {})
    contenders = contenders_of([f"kvp+adaptive:{tmp_path}/run-*"], model, tokenizer)
    rows = compare(model, tokenizer, [short_prompt(), short_prompt(1)], plan(contenders, [0.3]))
    found = [row for row in rows if row.scorer == "kvp"]
    assert len({row.line for row in found}) == 1 and len({row.gate for row in found}) == 2 and len(found) == 4
    assert {s.line: s.runs for s in summarise(rows)} == {"full cache": 1, "random": 1, "oracle": 1, f"kvp+adaptive:{tmp_path}/run-*": 2}


def test_quick_table_shows_the_gate_beside_the_controls_and_heuristics(model, tokenizer, gate):
    table = quick_table(model, tokenizer, [short_prompt(), short_prompt(1)], gate, [0.3, 0.5])
    lines = [line.split("  ")[0] for line in table.splitlines()]
    heuristics = ["random", "oracle", "streaming_llm", "key_diff", "key_norm", "snapkv", "h2o", "kvzip", "keep_digits"]
    assert lines == ["method", "full cache", "kvp", "kvp+adaptive_global", *heuristics]


def test_quick_table_asks_inside_the_prefix_where_it_is_told_to(tokenizer, gate, monkeypatch):
    seen = []
    monkeypatch.setattr(comparison, "summarise", lambda rows: seen.extend(rows) or summarise(rows))
    quick_table(tiny_model(512), tokenizer, [short_prompt(), short_prompt(1)], gate, [0.3], "inside")
    assert seen and all(row.question_in_prefix for row in seen)


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [
        ("kvp", "uniform", "adaptive_global"),
        ("fast_kvzip", "adaptive_global", "uniform"),
        ("kvzap", "Threshold(least=-4.0)", "adaptive_global"),
        ("dms", "Threshold(least=0.0)", "adaptive_global"),
        ("duo_attention", "PerHead(", "adaptive_global"),
    ],
)
def test_quick_table_takes_a_methods_own_rule_and_another(model, name, own, other):
    found = served(GATES[name](GATES[name].Config(), describe(model)))
    assert found[0].allocator.startswith(own) and (found[0].line, found[0].method) == (name, name)
    assert (found[1].allocator, found[1].line) == (other, f"{name}+{other}")


# ---- refusals


def refused(model, tokenizer, said, **changes):
    question = Question(changes.pop("text", " And?"), "", changes.pop("answer", " yes"))
    with pytest.raises(ValueError, match=said):
        encode_prompt(model, tokenizer, Prompt("user", "user", changes.pop("context", "Some text."), (question,)))


def test_prompt_that_cannot_be_run_is_refused_in_words(model, tokenizer):
    refused(model, tokenizer, "context is 1 tokens", context="S")
    refused(model, tokenizer, "answer has no tokens", answer="")
    refused(model, tokenizer, "the model has 256 positions", context="long " * 60)


def test_nan_of_a_model_is_refused_with_prompt_and_method(model, tokenizer, plans, monkeypatch):
    monkeypatch.setattr(judge, "teacher_forced", lambda _, caches, __: [(torch.tensor([False]), float("nan")) for _ in caches])
    with pytest.raises(ValueError, match=f"prompt {short_prompt().id}, full at budget 1: .* nan"):
        compare(model, tokenizer, [short_prompt()], plans)


def test_cost_of_scoring_is_seen_once_per_method(model, tokenizer, plans):
    bench = Bench(model, tokenizer, describe(model))
    (encoded,) = encode_prompt(model, tokenizer, short_prompt())
    [(asked, cells)] = bench.works(short_prompt(), [encoded], plans, inside=False)
    rows = list(bench.rows(asked, cells))
    assert all(row.prefill_seconds > 0 and row.extra_seconds >= 0 for row in rows)
    assert len({row.prefill_seconds for row in rows}) == 1 and rows[0].extra_seconds == 0


def test_a_prompt_that_became_other_tokens_is_measured_again_and_older_rows_stand(model, tokenizer, plans, tmp_path):
    path = tmp_path / "rows.jsonl"

    def tokens_after(change):
        rows = [replace(row, tokens=change(row.tokens)) for row in compare(model, tokenizer, [short_prompt()], plans)]
        path.write_text("".join(f"{line_of(row)}\n" for row in rows))
        compare(model, tokenizer, [short_prompt()], plans, path=path)
        return len(path.read_text().splitlines()) - len(rows), {row.tokens for row in read_rows(path)}

    again, tokens = tokens_after(lambda own: "00000000")
    assert again == len(plans) and len(tokens) == 2
    assert tokens_after(lambda own: "") == (0, {""})


def test_every_line_is_whole_in_the_file_though_two_show_the_same_measurement(model, tokenizer, tmp_path):
    one, *_ = plan(contenders_of(["h2o"], model, tokenizer, always=()), [0.3])
    other = replace(one, contender=replace(one.contender, line="h2o (chosen)"))
    for _ in range(2):
        compare(model, tokenizer, [short_prompt()], [one, other], path=tmp_path / "rows.jsonl")
        rows = read_rows(tmp_path / "rows.jsonl")
        assert sorted(row.line for row in rows) == ["h2o", "h2o (chosen)"] and len({row.key for row in rows}) == 1
