"""The control of every gate: a twin trained on shuffled lessons has the gate's numbers to learn, on other tokens or rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from learnkv.gates import GATES
from learnkv.gates.base import Batch, Gate
from learnkv.gates.distilled import DistilledGate, Sequence
from learnkv.traces.format import Trace
from learnkv.training.steps import Steps
from tests import born_parts, distillation_parts, probe_parts, training_parts
from tests.training_parts import quick

DISTILLED = sorted(distillation_parts.SMALL)
STEADY = sorted(GATES.keys() - {"kvp", "dms"})  # their losses draw nothing, so that they tell one step from another by its lessons alone


class Few(list[Trace]):
    """Traces of which every step takes all."""

    def draw(self, seed: int, step: int, count: int) -> list[int]:
        return list(range(count))


def gate_and_traces(name: str) -> tuple[Gate, Few]:
    if name in DISTILLED:
        return distillation_parts.made_gate(name), Few([distillation_parts.made_trace(24), distillation_parts.made_trace(31, 1)])
    if name in born_parts.BORN:
        return born_parts.gate_for(name), Few([born_parts.recorded(24), born_parts.recorded(31, 1)])
    if name in probe_parts.SMALL:
        return probe_parts.moved_gate(name), Few([probe_parts.trace(24), probe_parts.trace(31, 1)])
    return training_parts.made_gate(), Few([training_parts.made_trace(24), training_parts.made_trace(31, 1)])


def batch_of(traces: Few, step: int = 0, **changes: object) -> Batch:
    return Steps(traces, quick(batch=len(traces), **changes), 0, 1).batch(step)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GATES)
def test_the_twin_of_every_gate_has_other_lessons(name):
    gate, traces = gate_and_traces(name)
    own, twin, again = (gate.loss(batch_of(traces, shuffled=shuffled))["losses"] for shuffled in (False, True, True))
    assert ((own - twin).abs() > 1e-4 * own).all()
    assert torch.equal(twin, again)


@pytest.mark.parametrize("name", STEADY)
def test_the_twins_lessons_are_the_same_in_every_step_and_others_with_another_seed(name):
    gate, traces = gate_and_traces(name)
    first, later = (gate.loss(batch_of(traces, step, shuffled=True))["losses"] for step in (0, 7))
    assert torch.equal(first, later)
    assert not torch.equal(first, gate.loss(batch_of(traces, shuffled=True, seed=1))["losses"])


def test_every_target_of_a_trace_is_dealt_out_alike_and_keeps_its_numbers():
    trace = born_parts.recorded(24)
    batch = batch_of(Few([trace]), shuffled=True)
    (dealt,), order = batch.traces, batch.order(trace, 24)
    assert set(trace.targets) == {"utility", "attention", "peak_logit", "reconstruction", "reconstruction_plus"}
    for name, target in trace.targets.items():
        assert torch.equal(dealt.targets[name], target[..., order])
        assert torch.equal(dealt.targets[name].sort().values, target.sort().values)
    assert dealt.keys is trace.keys and torch.equal(dealt.ids, trace.ids)


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_nobody_keeps_its_own_lesson(count):
    trace, batch = born_parts.recorded(24), Batch((), seed=0, step=5, shuffled=True)
    order = batch.order(trace, count)
    assert torch.equal(order.sort().values, torch.arange(count))
    assert count == 1 or (order != torch.arange(count)).all()
    assert torch.equal(order, replace(batch, step=9).order(trace, count))
    assert torch.equal(Batch((), seed=0, step=5).order(trace, count), torch.arange(count))


# ---- distilled gates that leave the model as it is: what is left of the loss is how far the lessons lie from the rows themselves

IDLE = {
    "trimkv": dict(width=6, bias=60.0, budget=1000),
    "dms": dict(window=1000, ratio=1.0),
    "duo_attention": dict(num_sinks=1000, weight=0.0),
}


def idle(name: str) -> DistilledGate:
    return distillation_parts.made_gate(name, GATES[name].Config(**IDLE[name]))


@pytest.mark.parametrize("name", DISTILLED)
def test_a_distilled_twin_learns_what_the_model_says_in_other_rows(name):
    gate, trace = idle(name), distillation_parts.made_trace(24)
    batch = batch_of(Few([trace]), shuffled=True)
    sequence = Sequence.of(trace, torch.device("cpu"))
    rows = sequence.rows("answers" if name == "duo_attention" else "all")
    teachers = rows[batch.order(trace, len(rows))]
    model = distillation_parts.model()
    with torch.no_grad():
        if name == "duo_attention":
            said = model.model(sequence.ids[None]).last_hidden_state[0]
            want = (said[rows] - said[teachers]).square().mean()
        else:
            log_p = model(sequence.ids[None]).logits[0].double().log_softmax(-1)
            want = (log_p[teachers].exp() * (log_p[teachers] - log_p[rows])).sum(-1).mean()
        if name == "trimkv":
            want = want - log_p[rows, sequence.ids[teachers + 1]].mean()
    assert gate.loss(batch)["loss"].item() == pytest.approx(want.item(), rel=1e-3)
