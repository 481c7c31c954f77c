import copy
import errno
import json
import multiprocessing
import random
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learnkv import config
from learnkv.prompts import Prompt, Question
from learnkv.reconstruction import ONWARD, WHOLE
from learnkv.record import RecordCommand, run
from learnkv.traces import format, record
from learnkv.traces.dataset import TraceDataset
from learnkv.traces.record import RecordSettings, make_prompts, plan_recording, record_traces, trace_folder
from tests.recording import byte_tokenizer, files_of, own_prompts, record_as, record_big_enough, tiny_model

GROUPS = [(2, 2), (4, 1), (7, 1)]  # query heads, KV heads: G in {1, 4, 7}


def recorded(tmp_path, prompts=None, model=None, **settings):
    return record_traces(
        model or tiny_model(), byte_tokenizer(), prompts or own_prompts(3), tmp_path / "traces", RecordSettings(**settings)
    )


def full_attention(model, trace, asked, after):
    """Per layer [Q, S, S] float64 weights of one plain forward over context + question + what came after."""
    ids = torch.cat((trace.ids, asked.question, after))[None]
    plain = tiny_model(heads=model.config.num_attention_heads, kv_heads=model.config.num_key_value_heads).double()
    plain.set_attn_implementation("eager")
    return torch.stack([a[0] for a in plain(ids, output_attentions=True, use_cache=False).attentions])


def by_group(weights, kv_heads):
    return weights.unflatten(1, (kv_heads, -1))  # [layers, H, G, S, S]


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_targets_equal_plain_full_attention(tmp_path, heads, kv_heads):
    model = tiny_model(heads=heads, kv_heads=kv_heads)
    for trace in recorded(tmp_path, model=model):
        n, want = len(trace.ids), 0
        for asked in trace.questions:
            weights = by_group(full_attention(model, trace, asked, asked.answer), kv_heads)
            want = want + weights[..., n:, :n].amax(2).sum(2)
        torch.testing.assert_close(trace.targets["utility"].double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(trace.mass.double(), weights[..., :n, :n].sum((2, 3)), rtol=1e-4, atol=1e-5)


def test_the_answer_alone_and_the_models_own_response_are_futures_too(tmp_path):
    model = tiny_model()
    for future in ("answer", "response"):
        traces = record_traces(model, byte_tokenizer(), own_prompts(2), tmp_path / future, RecordSettings(future=future, max_new_tokens=5))
        for trace in traces:
            n, want = len(trace.ids), 0
            for asked in trace.questions:
                after = asked.answer if future == "answer" else asked.response
                want = want + by_group(full_attention(model, trace, asked, after), 2)[..., n + len(asked.question) :, :n].amax(2).sum(2)
            torch.testing.assert_close(trace.targets["utility"].double(), want, rtol=1e-4, atol=1e-5)


def test_the_response_is_what_generate_gives(tmp_path):
    model = tiny_model()
    for trace in recorded(tmp_path, model=model, future="response", max_new_tokens=6):
        for asked in trace.questions:
            prompt = torch.cat((trace.ids, asked.question))[None]
            want = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=6, pad_token_id=0)
            assert asked.response.tolist() == want[0, prompt.shape[1] :].tolist()


def test_targets_of_several_questions_are_the_sum_over_single_ones(tmp_path):
    both = own_prompts(2)[1]
    traces = recorded(tmp_path, [both, *(replace(both, questions=(question,)) for question in both.questions)])
    whole, first, second = (trace.targets["utility"] for trace in traces)
    assert len(both.questions) == 2
    torch.testing.assert_close(whole, first + second)


def test_cuts_hold_the_utility_of_a_shorter_context(tmp_path):
    model = tiny_model()
    [trace] = recorded(tmp_path, own_prompts(1), model, cuts=3)
    n = len(trace.ids)
    weights = by_group(full_attention(model, trace, trace.questions[0], trace.questions[0].answer), 2).amax(2)
    assert trace.targets["utility_cuts"].shape == (3, 2, 2, n)
    for cut, value in zip(trace.targets["cut_positions"].tolist(), trace.targets["utility_cuts"], strict=True):
        torch.testing.assert_close(value[..., :cut].double(), weights[..., cut:, :cut].sum(2), rtol=1e-4, atol=1e-5)
        assert not value[..., cut:].any()


