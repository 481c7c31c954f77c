"""The shipped gates: they load, and say of a committed trace what they said when they were trained."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learnkv.checkpoint import load_gate
from learnkv.gates import GATES
from learnkv.gates.probe_tokens import ProbeTokens
from learnkv.models import load_model
from learnkv.traces.format import Trace

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path.name for path in (ROOT / "checkpoints").glob("*-smollm2-135m"))
FIELDS = ("keys", "values", "hidden")
AT_MOST = 12_000_000  # bytes of a gate


def runs_the_model(name: str) -> bool:
    return issubclass(GATES[name.partition("-")[0]], ProbeTokens)


def shipped(name: str):
    mark = [pytest.mark.slow] if runs_the_model(name) else []
    return pytest.param(name, marks=mark)


@pytest.mark.parametrize("name", [shipped(name) for name in SHIPPED])
def test_shipped_gate_gives_the_committed_scores_on_the_committed_trace(name):
    gate = load_gate(ROOT / "checkpoints" / name)
    if runs_the_model(name):
        gate = gate.bind(load_model("smollm2-135m", torch.float32)[0])
    committed = load_file(ROOT / "tests" / "data" / f"{name}.safetensors")
    read = {field: committed[field] for field in FIELDS if field in committed}
    trace = Trace("committed", "codes", "heldout", committed["ids"], [], **read)
    assert torch.allclose(gate.score_trace(trace), committed["scores"], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_gate_has_a_card_and_at_most_12_megabytes(name):
    folder = ROOT / "checkpoints" / name
    assert (folder / "README.md").is_file()
    assert (folder / "gate.safetensors").stat().st_size <= AT_MOST


def test_all_the_gates_that_the_readme_promises_are_shipped():
    assert [name.partition("-")[0] for name in SHIPPED] == ["fast_kvzip", "foresight", "kvp", "kvzap", "lookaheadkv"]
