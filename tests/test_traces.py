import errno
import json
import subprocess
from dataclasses import replace
from threading import Event, Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import load_dataset

from learnkv.models import BaseModel
from learnkv.traces import format
from learnkv.traces.dataset import TraceDataset
from learnkv.traces.format import Continuation, Trace, TraceConfig

BASE = BaseModel("tiny", "0123", num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=8, hidden_size=32)


def trace(name="ab", split="train", n=9):
    generator = torch.Generator().manual_seed(n)
    asked = [
        Continuation(torch.arange(3), torch.arange(2), torch.empty(0, dtype=torch.int64), (2, 4)),
        Continuation(*[torch.arange(i) for i in (1, 2, 3)]),
    ]
    keys = torch.randn(2, 2, n, 8, generator=generator).bfloat16()
    return Trace(
        name,
        "boxes",
        split,
        torch.arange(n),
        asked,
        keys=keys,
        values=2 * keys,
        mass=torch.rand(2, 2, n),
        targets={"utility": torch.rand(2, 2, n)},
    )


@pytest.fixture
def folder(tmp_path):
    """Three traces in two shards."""
    traces = [trace("ab"), trace("cd", "heldout", 1), trace("ef", n=17)]
    for each in traces:
        format.write_trace(tmp_path / f"{each.id}.part", each)
    format.pack([tmp_path / "ab.part", tmp_path / "cd.part"], tmp_path / "traces-00-00000.safetensors")
    format.pack([tmp_path / "ef.part"], tmp_path / "traces-00-00001.safetensors")
    for each in traces:
        (tmp_path / f"{each.id}.part").unlink()
    format.write_config(tmp_path, TraceConfig(BASE, {}, {"mode": "targets"}))
    format.write_manifest(tmp_path)
    return tmp_path


def assert_same(got, want):
    assert (got.id, got.kind, got.split, [q.span for q in got.questions]) == (
        want.id,
        want.kind,
        want.split,
        [q.span for q in want.questions],
    )
    ours, theirs = format.tensors_of(got), format.tensors_of(want)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


def test_a_trace_is_read_back_as_it_was_written(tmp_path):
    wanted = trace()
    format.write_trace(tmp_path / "traces-00-00000.safetensors", wanted)
    [row] = format.shard_rows(tmp_path)
    assert_same(format.read_trace(tmp_path, row), wanted)


def test_dataset_holds_every_trace_of_every_shard(folder):
    traces = TraceDataset(folder)
    assert sorted(t.id for t in traces) == ["ab", "cd", "ef"]
    assert [len(t.ids) for t in TraceDataset(folder, ids=["ef", "ab"])] == [17, 9]
    assert [t.id for t in traces.split("heldout")] == ["cd"]


def test_manifest_opens_with_datasets(folder):
    rows = load_dataset("parquet", data_files=str(folder / format.MANIFEST), split="train", cache_dir=str(folder / "cache"))
    assert {row["id"]: row["num_tokens"] for row in rows} == {"ab": 9, "cd": 1, "ef": 17}


def test_draws_depend_on_seed_and_step_only_and_every_epoch_visits_every_trace_once(folder):
    traces = TraceDataset(folder)
    drawn = [traces.draw(5, step, 2) for step in range(6)]
    assert drawn[3] == TraceDataset(folder).draw(5, 3, 2)
    flat = [index for draw in drawn for index in draw]
    assert [sorted(flat[i : i + 3]) for i in range(0, 12, 3)] == [[0, 1, 2]] * 4
    assert len({tuple(traces.order(seed, epoch)) for seed in range(4) for epoch in range(4)}) > 1


def test_two_writers_at_once_leave_a_whole_file_of_one_of_them(tmp_path):
    path, half_way, done = tmp_path / "file", Event(), Event()

    def slowly(to):
        to.write_text("slow")
        half_way.set()
        done.wait(10)

    slow = Thread(target=format.write_atomically, args=(path, slowly))
    slow.start()
    half_way.wait(10)
    format.write_atomically(path, lambda to: to.write_text("fast"))
    assert path.read_text() == "fast"
    done.set()
    slow.join()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"file": "slow"}


def test_what_a_killed_writer_left_goes_with_the_next_write_and_what_others_write_stays(tmp_path):
    killed = subprocess.Popen(["true"])
    killed.wait()
    mine, others = tmp_path / "file.1.5.tmp", tmp_path / "file.other.tmp"
    for left in (tmp_path / f"file.{killed.pid}.5.tmp", mine, others):
        left.write_text("left")
    format.write_atomically(tmp_path / "file", lambda to: to.write_text("new"))
    assert {p.name for p in tmp_path.iterdir()} == {"file", mine.name, others.name}


def test_a_full_disk_names_the_file_that_could_not_be_written(tmp_path):
    def fill(to):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"table\.md") as error:
        format.write_atomically(tmp_path / "table.md", fill)
    assert error.value.errno == errno.ENOSPC


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(to):
        to.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        format.write_atomically(path, fail)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"file": "old"}


def refusal(folder, **how):
    with pytest.raises(ValueError) as caught:
        list(TraceDataset(folder, **how))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
@pytest.mark.parametrize("name", ["traces-00-00001.safetensors", format.MANIFEST, format.CONFIG])
def test_a_truncated_file_is_named(folder, name, kept):
    path = folder / name
    path.write_bytes(path.read_bytes()[: kept if kept >= 0 else path.stat().st_size - 3])
    assert str(path) in refusal(folder)


def test_an_edited_shard_is_named(folder):
    path = folder / "traces-00-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert "edited" in (text := refusal(folder)) and str(path) in text


def test_an_edited_manifest_is_named(folder):
    path = folder / format.MANIFEST
    pq.write_table(pq.read_table(path).drop_columns(["checksum"]), path)
    assert "checksum" in (text := refusal(folder)) and str(path) in text


@pytest.mark.parametrize(("column", "value"), [("split", "train"), ("spans", "["), ("checksum", 7), ("num_tokens", "9")])
def test_an_edited_row_of_the_manifest_is_named(folder, column, value):
    path = folder / format.MANIFEST
    rows = [row | {column: value} for row in pq.read_table(path).to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert str(path) in (text := refusal(folder)) and "shards are reused" in text


def test_a_lost_shard_is_named(folder):
    (folder / "traces-00-00000.safetensors").unlink()
    assert "traces-00-00000.safetensors" in refusal(folder)


@pytest.mark.parametrize("edit", [{"format_version": 99}, {"base_model": {"name": "x"}}, {"base_model": None}, {"more": 1}])
def test_an_edited_or_foreign_config_is_named(folder, edit):
    path = folder / format.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    assert str(path) in refusal(folder)


def test_traces_of_another_model_are_refused_with_both_models(folder):
    text = refusal(folder, base_model=replace(BASE, weights_hash="4567"))
    assert "0123" in text and "4567" in text


def test_traces_serve_their_model_under_another_name(folder):
    assert len(TraceDataset(folder, base_model=replace(BASE, name="elsewhere/tiny"))) == 3


def test_a_missing_trace_or_split_is_named(folder):
    assert "zz" in refusal(folder, ids=["ab", "zz"])
    with pytest.raises(ValueError, match="heldout, train"):
        TraceDataset(folder).split("dev")


def test_a_folder_without_traces_is_named(tmp_path):
    assert str(tmp_path) in refusal(tmp_path)