def test_full_mode_stores_queries_and_hidden_states_and_the_window_is_its_end(tmp_path):
    [trace] = recorded(tmp_path, own_prompts(1), mode="full")
    n = len(trace.ids)
    assert (
        trace.queries.shape == (2, 4, n, 8) and trace.hidden.shape == (2, n, 32) and trace.keys.shape == trace.values.shape == (2, 2, n, 8)
    )
    assert torch.equal(trace.window, trace.queries[:, :, -32:]) and trace.keys.dtype == torch.bfloat16


def test_a_trace_holds_what_else_is_asked_for_by_name(tmp_path):
    also = ["hidden", "block_input", "attention", "peak_logit"]
    for trace in recorded(tmp_path, own_prompts(2), also=also):
        n = len(trace.ids)
        assert trace.hidden.shape == trace.block_input.shape == (2, n, 32) and trace.queries is None
        assert trace.targets["attention"].shape == (2, 4, n) and trace.targets["peak_logit"].shape == (2, 2, n)
        assert not torch.equal(trace.hidden, trace.block_input)


def test_repeating_the_context_is_a_target_of_its_own_and_recomputed_from_ids(tmp_path):
    also = ["reconstruction", "reconstruction_plus", "queries_pre_rope"]
    stored = recorded(tmp_path, own_prompts(2), also=also)
    small = record_traces(tiny_model(), byte_tokenizer(), own_prompts(2), tmp_path / "ids", RecordSettings(mode="ids", also=also))
    for trace, again in zip(stored, small, strict=True):
        n = len(trace.ids)
        assert trace.hidden is None and trace.queries_pre_rope.shape == (2, 4, n, 8)
        assert trace.targets["reconstruction"].shape == trace.targets["reconstruction_plus"].shape == (2, 2, n)
        assert byte_tokenizer().decode(trace.repeat_whole) == WHOLE and byte_tokenizer().decode(trace.repeat_onward) == ONWARD
        ours, theirs = format.tensors_of(again), format.tensors_of(trace)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_context_too_long_to_be_repeated_is_refused_before_anything_runs(tmp_path):
    asked = [Prompt("user", "train", "x" * 250, ASKED)]
    recorded(tmp_path, asked)
    with pytest.raises(ValueError, match=r"250 tokens of context and 30\d after it, the model has 512 positions"):
        recorded(tmp_path / "more", asked, also=["reconstruction"])


def test_with_the_question_inside_each_question_but_its_last_token_is_the_end_of_a_context_of_its_own(tmp_path):
    settings = RecordSettings(question="inside", future="answer", kinds=["passwords"], train=1, heldout=0, num_tokens=[400])
    asked = make_prompts(settings, byte_tokenizer())
    assert len(asked) > 1 and len({prompt.id for prompt in asked}) == len(asked)
    for prompt, trace in zip(asked, record_traces(tiny_model(), byte_tokenizer(), asked, tmp_path / "traces", settings), strict=True):
        [question] = prompt.questions
        text = byte_tokenizer().decode(torch.cat([trace.ids, trace.questions[0].question]))
        assert text.startswith(prompt.context) and question.text.strip() in text[len(prompt.context) :]
        assert len(trace.questions[0].question) == 1  # its last token asks
    with pytest.raises(ValueError, match=r"asks 2 questions, record\.question=inside takes one"):
        record_traces(tiny_model(), byte_tokenizer(), own_prompts(2)[1:], tmp_path / "two", settings)


def test_mode_ids_recomputes_what_mode_targets_stores(tmp_path):
    small = record_traces(tiny_model(), byte_tokenizer(), own_prompts(3), tmp_path / "ids", RecordSettings(mode="ids", cuts=2))
    for recomputed, stored in zip(small, recorded(tmp_path, cuts=2), strict=True):
        ours, theirs = format.tensors_of(recomputed), format.tensors_of(stored)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(ValueError, match="give the model"):
        TraceDataset(tmp_path / "ids")


def test_traces_keep_the_order_and_tokens_of_the_prompts(tmp_path):
    prompts, tokenizer = own_prompts(5), byte_tokenizer()
    for prompt, trace in zip(prompts, recorded(tmp_path, prompts), strict=True):
        assert (trace.id, trace.split) == (prompt.id, prompt.split)
        assert tokenizer.decode(trace.ids) == prompt.context
        assert [tokenizer.decode(asked.answer) for asked in trace.questions] == [question.answer for question in prompt.questions]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mode": "full"},
        {"mode": "ids"},
        {"cuts": 4},
        {"also": ["block_input", "attention", "peak_logit"]},
        {"also": ["queries_pre_rope", "reconstruction"]},
        {"also": ["reconstruction", "reconstruction_plus"]},
    ],
)
def test_the_estimate_is_what_the_traces_take(tmp_path, settings):
    planned = plan_recording(tiny_model(), byte_tokenizer(), own_prompts(4), tmp_path / "traces", RecordSettings(**settings))
    wanted = sum(row["bytes"] for row in recorded(tmp_path, own_prompts(4), **settings).rows)
    cut_points = sum(8 * settings.get("cuts", 0) for _ in planned.jobs)
    assert planned.bytes_new == 2 * (wanted - cut_points)  # the parts and the shard they are packed into
    assert not (plan_recording(tiny_model(), byte_tokenizer(), own_prompts(4), tmp_path / "traces", RecordSettings(**settings))).missing


