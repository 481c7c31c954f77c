"""A run's result is a function of traces, recipe and seed: not of interruptions, processes or kills."""

import itertools
import math
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from learnkv.checkpoint import CARD, WEIGHTS, load_gate, save_gate
from learnkv.gates.kvp import KVP
from learnkv.traces import format
from learnkv.traces.record import RecordSettings
from learnkv.training.fit import EVENTS, LAST, seconds_trained
from learnkv.training.module import learning_rate
from learnkv.training.steps import Steps, recorded_cut, uniform_cut
from tests.training_parts import BASE, made_folder, made_gate, made_trace, power_fails, quick, same, train, written

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return made_folder(tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="module")
def finished(traces, tmp_path_factory):
    """(gate, run folder) of an uninterrupted run."""
    run = tmp_path_factory.mktemp("run")
    return train(str(traces.folder), str(run)), run


def curve(run: Path, tag: str = "loss") -> dict[int, float]:
    events = EventAccumulator(str(run / EVENTS), size_guidance={"scalars": 0}).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


@pytest.mark.parametrize("step", [3, 4, 6, 9, 11])
def test_interrupted_and_resumed_equals_uninterrupted(finished, traces, tmp_path, step):
    with power_fails(KVP, step):
        train(str(traces.folder), str(tmp_path))
    assert same(train(str(traces.folder), str(tmp_path)), finished[0])


def test_the_time_of_a_run_is_that_of_its_steps_over_interruptions(finished, traces, tmp_path, monkeypatch):
    ticks = itertools.count(0, 10)
    monkeypatch.setattr("learnkv.training.module.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    with power_fails(KVP, 6):  # the last checkpoint is that of step 4
        train(str(traces.folder), str(tmp_path))
    assert seconds_trained(tmp_path) == 40
    train(str(traces.folder), str(tmp_path))
    assert seconds_trained(tmp_path) == 120
    train(str(traces.folder), str(tmp_path))
    assert seconds_trained(tmp_path) == 120
    assert seconds_trained(finished[1]) > 0


def test_a_finished_run_trains_no_more(finished, traces, monkeypatch):
    gate, run = finished
    monkeypatch.setattr(KVP, "loss", None)
    assert same(train(str(traces.folder), str(run)), gate)


def test_another_seed_trains_another_gate(finished, traces, tmp_path):
    assert not same(train(str(traces.folder), str(tmp_path), seed=1), finished[0])


def test_reward_rises_in_training(traces, tmp_path):
    run = tmp_path / "run"
    train(str(traces.folder), str(run), steps=90, warmup=5, eval_every=30, ema=0.9)
    rewards = curve(run, "heldout/reward")
    assert list(rewards) == [30, 60, 90]
    assert rewards[90] > rewards[30] + 0.1


def test_tensorboard_shows_scalars_and_the_map_of_heads(finished):
    events = EventAccumulator(str(finished[1] / EVENTS)).Reload()
    layers = {f"heldout_layer/{layer:02d}" for layer in range(BASE.num_layers)}
    assert set(events.Tags()["scalars"]) >= {"loss", "reward", "gradient_norm", "heldout/reward"} | layers
    assert events.Tags()["images"] == ["heldout/reward_by_layer_and_head"]


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        ({"keys": made_trace(30, 77).keys * math.nan}, "trace {}: its keys"),
        ({"targets": {"utility": torch.full((3, 2, 30), math.nan)}}, "loss of trace {}"),
    ],
)
def test_nan_stops_with_the_id_of_the_trace(tmp_path, spoilt, says):
    folder = tmp_path / "traces"
    made_folder(folder, train=3)
    bad = replace(made_trace(30, 77), **spoilt)
    format.write_trace(folder / "traces-00-bad.safetensors", bad)
    format.write_manifest(folder)
    with pytest.raises(ValueError, match=says.format(bad.id)):
        train(str(folder), str(tmp_path / "run"), steps=4)


def test_a_weight_without_gradient_is_named(traces, tmp_path, monkeypatch):
    loss = KVP.loss

    def frozen_head(self, batch):
        self.head.weight.data.zero_()  # what lies before it then learns nothing
        return loss(self, batch)

    monkeypatch.setattr(KVP, "loss", frozen_head)
    with pytest.raises(ValueError, match=r"no gradient to branches\.0\.linear\.weight"):
        train(str(traces.folder), str(tmp_path))


