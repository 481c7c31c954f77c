"""Judge Q: embeddings alone, and its loss."""

import copy

import pytest
import torch

from learnkv.gates.judge_q import JudgeQ
from learnkv.gates.probe_tokens import ProbeTokensConfig
from learnkv.models import BaseModel
from tests.probe_parts import gate_of, ids, model, moved_gate, rows_by_hand, served, trace
from tests.training_parts import batch_of


def test_it_has_its_embeddings_and_nothing_else():
    with torch.device("meta"):
        gate = JudgeQ(ProbeTokensConfig(), BaseModel("meta-llama/Llama-3.1-8B", "", 32, 8, 32, 128, 4096))
    assert [p.numel() for p in gate.parameters()] == [32 * 4096]


def test_distance_of_a_worked_example():
    target, shares = torch.tensor([[[0.6, 0.3, 0.1]], [[0.5, 0.2, 0.0]]]), torch.tensor([[[0.5, 0.25, 0.25]], [[0.5, 0.2, 0.0]]])
    assert gate_of("judge_q").distance(target, shares).item() == pytest.approx((0.1**2 + 0.05**2 + 0.15**2) / 2)


def test_served_scores_are_the_formula_in_float64():
    gate, tokens = moved_gate("judge_q"), ids(26)
    plain = copy.deepcopy(model()).double()
    want = rows_by_hand(plain, plain, tokens, gate.tokens.double()).unflatten(1, (2, 2)).mean(2)
    around = torch.stack([want[..., max(0, i - 1) : i + 2].amax(-1) for i in range(26)], -1)
    torch.testing.assert_close(torch.cat(served(gate, tokens)).double(), around, atol=1e-6, rtol=1e-4)


def test_loss_is_the_formula_in_float64():
    gate, recorded = moved_gate("judge_q"), trace(26)
    plain = copy.deepcopy(model()).double()
    shares = rows_by_hand(plain, plain, recorded.ids, gate.tokens.double())
    want = (shares - recorded.targets["attention"].double()).square().sum(-1).mean().item()
    assert gate.loss(batch_of(recorded))["loss"].item() == pytest.approx(want, rel=1e-4)