# ---- resuming and sharing


def test_a_second_recipe_reuses_traces_and_records_only_what_is_new(tmp_path, monkeypatch):
    recorded(tmp_path, own_prompts(3))
    before, ran, real = files_of(tmp_path), [], record.record_one
    monkeypatch.setattr(record, "record_one", lambda model, job, settings: ran.append(job.id) or real(model, job, settings))
    traces = recorded(tmp_path, own_prompts(5)[1:])
    assert ran == [prompt.id for prompt in own_prompts(5)[3:]]
    assert [trace.id for trace in traces] == [prompt.id for prompt in own_prompts(5)[1:]]
    after = files_of(tmp_path)
    assert all(after[name] == content for name, content in before.items() if name.endswith("safetensors"))


def test_traces_that_hold_more_serve_a_recipe_that_asks_for_less(tmp_path):
    less, more = (RecordSettings(folder=str(tmp_path), also=also) for also in ([], ["hidden"]))
    folder = trace_folder(tiny_model(), more)
    record_traces(tiny_model(), byte_tokenizer(), own_prompts(2), folder, more)
    assert trace_folder(tiny_model(), less) == folder
    traces = record_traces(tiny_model(), byte_tokenizer(), own_prompts(3), folder, less)
    assert all(trace.hidden is not None for trace in traces)
    with pytest.raises(ValueError, match=r"also=.*attention.*record into another folder"):
        record_traces(tiny_model(), byte_tokenizer(), own_prompts(2), folder, RecordSettings(also=["attention"]))


def test_a_run_that_stops_at_any_prompt_ends_in_the_same_bytes(tmp_path, monkeypatch):
    record_big_enough(tmp_path / "whole")
    real, left = record.record_one, [0]

    def stopping(*args):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*args)

    for stop_after in (3, 1, 4):
        left[0] = stop_after
        monkeypatch.setattr(record, "record_one", stopping)
        with pytest.raises(KeyboardInterrupt):
            record_big_enough(tmp_path / "stopped")
    monkeypatch.setattr(record, "record_one", real)
    record_big_enough(tmp_path / "stopped")
    assert len(list((tmp_path / "whole").glob(format.SHARDS))) > 2
    assert files_of(tmp_path / "stopped") == files_of(tmp_path / "whole")