def test_an_unwritable_run_folder_is_an_error_that_names_it(traces, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        train(str(traces.folder), str(tmp_path / "file" / "run"))


@pytest.mark.parametrize("content", [b"hello", b"", b"PK\x03\x04"])
def test_another_file_in_the_place_of_the_last_checkpoint_is_one_clear_error(traces, tmp_path, content):
    (tmp_path / LAST).write_bytes(content)
    with pytest.raises(ValueError, match="truncated or was edited"):
        train(str(traces.folder), str(tmp_path))


def test_a_checkpoint_of_something_else_is_one_clear_error(finished, traces, tmp_path):
    torch.save({"a": 1}, tmp_path / LAST)
    with pytest.raises(ValueError, match=r"last\.ckpt lacks pytorch-lightning_version, .*delete it"):
        train(str(traces.folder), str(tmp_path))
    other = torch.load(finished[1] / LAST, weights_only=True)
    other["state_dict"]["gate.scale"] = torch.ones(7)
    torch.save(other, tmp_path / LAST)
    with pytest.raises(ValueError, match=r"gate\.scale of shape \(7,\), this gate \(3, 2\)"):
        train(str(traces.folder), str(tmp_path))


def test_a_run_is_not_gone_on_with_on_other_traces_or_another_model(finished, traces, tmp_path):
    shutil.copy(finished[1] / LAST, tmp_path / LAST)
    made_folder(tmp_path / "more", train=7)
    with pytest.raises(ValueError, match=r"was trained on other traces \(.*resume=never"):
        train(str(tmp_path / "more"), str(tmp_path))
    other = replace(BASE, weights_hash="another")
    written(tmp_path / "model", lambda i, split: made_trace(40 + 3 * i, i, split=split), other, RecordSettings(), train=6, heldout=2)
    with pytest.raises(ValueError, match=r"other base model's weights \(0123456789abcdef\) than are here now \(another\)"):
        train(str(tmp_path / "model"), str(tmp_path))


def test_a_twin_is_calibrated_on_what_it_was_taught(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(KVP, "calibrate", lambda self, traces: seen.extend(traces))
    folder = made_folder(tmp_path / "traces", train=2)
    for shuffled in (False, True):
        train(str(folder.folder), str(tmp_path / f"run{shuffled}"), steps=2, shuffled=shuffled)
    real, dealt = seen[:2], seen[2:]
    assert [t.id for t in real] == [t.id for t in dealt]
    for one, two in zip(real, dealt, strict=True):
        assert not torch.equal(one.targets["utility"], two.targets["utility"])
        assert torch.equal(one.targets["utility"].sort().values, two.targets["utility"].sort().values)


def test_a_truncated_last_checkpoint_is_one_clear_error(finished, traces, tmp_path):
    (tmp_path / LAST).write_bytes((finished[1] / LAST).read_bytes()[:1000])
    with pytest.raises(ValueError, match="truncated or was edited"):
        train(str(traces.folder), str(tmp_path))


def test_training_is_quiet_but_for_its_bar(traces, tmp_path, capfd):
    train(str(traces.folder), str(tmp_path))
    out, err = capfd.readouterr()
    lines = [line for line in (out + err).replace("\r", "\n").splitlines() if line.strip() and "it/s" not in line]
    assert lines == []


def test_processes_share_each_step_and_nothing_else(traces):
    settings = quick(batch=4, cut="uniform")
    whole = Steps(traces, settings, 0, 1).batch(5)
    shares = [Steps(traces, settings, rank, 2).batch(5) for rank in range(2)]
    assert sorted(t.id for share in shares for t in share.traces) == sorted(t.id for t in whole.traces)
    lengths = {t.id: len(t.ids) for t in whole.traces}
    assert all(len(t.ids) == lengths[t.id] for share in shares for t in share.traces)


def test_a_batch_that_processes_cannot_share_is_refused(traces):
    with pytest.raises(ValueError, match=r"train\.batch=3"):
        Steps(traces, quick(batch=3), 0, 2)


def test_uniform_cuts_reach_from_the_least_to_the_whole():
    trace = made_trace(12)
    cuts = [uniform_cut(trace, 8, torch.Generator().manual_seed(i)) for i in range(100)]
    assert {len(t.ids) for t in cuts} == {8, 9, 10, 11, 12}
    assert all(t.keys.shape[2] == t.targets["utility"].shape[2] == len(t.ids) for t in cuts)


def test_shuffled_targets_are_the_same_numbers_on_other_tokens_in_every_step(tmp_path):
    traces = made_folder(tmp_path)
    steps, plain = (Steps(traces, quick(batch=8, shuffled=shuffled), 0, 1) for shuffled in (True, False))
    for step in (0, 3):
        dealt = {t.id: t for t in steps.batch(step).traces}
        for trace in plain.batch(step).traces:
            mine, given = dealt[trace.id].targets["utility"], trace.targets["utility"]
            order = [given[0, 0].tolist().index(value) for value in mine[0, 0].tolist()]
            assert order != sorted(order) and torch.equal(mine, given[..., order])
            assert torch.equal(mine, {t.id: t for t in steps.batch(0).traces}[trace.id].targets["utility"])


def test_recorded_cuts_bring_their_own_utility():
    trace = made_trace(12)
    own = torch.rand(2, *trace.targets["utility"].shape)
    trace = replace(trace, targets=trace.targets | {"utility_cuts": own, "cut_positions": torch.tensor([5, 9])})
    found = {len(t.ids): t for t in (recorded_cut(trace, 2, torch.Generator().manual_seed(i)) for i in range(50))}
    assert set(found) == {5, 9, 12}
    assert torch.equal(found[9].targets["utility"], own[1, ..., :9])
    assert torch.equal(found[12].targets["utility"], trace.targets["utility"])


def test_learning_rate_warms_up_and_falls_to_its_end():
    settings = quick(steps=100, warmup=10, lr=1e-2, min_lr=1e-5)
    rates = [learning_rate(step, settings) for step in range(101)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[10] == max(rates) == pytest.approx(1e-2)
    assert rates[100] == pytest.approx(1e-5)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0.0}, {"lr": math.nan}, {"ema": 1.0}, {"batch": -1}, {"warmup": -1}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=f"train.{next(iter(wrong))}="):
        quick(**wrong)


# ---- processes of their own

RUN = """
import sys
from tests.training_parts import train
train(sys.argv[1], sys.argv[2], **eval(sys.argv[3]))
"""


def run_processes(count: int, traces: Path, run: Path, **changes: object) -> None:
    """A run of `count` processes under torchrun."""
    script = run.with_suffix(".py")
    script.write_text(RUN)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(script), str(traces), str(run), repr(changes)], cwd=ROOT, env=environment, check=True, timeout=900)


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one(traces, tmp_path):
    settings = {"steps": 20, "batch": 4, "cut": "uniform"}
    for count in (1, 2):
        run_processes(count, traces.folder, tmp_path / str(count), **settings)
    for tag in ("loss", "reward", "heldout/reward"):
        one, two = curve(tmp_path / "1", tag), curve(tmp_path / "2", tag)
        assert one.keys() == two.keys()
        assert all(one[step] == pytest.approx(two[step], abs=1e-5) for step in one), tag


