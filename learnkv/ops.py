"""The one door to kernels: every op by name.  There is one implementation of each, plain torch, which runs on any device."""

from __future__ import annotations

from learnkv.kernels.reference import (
    attend,
    budget_reward,
    column_mass,
    gather_pages,
    page_owner,
    pl_logprob,
    row_lse,
    select,
)

__all__ = ["attend", "budget_reward", "column_mass", "gather_pages", "page_owner", "pl_logprob", "row_lse", "select"]