def spawn(target, *args):
    """A process that starts fast: torch and transformers are imported once, for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["learnkv.traces.record", "transformers.models.llama.modeling_llama"])
    process = context.Process(target=target, args=args)
    process.start()
    return process


def test_a_recording_killed_at_random_moments_equals_an_uninterrupted_one(tmp_path):
    spawn(record_big_enough, tmp_path / "warm").join()
    process, moments = spawn(record_big_enough, tmp_path / "whole"), random.Random(0)
    process.join()
    assert process.exitcode == 0
    kills = 0
    while kills < 10:
        process = spawn(record_big_enough, tmp_path / "killed")
        process.join(timeout=moments.uniform(0.02, 0.4))
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
        if (tmp_path / "killed" / format.MANIFEST).exists():
            assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
            shutil.rmtree(tmp_path / "killed")
    process = spawn(record_big_enough, tmp_path / "killed")
    process.join()
    assert process.exitcode == 0 and files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_two_processes_give_the_traces_of_one(tmp_path):
    record_big_enough(tmp_path / "one")
    processes = [spawn(record_as, rank, 2, str(tmp_path / "meeting"), str(tmp_path / "two")) for rank in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    one, two = (
        {row["id"]: {k: v for k, v in row.items() if k != "shard"} for row in TraceDataset(tmp_path / f).rows} for f in ("one", "two")
    )
    assert one == two and len(one) == 10
    assert {path.name.split("-")[1] for path in (tmp_path / "two").glob(format.SHARDS)} == {"00", "01"}
    assert len(list(TraceDataset(tmp_path / "two"))) == 10
    record_big_enough(tmp_path / "two")  # and one process goes on with what two began
    assert len(TraceDataset(tmp_path / "two")) == 10


# ---- what is refused


def test_two_recordings_into_one_folder_at_once_are_refused(tmp_path):
    planned = plan_recording(tiny_model(), byte_tokenizer(), own_prompts(3), tmp_path / "traces", RecordSettings())
    with record.prepared(planned), pytest.raises(ValueError, match="another process is recording"):
        recorded(tmp_path)
    assert len(recorded(tmp_path)) == 3


def test_a_truncated_shard_is_named_and_recorded_again_once_it_is_deleted(tmp_path):
    before = recorded(tmp_path)
    [shard] = before.folder.glob(format.SHARDS)
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    with pytest.raises(ValueError, match=f"{shard.name}.*delete it"):
        recorded(tmp_path)
    shard.unlink()
    recorded(tmp_path)
    assert shard.read_bytes() == content


def test_too_little_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(5 << 20))
    with pytest.raises(ValueError, match=r"5 traces need .* [GMK]iB in .* has 5\.0 MiB free"):
        recorded(tmp_path, own_prompts(5, num_chars=400), tiny_model(head_dim=64, layers=8))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing_half_written_and_the_next_run_finishes(tmp_path, monkeypatch):
    real, writes = Path.write_bytes, []

    def write_until_full(path, content):
        writes.append(path)
        if len(writes) == 3:
            real(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_until_full)
    with pytest.raises(OSError, match="No space left on device"):
        recorded(tmp_path)
    assert not [path for path in tmp_path.rglob("*.tmp")]
    assert len(list((tmp_path / "traces" / "parts").iterdir())) == 2
    monkeypatch.setattr(Path, "write_bytes", real)
    recorded(tmp_path)
    record_traces(tiny_model(), byte_tokenizer(), own_prompts(3), tmp_path / "whole", RecordSettings())
    assert files_of(tmp_path / "traces") == files_of(tmp_path / "whole")


ASKED = (Question("Who?", "", " me"),)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (Prompt("user", "train", "", ASKED), "context of 0 tokens"),
        (Prompt("user", "train", "x", ASKED), "context of 1 tokens"),
        (Prompt("user", "train", "x" * 600, ASKED), "512 positions"),
        (Prompt("user", "train", "some text", (Question("Who?", "", ""),)), "no answer"),
        (Prompt("user", "train", "some text", ()), "no question"),
    ],
)
def test_a_prompt_that_cannot_be_recorded_is_named_before_anything_runs(tmp_path, prompt, words):
    with pytest.raises(ValueError, match=words) as caught:
        recorded(tmp_path, [*own_prompts(2), prompt])
    assert f"prompt 2 (id {prompt.id}" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_other_traces_is_refused_with_both_values(tmp_path):
    recorded(tmp_path)
    with pytest.raises(ValueError, match=r"future=question_answer.*future=answer"):
        recorded(tmp_path, future="answer")
    with pytest.raises(ValueError, match=r"weights_hash.*weights_hash"):
        recorded(tmp_path, model=tiny_model(seed=1))
    with pytest.raises(ValueError, match=r"dtype=bfloat16.*torch\.float32"):
        recorded(tmp_path, dtype="bfloat16")


def test_models_and_settings_have_folders_of_their_own_and_recipes_that_agree_share_one():
    model = tiny_model()
    settings = [RecordSettings(), RecordSettings(future="answer"), RecordSettings(mode="full"), RecordSettings(cuts=2)]
    folders = {trace_folder(model, each) for each in settings} | {trace_folder(tiny_model(seed=1), settings[0])}
    assert len(folders) == 5
    assert trace_folder(model, RecordSettings(train=7, seed=3, max_new_tokens=9, shard_mib=2)) in folders


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"record\.shard_mib=0 is below 1"):
        RecordSettings(shard_mib=0)


def test_nothing_to_record_is_refused():
    for nothing in ({"num_tokens": []}, {"kinds": []}, {"train": 0, "heldout": 0}):
        with pytest.raises(ValueError, match="nothing to record"):
            RecordSettings(**nothing)


# ---- the command


@pytest.fixture
def recipe(tmp_path):
    """A recipe on a tiny model in a folder."""
    model = tiny_model(positions=2048)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    sizes = "kinds: [codes, prose], train: 3, heldout: 2, num_tokens: [1000]"
    (tmp_path / "tiny.yaml").write_text(f"model: {tmp_path / 'model'}\nrecord: {{folder: {tmp_path / 'traces'}, {sizes}}}\n")
    return tmp_path / "tiny.yaml"


def test_the_command_says_where_the_traces_lie_and_what_to_run_next(recipe, capsys):
    assert config.main(run, RecordCommand, [f"recipe={recipe}"]) == 0
    said = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert len(TraceDataset(said["traces"])) == 5 and said["recorded"].startswith("2 heldout, 3 train")
    assert said["next"] == f"python -m learnkv.train recipe={recipe}"
    assert config.main(run, RecordCommand, [f"recipe={recipe}", "record.train=2", "record.kinds=prose"]) == 0
    assert f"next: python -m learnkv.train recipe={recipe} 'record.kinds=[prose]' record.train=2" in capsys.readouterr().out
    assert config.main(run, RecordCommand, [f"recipe={recipe}"]) == 0
    assert "to record: 0 traces" in capsys.readouterr().out


def test_the_command_records_the_users_own_prompts(recipe, tmp_path, capsys):
    lines = [f'{{"context": "The sky of day {i} is grey.", "question": "Which sky?", "answer": "grey"}}' for i in range(11)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    assert config.main(run, RecordCommand, [f"recipe={recipe}", f"prompts={tmp_path / 'mine.jsonl'}"]) == 0
    assert "recorded: 1 heldout, 10 train" in capsys.readouterr().out


def test_equal_contexts_of_the_users_own_never_lie_on_both_sides(tmp_path):
    contexts = [f"Day {i % 9 if i > 4 else 0}." for i in range(40)]
    lines = [json.dumps({"context": c, "question": f"Which {i}?", "answer": "grey"}) for i, c in enumerate(contexts)]
    (tmp_path / "mine.jsonl").write_text(
        "\n".join([*lines, *(json.dumps({"context": f"{i}", "question": "", "answer": "a"}) for i in range(5))])
    )
    made = make_prompts(RecordSettings(), byte_tokenizer(), str(tmp_path / "mine.jsonl"))
    sides = {split: {p.context for p in made if p.split == split} for split in ("train", "heldout")}
    assert len(made) == 45 and sides["heldout"] and not sides["train"] & sides["heldout"]


def test_contexts_beyond_the_models_positions_are_refused_before_they_are_made(recipe, capsys):
    assert config.main(run, RecordCommand, [f"recipe={recipe}", "record.num_tokens=100000000"]) == 2
    assert "record.num_tokens=100000000, and" in capsys.readouterr().err


def test_the_command_refuses_in_one_line(recipe, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    for wrong in ("record.mode=some", "record.trian=3", "record.shard_mib=-1", f"record.folder={tmp_path / 'file'}"):
        assert config.main(run, RecordCommand, [f"recipe={recipe}", wrong]) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: ") and "\n" not in error


def test_generated_prompts_of_both_splits_are_as_many_as_asked():
    settings = RecordSettings(kinds=["codes", "prose"], train=3, heldout=2, num_tokens=[1000, 1100])
    made = make_prompts(settings, byte_tokenizer())
    assert [prompt.split for prompt in made] == ["train"] * 6 + ["heldout"] * 4


@pytest.mark.slow
def test_torchrun_shares_a_recording(recipe, tmp_path):
    two = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "learnkv.record",
        f"recipe={recipe}",
    ]
    done = subprocess.run(two, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    shared = TraceDataset(said["traces"])
    assert len(shared) == 5 and len({row["shard"] for row in shared.rows}) == 2
    assert done.stdout.count("recorded: ") == 1


def test_numbers_that_are_not_finite_stop_a_recording_by_the_prompts_id(tmp_path):
    model, asked = copy.deepcopy(tiny_model()), own_prompts(2)
    model.model.layers[0].mlp.down_proj.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match=rf"prompt {asked[0].id} \(.*the model's keys are not all finite"):
        record_traces(model, byte_tokenizer(), asked, tmp_path / "traces", RecordSettings())
    assert not list((tmp_path / "traces").rglob("*.safetensors"))


@pytest.mark.parametrize("also", [5, [["hidden"]]])
def test_another_folders_edited_settings_stop_no_recording(tmp_path, also):
    settings = RecordSettings(folder=str(tmp_path))
    record_traces(tiny_model(), byte_tokenizer(), own_prompts(1), tmp_path / "other", replace(settings, over_questions="max"))
    path = tmp_path / "other" / format.CONFIG
    values = json.loads(path.read_text())
    values["settings"]["also"] = also
    path.write_text(json.dumps(values))
    assert trace_folder(tiny_model(), replace(settings, over_questions="max", also=["hidden"])).name != "other"
