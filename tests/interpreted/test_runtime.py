"""Whole runs of a model through Triton: prefill, eviction, decoding, with the outcome of plain torch."""

import pytest
import torch

from learnkv import EvictionCache, Policy, attach, budgets, ops
from learnkv.heuristics.h2o import H2O
from learnkv.heuristics.snapkv import SnapKV
from tests.tiny_models import left_padded, prompt, tiny

POLICIES = {
    "ragged heads": Policy(SnapKV(), 20, budgets.adaptive, num_sinks=2, num_recent=8),
    "mass added up": Policy(H2O(), 20, num_sinks=2, num_recent=8),
    "one budget over all layers": Policy(SnapKV(), 20, budgets.adaptive_global, num_sinks=2, num_recent=8, interval=2),
}


def run(side, model, policy, ids, mask=None):
    """Logits of a prefill and four decode steps, and the positions held after them, every op on one side."""
    used = set()
    with ops.use(side), attach(model), torch.no_grad():
        cache = EvictionCache(policy, model)
        logits = [model(ids, attention_mask=mask, cache=cache).logits[:, -1]]
        for step in prompt(4, rows=len(ids), seed=5).split(1, 1):
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(ids), 1)], 1)
            logits.append(model(step, attention_mask=mask, cache=cache).logits[:, -1])
            used.add(ops.last_used)
    assert used == {side}
    return torch.stack(logits), [state.held.slots().positions for state in cache.states]


@pytest.mark.parametrize("name", POLICIES)
def test_prefill_eviction_and_four_steps_through_triton_equal_plain_torch(name):
    model, ids = tiny("llama"), prompt(45)
    (want, want_held), (got, held) = (run(side, model, POLICIES[name], ids) for side in ("reference", "triton"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(held, want_held, strict=True))


def test_a_padded_batch_through_triton_equals_plain_torch():
    model, (ids, mask) = tiny("llama"), left_padded([prompt(n)[0] for n in (45, 23)])
    policy = POLICIES["ragged heads"]
    (want, want_held), (got, held) = (run(side, model, policy, ids, mask) for side in ("reference", "triton"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(held, want_held, strict=True))
