"""The door to kernels: which side a call takes, who may say so, and that both sides are the same op."""

import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from learnkv import ops
from learnkv.kernels import reference

OPS = {name: op for name, op in vars(ops).items() if getattr(op, "__wrapped__", None) is getattr(reference, name, 0)}
CUDA = SimpleNamespace(is_cuda=True)


def module_of(op):
    """The kernels file that an op of the door was given."""
    return next(cell.cell_contents for cell in op.__closure__ if isinstance(cell.cell_contents, str))


@pytest.mark.parametrize("name", OPS)
def test_both_sides_of_an_op_take_the_same_arguments(name):
    other = getattr(importlib.import_module(f"learnkv.kernels.{module_of(OPS[name])}"), name)
    mine, theirs = (list(inspect.signature(op).parameters.values()) for op in (getattr(reference, name), other))
    assert [(p.name, p.default, p.kind) for p in mine] == [(p.name, p.default, p.kind) for p in theirs]


def test_there_are_as_many_ops_as_the_door_says():
    assert {"attend", "attend_with_mass", "column_mass", "select", "compact", "append_kv", "mlp_scorer", "pl_logprob"} <= OPS.keys()
    assert len(OPS) == 21


def test_cpu_tensors_take_plain_torch_and_the_last_call_says_so(monkeypatch):
    monkeypatch.setattr(ops, "last_used", None)
    ops.budget_reward(torch.ones(3))
    assert ops.last_used == "reference"


def test_cuda_tensors_take_triton_unless_the_reference_is_forced(monkeypatch):
    monkeypatch.setattr(ops, "Tensor", SimpleNamespace)
    assert ops.side_of([1.0, CUDA]) == "triton"
    with ops.use("reference"):
        assert ops.side_of([CUDA]) == "reference"
    monkeypatch.setenv("LEARNKV_KERNELS", "reference")
    assert ops.side_of([CUDA]) == "reference"


def test_what_forces_a_side_ends_with_its_block_after_an_error_too(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KeyError), ops.use("triton"):
        assert ops.side_of([torch.ones(1)]) == "triton"
        raise KeyError
    assert ops.side_of([torch.ones(1)]) == "reference"


@pytest.mark.parametrize("named", ["cuda", "Triton"])
def test_an_unknown_side_is_refused_by_name(named, monkeypatch):
    with pytest.raises(ValueError, match=named), ops.use(named):
        pass
    monkeypatch.setenv("LEARNKV_KERNELS", named)
    with pytest.raises(ValueError, match=f"LEARNKV_KERNELS={named}"):
        ops.side_of([torch.ones(1)])


def test_triton_on_cpu_tensors_says_what_to_do(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ops.use("triton"), pytest.raises(ValueError, match="tensors are on cpu; move them to CUDA, start Python with TRITON_INTERPRET=1"):
        ops.budget_reward(torch.ones(3))


def test_an_empty_variable_names_no_side(monkeypatch):
    monkeypatch.setenv("LEARNKV_KERNELS", "")
    assert ops.side_of([torch.ones(1)]) == "reference"


def test_cuda_tensors_without_triton_are_an_error_with_a_hint(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(ops, "import_module", missing)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with (
        ops.use("triton"),
        pytest.raises(RuntimeError, match=r"ops\.budget_reward .* pip install triton, or set LEARNKV_KERNELS=reference"),
    ):
        ops.budget_reward(torch.ones(3))
