"""The shipped gates: they load, and say of a committed trace what they said when they were trained."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learnkv.checkpoint import load_gate
from learnkv.traces.format import Trace

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path.name for path in (ROOT / "checkpoints").glob("*-smollm2-135m"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_gate_gives_the_committed_scores_on_the_committed_trace(name):
    gate = load_gate(ROOT / "checkpoints" / name)
    committed = load_file(ROOT / "tests" / "data" / f"{name}.safetensors")
    read = {field: committed[field] for field in ("keys", "values", "hidden") if field in committed}
    trace = Trace("committed", "codes", "heldout", committed["ids"], [], **read)
    assert torch.allclose(gate.score_trace(trace), committed["scores"], atol=1e-3, rtol=1e-4)


def test_something_is_shipped_with_a_card():
    assert SHIPPED
    assert all((ROOT / "checkpoints" / name / "README.md").is_file() for name in SHIPPED)
