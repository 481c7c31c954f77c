"""The grammar in which a comparison names its methods."""

import pytest

from learnkv.evaluation.entries import Entry, parse_entry

NAMES = ["snapkv", "kvp", "key_diff"]


@pytest.mark.parametrize(
    "text, entry",
    [
        ("snapkv", Entry("snapkv")),
        ("snapkv+adaptive", Entry("snapkv", allocator="adaptive")),
        ("snapkv(window=16)", Entry("snapkv", (("window", 16),))),
        ("snapkv(pooling=mean kernel=5)+uniform", Entry("snapkv", (("kernel", 5), ("pooling", "mean")), "uniform")),
        ("kvp:checkpoints/my run", Entry("kvp", path="checkpoints/my run")),
        ("kvp+adaptive_global:C:/runs/a+b(1)", Entry("kvp", allocator="adaptive_global", path="C:/runs/a+b(1)")),
    ],
)
def test_entry_is_read_as_written(text, entry):
    assert parse_entry(text, NAMES) == entry


def test_order_of_knobs_does_not_make_another_method():
    one, two = (parse_entry(f"snapkv({knobs})", NAMES) for knobs in ("a=1 b=true", "b=true  a=1"))
    assert one == two and one.method == "snapkv(a=1 b=true)" and parse_entry(str(one), NAMES) == one


@pytest.mark.parametrize(
    "text, said",
    [
        ("snapkw", "nearest: snapkv"),
        ("snapkv+adaptiv", "nearest: adaptive"),
        ("snapkv(window=16,kernel=5)", "separate knobs by spaces"),
        ("snapkv(window)", "'window' is not knob=value"),
        ("snapkv(window=1 window=2)", "window twice"),
        ("snapkv(window=[1])", "is not a number"),
        ("snapkv(window=16", "not of the form"),
        ("", "not of the form"),
    ],
)
def test_mistake_is_named_with_what_is_near_it(text, said):
    with pytest.raises(ValueError, match=said):
        parse_entry(text, NAMES)


def test_pattern_finds_every_run_that_holds_a_gate(tmp_path):
    for name in ("run-1", "run-0", "run-x", "other"):
        (tmp_path / name).mkdir()
    for name in ("run-1", "run-0", "other"):
        (tmp_path / name / "gate.safetensors").touch()
    assert parse_entry(f"kvp:{tmp_path}/run-*", NAMES).folders() == [f"{tmp_path}/run-0", f"{tmp_path}/run-1"]
    assert parse_entry("kvp:runs/missing", NAMES).folders() == ["runs/missing"]
    with pytest.raises(ValueError, match="no folder matches"):
        parse_entry(f"kvp:{tmp_path}/walk-*", NAMES).folders()
