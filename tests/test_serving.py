"""The planner's server: pages and tokens are conserved, queues are as their formulas say, and nothing beats the bound."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learnkv.serving import caches
from learnkv.serving.batcher import Batcher, Limits
from learnkv.serving.bound import bound, paged
from learnkv.serving.cards import CARDS, card_of
from learnkv.serving.cells import run_cells, server_of
from learnkv.serving.cost import Impossible, Work, machine_of
from learnkv.serving.fits import request_pages
from learnkv.serving.job import Job
from learnkv.serving.pool import PagePool
from learnkv.serving.preemption import contest
from learnkv.serving.requests import Session, Turn, count
from learnkv.serving.settings import PlanSettings
from learnkv.serving.shapes import SHAPES, shape_from, shape_of
from learnkv.serving.simulate import simulate
from learnkv.serving.victims import VICTIMS
from learnkv.serving.workload import Load, draw
from tests.serving_parts import CARD, HYBRID, TINY, Even, cache_models, fixed, limits_of, watched, workloads

AMPLE = Limits(pages=10**6, step_tokens=4096, batch=1)
FULL = caches.full(TINY)


# ---- conservation


@settings(deadline=None, max_examples=80)
@given(workloads(), cache_models(), limits_of())
def test_tokens_and_pages_are_conserved(sessions, cache, limits):
    run, clock = watched(sessions, TINY, cache, limits)
    assert len(run.jobs) + run.refused == count(sessions)
    assert all(job.generated == job.output for job in run.jobs)
    needed = sum(job.prompt - job.reused + job.output - 1 for job in run.jobs)
    assert run.counts.prefilled + run.counts.decoded == needed + run.counts.recomputed == sum(work.tokens for work in clock.steps)
    assert sum(job.lost for job in run.jobs) == run.counts.recomputed
    assert sum(job.preemptions for job in run.jobs) == run.counts.preemptions
    assert run.counts.pages_in == run.counts.pages_out
    assert run.peak <= limits.pages


@settings(deadline=None, max_examples=30)
@given(workloads(), cache_models(HYBRID), limits_of())
def test_a_model_with_sliding_layers_conserves_them_too(sessions, cache, limits):
    run, _ = watched(sessions, HYBRID, cache, limits)
    assert len(run.jobs) + run.refused == count(sessions)


@settings(deadline=None, max_examples=30)
@given(workloads(), cache_models(), limits_of())
def test_times_go_forward(sessions, cache, limits):
    run, _ = watched(sessions, TINY, cache, limits)
    for job in run.jobs:
        assert job.arrived <= job.admitted < job.first_token <= job.finished
    assert run.busy <= run.end + 1e-9


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9))))
def test_a_pool_neither_makes_nor_loses_pages(moves):
    pool = PagePool(60)
    for owner, pages in moves:
        pool.hold(owner, pages)
        pool.check()
    assert sum(pool.release(owner) for owner in range(5)) == sum(dict(moves).values())
    assert pool.free == pool.size == 60


# ---- closed forms


def waits(sessions, clock, output=1):
    run = simulate(sessions, TINY, FULL, clock, AMPLE)
    return np.array([job.admitted - job.arrived for job in sorted(run.jobs, key=lambda job: job.number)])


def test_even_arrivals_below_capacity_never_wait():
    assert not waits(fixed(50, 16, 10, gap=10.5), Even()).any()  # 1 step of prefill, 9 of decoding


def test_even_arrivals_above_capacity_wait_longer_and_longer():
    np.testing.assert_allclose(waits(fixed(50, 16, 10, gap=8.0), Even()), 2.0 * np.arange(50))


def lindley(sessions, service):
    """Waiting times of a queue of one server, one after the other."""
    wait, found = 0.0, [0.0]
    for before, after, busy in zip(sessions, sessions[1:], service, strict=False):
        wait = max(0.0, wait + busy - (after.start - before.start))
        found.append(wait)
    return np.array(found)


@pytest.mark.parametrize("lengths", ["fixed", "geometric"])
def test_a_batch_of_one_is_a_queue_in_order(lengths):
    sessions = draw(Load(3000, 0.1, 16, 6, lengths=lengths), 0)
    service = [-(-s.turns[0].prompt // 4096) + s.turns[0].output - 1 for s in sessions]
    np.testing.assert_allclose(waits(sessions, Even()), lindley(sessions, service), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.6])
def test_poisson_arrivals_of_one_size_wait_as_in_m_d_1(load):
    """300,000 requests of one step: within 2% of rho / (2 (1 - rho)) services."""
    mean = waits(draw(Load(300_000, load, 16, 1), 0), Even()).mean()
    assert mean == pytest.approx(load / (2 * (1 - load)), rel=0.02)


@pytest.mark.slow
def test_geometric_answers_wait_as_in_m_m_1():
    """150,000 answers of 20 steps on average, at a load of 0.4: within 2% of Pollaczek and Khinchine's, which nears M/M/1's."""
    mean, load = 20, 0.4
    sessions = [
        Session(s.start, (Turn(16, s.turns[0].output),)) for s in draw(Load(150_000, load / mean, 16, mean, lengths="geometric"), 1)
    ]
    p = 1 / mean
    second = (2 - p) / p**2
    found = waits(sessions, Even()).mean()
    assert found == pytest.approx(load / mean * second / (2 * (1 - load)), rel=0.02)
    assert found == pytest.approx(load / (1 - load) * mean, rel=0.05)  # exponential service


def test_a_saturated_batch_gives_its_tokens_every_step():
    limits = replace(AMPLE, batch=8, step_tokens=8 * 64)
    run = simulate(fixed(80, 64, 30), TINY, FULL, Even(0.5), limits)
    assert run.tokens / run.seconds == pytest.approx(8 / 0.5)


def test_a_saturated_batch_takes_what_its_steps_cost_one_by_one():
    machine, slots = machine_of(TINY, CARD, FULL), TINY.heads
    run = simulate(fixed(4, 64, 30), TINY, FULL, machine, replace(AMPLE, batch=4))
    want = machine.seconds(Work(tokens=256, prefilled=256, rows=4, prefill_slots=4 * slots * 64 * 65 // 2, new_slots=256 * slots))
    want += sum(machine.seconds(Work(tokens=4, rows=4, decode_slots=4 * slots * (64 + k), new_slots=4 * slots)) for k in range(1, 30))
    assert run.seconds == pytest.approx(want)


# ---- the bound


@settings(deadline=None, max_examples=120)
@given(st.sampled_from([TINY, HYBRID]), st.data(), workloads(), limits_of())
def test_no_schedule_beats_the_bound(shape, data, sessions, limits):
    cache = data.draw(cache_models(shape))
    run, clock = watched(sessions, shape, cache, limits)
    least = bound(sessions, shape, cache, clock.machine, limits)
    if not run.jobs:
        assert least.tokens_s == 0
        return
    slack = 1 + 1e-9
    assert least.seconds <= run.seconds * slack
    assert run.tokens / run.seconds <= least.tokens_s * slack
    assert least.ttft_s <= np.mean([job.first_token - job.arrived for job in run.jobs]) * slack
    assert least.latency_s <= np.mean([job.finished - job.arrived for job in run.jobs]) * slack
    paces = [(job.finished - job.first_token) / (job.output - 1) for job in run.jobs if job.output > 1]
    assert not paces or least.tpot_s <= np.mean(paces) * slack


def test_the_bound_is_met_by_a_request_alone():
    machine = machine_of(TINY, CARD, FULL)
    run = simulate(fixed(1, 100, 20), TINY, FULL, machine, AMPLE)
    assert bound(fixed(1, 100, 20), TINY, FULL, machine, AMPLE).seconds == pytest.approx(run.seconds, rel=0.05)


@settings(deadline=None, max_examples=30)
@given(workloads(), cache_models(), limits_of(), st.integers(1, 400))
def test_more_memory_never_lowers_the_bound(sessions, cache, limits, more):
    machine = machine_of(TINY, CARD, cache)
    limits = replace(limits, pages=limits.pages + 400)  # so that whoever fits one fits the other
    small, large = (bound(sessions, TINY, cache, machine, replace(limits, pages=pages)) for pages in (limits.pages, limits.pages + more))
    assert large.tokens_s >= small.tokens_s * (1 - 1e-12)


@given(st.integers(0, 300), st.integers(1, 120))
def test_pages_are_summed_as_one_by_one(tokens, most):
    assert paged(tokens, most) == sum(-(-min(i, most) // 16) for i in range(1, tokens + 1))


# ---- memory


@settings(deadline=None, max_examples=30)
@given(workloads(), st.integers(1, 100), st.integers(0, 100), st.integers(1, 16))
def test_a_smaller_budget_never_needs_more_pages(sessions, budget, more, interval):
    def pages(tokens):
        settings = PlanSettings(model="smollm2-135m", budget=tokens, interval=interval)
        return request_pages(server_of(settings, "evict"), sessions)

    assert all(small <= large for small, large in zip(pages(budget), pages(budget + more), strict=True))


def test_a_request_holds_its_chunk_while_prefilling_and_its_budget_afterwards():
    cache = caches.evict(TINY, 32, 4, 1.0)
    batcher = Batcher(TINY, cache, Limits(pages=1000, step_tokens=48, batch=4))
    session = Session(0.0, (Turn(200, 20),))
    job = Job(0, session, 0, 0.0, 32, 200, 200, 20)
    batcher.waiting.append(job)
    held = []
    while job.finished is None:
        batcher.plan(0.0)
        held.append((job.pages, job.resident, job.prefilling))
        batcher.finish_step(0.0)
    prefill = [pages for pages, _, prefilling in held if prefilling]
    assert set(prefill) == {4 * (32 + 48) // 16}  # 4 heads, budget and chunk
    assert max(resident for _, resident, prefilling in held if not prefilling) == 32 + 3
    assert max(pages for pages, _, prefilling in held if not prefilling) == 4 * 3


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "google/gemma-3-12b-it"])
def test_a_configurations_weights_are_the_models(name, tmp_path):
    from learnkv.models import load_architecture
    from tests.hub_models import folder_of

    folder = f"{folder_of(name, tmp_path)}"
    shape, model = shape_of(folder), load_architecture(folder)
    text = [p for key, p in model.named_parameters() if "vision" not in key and "projector" not in key]
    assert shape.weights == pytest.approx(sum(p.numel() for p in text), rel=2e-3)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    assert shape.sliding == kinds.count("sliding_attention")


@pytest.mark.parametrize(
    ("changes", "says"), [({"intermediate_size": None}, "no intermediate_size"), ({"num_local_experts": 8}, "experts")]
)
def test_what_would_be_counted_wrongly_is_refused(changes, says):
    usual = dict(num_attention_heads=4, num_hidden_layers=2, hidden_size=32, intermediate_size=64, vocab_size=100)
    with pytest.raises(ValueError, match=says):
        shape_from("mine", usual | changes)


@pytest.mark.parametrize(
    ("name", "weights"),
    [("llama2-7b", 6.74e9), ("llama2-13b", 13.02e9), ("llama2-70b", 68.98e9), ("llama3-8b", 8.03e9), ("llama3-70b", 70.55e9)],
)
def test_shapes_have_the_published_numbers_of_weights(name, weights):
    assert SHAPES[name].weights == pytest.approx(weights, rel=1e-3)


def test_what_of_a_data_sheet_is_reached_is_what_an_h200_reached():
    from learnkv.evaluation.roofline import H200

    card = card_of("h200-141gb")
    assert (card.bytes, card.flops) == pytest.approx((H200.bytes, H200.flops))


# ---- preemption


def jobs(*seen: int) -> list[Job]:
    made = [Job(i, Session(0.0, (Turn(100, 9),)), 0, 0.0, 100, 100, 100, 9, seen=n, touched=10 + i) for i, n in enumerate(seen)]
    return made


def test_each_policy_picks_its_victim():
    running = jobs(50, 20, 90, 20, 70)
    running[2].touched = 3
    assert VICTIMS["newest"](running).number == 4
    assert VICTIMS["lru"](running).number == 2
    assert VICTIMS["shortest"](running).number == 3  # of two equals the newer


def collided(refill):
    """Two requests that grow into one another: who is preempted had `seen` tokens and `pages` pages."""
    sessions = [Session(0.0, (Turn(60, 60),)), Session(0.0, (Turn(30, 60),))]
    limits = Limits(pages=4 * 8, step_tokens=128, batch=4, refill=refill)
    return simulate(sessions, TINY, FULL, Even(), limits)


def test_recomputing_counts_every_token_that_was_seen():
    run = collided("recompute")
    (victim,) = [job for job in run.jobs if job.preemptions]
    # 8 pages a head: 5 + 3 hold until the first has 80 tokens in its own, when the other has seen 50
    assert run.counts.preemptions == 1 and run.counts.recomputed == victim.lost == 48
    assert run.counts.pages_out == run.counts.pages_in == 0


def test_swapping_moves_what_is_held_both_ways_and_computes_nothing_again():
    run = collided("swap")
    assert run.counts.recomputed == 0 and run.counts.pages_out == run.counts.pages_in == 4 * 3
    machine = machine_of(TINY, CARD, FULL)
    moved = machine.seconds(Work(steps=0, swapped=run.counts.pages_out * FULL.page))
    assert moved == pytest.approx(4 * 3 * 16 * FULL.slot / CARD.link)


def test_an_evicted_victim_frees_what_it_holds_and_computes_again_what_it_saw():
    cache = caches.evict(TINY, 16, 1, 1.0)
    sessions = [Session(0.0, (Turn(60, 30),)), Session(0.0, (Turn(60, 30),)), Session(0.0, (Turn(60, 30),))]
    batcher = Batcher(TINY, cache, Limits(pages=10**4, step_tokens=64, batch=4, refill="recompute"))
    for i, session in enumerate(sessions):
        batcher.waiting.append(Job(i, session, 0, 0.0, 16, 60, 60, 30))
    for _ in range(6):
        batcher.plan(0.0)
        batcher.finish_step(0.0)
    free, victim = batcher.pool.free, batcher.running[-1]
    seen, pages = victim.seen, victim.pages
    batcher.preempt(victim, Work())
    assert pages == 4 and seen > 60 and batcher.pool.free - free == pages and batcher.counts.recomputed == seen
    assert victim.target == 60 + victim.generated


# ---- turns


def test_a_turn_finds_what_the_turn_before_left():
    session = Session(0.0, (Turn(40, 10), Turn(70, 5, think=1.0)))
    run = simulate([session], TINY, FULL, Even(), AMPLE)
    first, second = run.jobs
    assert second.reused == 49 == session.reused(1) and run.counts.prefilled == 40 + 70 - 49
    assert second.arrived == first.finished + 1.0


def test_sessions_that_pause_give_way_to_those_that_run():
    pausing, busy = Session(0.0, (Turn(60, 4), Turn(80, 4, think=100.0))), Session(20.0, (Turn(100, 20),))
    run = simulate([pausing, busy], TINY, FULL, Even(), Limits(pages=4 * 8, step_tokens=128, batch=4))
    assert run.counts.dropped == 1 and run.counts.preemptions == 0
    assert next(job for job in run.jobs if job.turn == 1).reused == 0


# ---- plans


def test_a_seed_gives_the_same_figures_again_and_another_seed_others():
    def figures(seed):
        cells = run_cells(PlanSettings(requests=60, rate=20, memory_gb=22, policies=["full", "evict"], seed=seed))
        return [asdict(cell.figures) for cell in cells]

    assert figures(3) == figures(3) != figures(4)


def test_every_policy_serves_the_same_requests():
    cells = run_cells(PlanSettings(requests=40, rate=20))
    tokens = {round(cell.figures.tokens_s * cell.figures.seconds) for cell in cells}
    assert len(tokens) == 1 and {cell.figures.served for cell in cells} == {40}


def test_a_policy_without_a_budget_is_run_once_however_many_budgets_are_swept():
    plan = PlanSettings(requests=10, policies=["full", "evict"])
    plan.sweep.budget = [0.1, 0.2, 0.5]
    assert [(cell.policy, cell.budget) for cell in run_cells(plan)] == [("full", 1.0), ("evict", 0.1), ("evict", 0.2), ("evict", 0.5)]


def test_a_card_without_a_link_cannot_offload():
    with pytest.raises(Impossible, match="nowhere to offload"):
        server_of(PlanSettings(card="orin-nano-8gb", weight_bits=4), "offload")


def test_weights_that_leave_no_page_are_told():
    (cell,) = run_cells(PlanSettings(model="llama3-70b", requests=3, policies=["full"]))
    assert "leave no page" in cell.impossible and cell.figures is None


def test_a_contest_is_paired_over_seeds():
    plan = PlanSettings(card="rtx4090-24gb", requests=30, rate=8, prompt=800, output=500)
    found = contest(plan, "full", 10)
    gap = found.difference("tokens_s", "shortest")
    assert gap.low <= gap.value <= gap.high
    again = np.subtract(found.values("shortest", "tokens_s"), found.values("newest", "tokens_s")).mean()
    assert gap.value == pytest.approx(again)
    with pytest.raises(ValueError, match="10 or more"):
        contest(plan, "full", 9)


def test_every_card_says_where_its_figures_come_from():
    assert all(card.source and card.memory > 0 for card in CARDS.values())


@pytest.mark.slow
def test_ten_thousand_requests_take_less_than_a_minute():
    plan = PlanSettings(requests=10_000, rate=12, policies=["full"])
    began = time.process_time()
    (cell,) = run_cells(plan)
    assert cell.figures.served == 10_000 and time.process_time() - began < 60
