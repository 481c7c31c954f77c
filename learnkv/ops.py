"""The one door to kernels: every op by name, in plain torch or in Triton by where its tensors lie."""

from __future__ import annotations

from learnkv.kernels.reference import (
    attend,
    budget_reward,
    column_mass,
    gather_pages,
    pl_logprob,
    row_lse,
    select,
)

__all__ = ["attend", "budget_reward", "column_mass", "gather_pages", "pl_logprob", "row_lse", "select"]