def train_and_save(folder: str, run: str, changes: dict, saves: int) -> None:
    gate = train(folder, run, **changes)
    for _ in range(saves):
        save_gate(gate, Path(run), {"recipe": "made"})


def started(*arguments: object) -> multiprocessing.process.BaseProcess:
    """`train_and_save` in a forked process, which begins at once."""
    process = multiprocessing.get_context("fork").Process(target=train_and_save, args=arguments)
    process.start()
    return process


def finished_in(*arguments: object) -> float:
    """Seconds of an undisturbed `train_and_save`."""
    began = time.monotonic()
    process = started(*arguments)
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(("steps", "saves", "window"), [(100, 1, (0.1, 0.95)), (12, 10, (0.4, 0.95))], ids=["training", "final save"])
def test_killed_ten_times_the_next_run_equals_an_uninterrupted_one(traces, tmp_path, steps, saves, window):
    changes = {"steps": steps, "save_every": 10, "eval_every": 50}
    whole = finished_in(str(traces.folder), str(tmp_path / "whole"), changes, saves)
    rng = random.Random(steps)
    for _ in range(10):
        process = started(str(traces.folder), str(tmp_path / "killed"), changes, saves)
        process.join(whole * rng.uniform(*window))  # a machine that got faster finishes before
        process.kill()
        process.join()
        if (tmp_path / "killed" / WEIGHTS).exists():
            load_gate(tmp_path / "killed")
    finished_in(str(traces.folder), str(tmp_path / "killed"), changes, 1)
    for name in (CARD, WEIGHTS):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def save_in_turn(folder: str, gates: list[KVP]) -> None:
    while True:
        for gate in gates:
            save_gate(gate, Path(folder), {})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_while_a_gate_replaces_another_one_of_them_loads(tmp_path):
    gates = [made_gate(seed=s) for s in range(2)]
    save_gate(gates[0], tmp_path, {})
    rng = random.Random(0)
    for _ in range(10):
        process = multiprocessing.get_context("fork").Process(target=save_in_turn, args=(str(tmp_path), gates))
        process.start()
        time.sleep(rng.uniform(0.05, 0.3))
        process.kill()
        process.join()
        loaded = load_gate(tmp_path)
        assert any(same(loaded, gate) for gate in gates)
