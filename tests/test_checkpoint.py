"""A gate comes back from disk as it was, or one line says why not."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from learnkv.checkpoint import CARD, WEIGHTS, Card, gate_hash, load_gate, load_with_card, save_gate, tensors_of, weights_sha
from learnkv.gates.kvp import KVPConfig
from learnkv.models import describe
from tests.recording import tiny_model
from tests.training_parts import BASE, made_gate, made_trace

RECIPE = {"recipe": "kvp", "train": {"steps": 3}}
CONFIGS = [
    KVPConfig(branch_width=4, width=6),
    KVPConfig(branch_width=4, width=6, positions="table", max_positions=9, inputs=("keys",), shared=True),
]


@pytest.fixture
def folder(tmp_path):
    save_gate(made_gate(), tmp_path / "gate", RECIPE)
    return tmp_path / "gate"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_save_then_load_gives_the_same_scores(config, tmp_path):
    gate, trace = made_gate(config), made_trace(20)
    gate.calibrate([trace])
    save_gate(gate, tmp_path, RECIPE)
    loaded = load_gate(tmp_path)
    assert loaded.config == config
    assert loaded.base == BASE
    assert torch.equal(loaded.score_trace(trace), gate.score_trace(trace))


def test_saving_the_same_gate_twice_writes_the_same_bytes(folder, tmp_path):
    save_gate(made_gate(), tmp_path / "again", RECIPE)
    for name in (CARD, WEIGHTS):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_a_saved_gate_is_as_readable_as_any_file(folder):
    (folder / "plain").write_text("")
    modes = {(folder / name).stat().st_mode for name in (CARD, WEIGHTS, "plain")}
    assert len(modes) == 1


def test_card_says_what_the_gate_is(folder):
    card = json.loads((folder / CARD).read_text())
    assert (card["format_version"], card["method"], card["recipe"]) == (2, "kvp", RECIPE)
    assert card["base_model"]["num_kv_heads"] == 2
    assert card["config"]["width"] == 10


def test_the_time_of_a_training_is_kept_and_decides_no_score(folder, tmp_path):
    save_gate(made_gate(), tmp_path / "timed", RECIPE, train_seconds=12.5)
    assert (load_with_card(tmp_path / "timed")[1].train_seconds, load_with_card(folder)[1].train_seconds) == (12.5, None)
    assert gate_hash(load_gate(tmp_path / "timed")) == gate_hash(load_gate(folder))


def test_a_card_from_before_times_were_kept_loads():
    shipped = Path(__file__).parents[1] / "checkpoints" / "kvp-smollm2-135m"
    assert load_with_card(shipped)[1].method == load_gate(shipped).METHOD
    assert "train_seconds" in json.loads((shipped / CARD).read_text()) or load_with_card(shipped)[1].train_seconds is None


def test_killed_between_the_two_files_the_new_gate_loads(folder, tmp_path):
    new = made_gate(seed=1)
    save_gate(new, tmp_path / "new", RECIPE)
    (tmp_path / "new" / WEIGHTS).replace(folder / WEIGHTS)  # gate.json is still the old one's
    trace = made_trace(20)
    assert torch.equal(load_gate(folder).score_trace(trace), new.score_trace(trace))


def test_a_first_save_killed_before_its_card_loads(folder):
    (folder / CARD).unlink()
    assert load_gate(folder).METHOD == "kvp"


def test_a_failed_save_leaves_the_old_gate_and_no_scraps(folder, monkeypatch):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device", str(folder / WEIGHTS))

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        save_gate(made_gate(seed=1), folder, RECIPE)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_every_truncation_of_the_weights_is_one_clear_error(folder):
    whole = (folder / WEIGHTS).read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"gate\.safetensors of \d+ bytes is truncated"):
            load_gate(folder)


def test_an_edited_weight_is_noticed(folder):
    whole = bytearray((folder / WEIGHTS).read_bytes())
    whole[-3] ^= 1
    (folder / WEIGHTS).write_bytes(whole)
    with pytest.raises(ValueError, match="was edited: its tensors"):
        load_gate(folder)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda text: text[: len(text) // 2], "truncated or was edited"),
        (lambda text: "", "truncated or was edited"),
        (lambda text: "[]", "truncated or was edited"),
        (lambda text: text.replace('"width": 10', '"width": 11'), "config differs"),
        (lambda text: text.replace('"method": "kvp"', '"method": "kvq"'), "method differs"),
        (lambda text: text.replace('"format_version": 2', '"format_version": 7'), "format_version 7, this learnkv reads 2"),
        (lambda text: text.replace('"method"', '"methods"'), "truncated or was edited"),
        (lambda text: text.replace('"num_layers": 3', '"num_layers": "3"'), "truncated or was edited"),
        (lambda text: '{"format_version": 1, "kind": "kvp"}', "format_version 1, this learnkv reads 2"),
    ],
)
def test_an_edited_card_is_noticed(folder, edit, says):
    (folder / CARD).write_text(edit((folder / CARD).read_text()))
    with pytest.raises(ValueError, match=says):
        load_gate(folder)


def test_a_gate_of_a_version_that_lacked_a_knob_is_refused(folder, monkeypatch):
    gate = made_gate()
    monkeypatch.setattr(type(gate), "knobs", lambda self: {"width": 10})
    save_gate(gate, folder, RECIPE)
    with pytest.raises(ValueError, match=r"its config lacks branch_width, .*pooling.*; train again"):
        load_gate(folder)


def test_a_gates_hash_hangs_on_all_that_decides_its_scores():
    gates = [made_gate(), made_gate(seed=1), made_gate(replace(made_gate().config, pooling=0.5)), made_gate()]
    gates[-1].shift += 1
    assert gate_hash(made_gate()) == gate_hash(gates[0])
    assert len({gate_hash(gate) for gate in gates}) == len(gates)


def test_a_folder_without_a_gate_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no gate\.safetensors"):
        load_gate(tmp_path)


def test_weights_of_something_else_are_refused(folder):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match="no card of a gate"):
        load_gate(folder)


def test_a_model_of_another_geometry_is_refused_with_both_sides(tmp_path):
    model = tiny_model(layers=2)
    other = replace(describe(model), name="other", num_layers=5)
    save_gate(made_gate(base=other), tmp_path, RECIPE)
    with pytest.raises(ValueError, match="num_layers 5 against 2"):
        load_gate(tmp_path, model)


def test_other_weights_of_the_same_geometry_are_a_warning(tmp_path):
    model = tiny_model()
    save_gate(made_gate(base=describe(model)), tmp_path, RECIPE)
    load_gate(tmp_path, model)
    with pytest.warns(UserWarning, match="may rank badly"):
        load_gate(tmp_path, tiny_model(seed=1))


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    gate = made_gate()
    gate.head.weight.data[0] = float("nan")
    save_gate(gate, tmp_path, {})
    with pytest.raises(ValueError, match=r"gate\.safetensors: head\.weight hold numbers that are not finite"):
        load_gate(tmp_path)


def test_a_cards_text_is_no_way_to_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "7")
    gate = made_gate()
    card = asdict(Card("kvp", gate.knobs() | {"width": "${oc.env:SECRET}"}, gate.base, {}, weights_sha(tensors_of(gate))))
    save_file(tensors_of(gate), tmp_path / "gate.safetensors", {"card": json.dumps(card)})
    with pytest.raises(ValueError, match=r"oc\.env"):
        load_gate(tmp_path)
