"""Interpreted tests run under TRITON_INTERPRET=1, in processes that tests/test_interpreted.py starts; what they allocate is poisoned."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]

MOST_POISONED = 2**27  # elements; a larger tensor is virtual memory, of which a test touches some rows


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same allocation, NaN where nothing was written."""

    def call(*args, **kwargs) -> Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() and tensor.numel() <= MOST_POISONED else tensor

    return call


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
