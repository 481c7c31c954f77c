"""Allocators against a plain greedy loop: exact sums, floors, ties and rows that do not know of each other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from learnkv.budgets import Adaptive, PerHead, Pyramid, Ratio, Threshold, Uniform, resolve
from learnkv.observation import Observation
from tests.observations import Row, observe

Head = list[tuple[int, float]]  # (position, score), ascending in position


@st.composite
def layers_of_heads(draw: st.DrawFn, rows: int = 2, layers: int = 2) -> list[list[list[Head]]]:
    """[layer][row][head]; few score values, so that most tie, some protected (+inf); heads of a layer differ in length."""
    H = draw(st.integers(1, 3))
    score = st.sampled_from([-1.0, 0.0, 0.5, 2.0, math.inf])

    def head() -> Head:
        positions = draw(st.lists(st.integers(0, 12), unique=True, min_size=1, max_size=8))
        return [(p, draw(score)) for p in sorted(positions)]

    return [[[head() for _ in range(H)] for _ in range(rows)] for _ in range(layers)]


def build(layer: list[list[Head]]) -> tuple[torch.Tensor, Observation]:
    """Scores [B, H, L] as Policy hands them over, and their observation."""
    x = torch.zeros(len(layer[0]), 13, 1)
    kept = [[[p for p, _ in head] for head in row] for row in layer]
    memory = [[torch.zeros(len(k), 0) for k in row] for row in kept]
    rows = [Row(x, x, x, x, torch.zeros(13).long(), k, 0, m) for k, m in zip(kept, memory, strict=True)]
    obs = observe(rows)
    scores = torch.full(obs.positions.shape, -math.inf)
    for b, row in enumerate(layer):
        for h, head in enumerate(row):
            scores[b, h, : len(head)] = torch.tensor([s for _, s in head])
    return scores, obs


def allocate(rule: Uniform | Adaptive, layers: list[list[list[Head]]], budget: list[int]) -> list[list[list[int]]]:
    """[layer][row][head] tokens kept."""
    scores, observations = zip(*(build(layer) for layer in layers), strict=True)
    return [kept.tolist() for kept in rule(list(scores), torch.tensor(budget), list(observations))]


def greedy(heads: list[Head], budget: int, floor: float) -> list[int]:
    """Adaptive in plain loops: each head's best first tokens are safe, then the best of all; ties: later position, then earlier head."""
    low = math.floor(budget * floor + 1e-9)
    entries = []
    for h, head in enumerate(heads):
        best = sorted(head, key=lambda token: (-token[1], -token[0]))
        entries += [(rank >= low, -score, -position, h) for rank, (position, score) in enumerate(best)]
    chosen = [h for *_, h in sorted(entries)[: budget * len(heads)]]
    return [chosen.count(h) for h in range(len(heads))]


@given(layers_of_heads(), st.integers(1, 9), st.integers(1, 9), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
@settings(max_examples=150, deadline=None)
def test_adaptive_equals_a_greedy_loop_within_each_layer(layers, first, second, floor):
    got = allocate(Adaptive(floor=floor), layers[:1], [first, second])
    assert got == [[greedy(row, budget, floor) for row, budget in zip(layers[0], (first, second), strict=True)]]


@given(layers_of_heads(), st.integers(1, 9), st.sampled_from([0.0, 0.3]))
@settings(max_examples=100, deadline=None)
def test_adaptive_over_the_model_equals_a_greedy_loop_over_all_heads(layers, budget, floor):
    got = allocate(Adaptive(floor=floor, scope="model"), layers, [budget, budget])
    for b in range(2):
        heads = [head for layer in layers for head in layer[b]]
        assert [count for layer in got for count in layer[b]] == greedy(heads, budget, floor)


@given(layers_of_heads(), st.integers(1, 9), st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from(["layer", "model"]))
@settings(max_examples=100, deadline=None)
def test_adaptive_sums_exactly_to_the_uniform_total_where_that_much_is_held(layers, budget, floor, scope):
    shown = layers if scope == "model" else layers[:1]
    got = allocate(Adaptive(floor=floor, scope=scope), shown, [budget, budget])
    for b in range(2):
        held = [len(head) for layer in shown for head in layer[b]]
        assert sum(sum(layer[b]) for layer in got) == min(budget * len(held), sum(held))


PROTECTED_BEYOND_THE_FLOOR = [
    [[[(0, -1.0)]], [[(0, -1.0)]]],
    [[[(0, -1.0), (1, math.inf), (2, math.inf)]], [[(0, -1.0)]]],
]


@given(layers_of_heads(), st.integers(1, 9), st.sampled_from([0.2, 0.5, 1.0]))
@example(PROTECTED_BEYOND_THE_FLOOR, 1, 1.0)
@settings(max_examples=100, deadline=None)
def test_no_head_falls_below_the_floor(layers, budget, floor):
    for layer, counts in zip(layers, allocate(Adaptive(floor=floor, scope="model"), layers, [budget, budget]), strict=True):
        for row, kept in zip(layer, counts, strict=True):
            assert all(k >= min(math.floor(budget * floor + 1e-9), len(head)) for k, head in zip(kept, row, strict=True))


@given(layers_of_heads(), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_a_row_gets_in_a_batch_what_it_gets_alone(layers, budget):
    batch = allocate(Adaptive(scope="model"), layers, [budget, 3])
    alone = allocate(Adaptive(scope="model"), [layer[:1] for layer in layers], [budget])
    assert [layer[0] for layer in batch] == [layer[0] for layer in alone]


def test_a_floor_of_the_whole_budget_is_uniform():
    heads = [[(p, float(p * h)) for p in range(9)] for h in range(3)]
    assert allocate(Adaptive(floor=1.0), [[heads]], [4]) == [[[4, 4, 4]]]


def test_uniform_gives_every_head_its_rows_budget():
    heads = [[(0, 1.0)], [(0, 1.0), (3, 2.0)]]
    assert allocate(Uniform(), [[heads, heads]], [5, 2]) == [[[5, 5], [2, 2]]]


def test_a_ratio_is_of_the_rows_own_tokens_rounded_down_and_at_least_one():
    assert resolve(Ratio(0.1), torch.tensor([1000, 99, 3, 0])).tolist() == [100, 9, 1, 1]
    assert resolve(Ratio(1.0), torch.tensor([7])).tolist() == [7]


@given(st.integers(1, 100), st.integers(0, 10**6))
def test_a_percentage_of_tokens_has_no_rounding_error(percent, hundreds):
    assert resolve(Ratio(percent / 100), torch.tensor([100 * hundreds])).tolist() == [max(1, percent * hundreds)]


def test_an_integer_budget_is_the_same_for_every_row():
    assert resolve(64, torch.tensor([1000, 3])).tolist() == [64, 64]


@pytest.mark.parametrize("kept", [0.0, -0.1, 1.01, 20, math.nan, math.inf, "a", None, True])
def test_a_ratio_outside_0_to_1_is_refused(kept):
    with pytest.raises(ValueError, match="budget ratio"):
        Ratio(kept)


@pytest.mark.parametrize("floor", [-0.1, 1.1, math.nan])
def test_a_floor_outside_0_to_1_is_refused(floor):
    with pytest.raises(ValueError, match="floor="):
        Adaptive(floor=floor)


# ---- pyramid


def pyramid_counts(rule: Pyramid, budget: int, n: int, layers: int, protected: int = 0) -> list[int]:
    """Tokens kept per layer of one head of n tokens, the first `protected` protected."""
    x = torch.zeros(1, n, 1)
    obs = observe([Row(x, x, x, x, torch.zeros(n).long(), [list(range(n))], 0, [torch.zeros(n, 0)])])
    scores = torch.zeros(1, 1, n)
    scores[..., :protected] = math.inf
    shown = [replace(obs, layer=layer, num_layers=layers) for layer in range(layers)]
    return [int(rule([scores], torch.tensor([budget]), [o])[0]) for o in shown]


@given(st.integers(1, 200), st.integers(1, 400), st.integers(1, 40), st.integers(0, 8), st.sampled_from(["down", "up"]))
@settings(max_examples=200, deadline=None)
def test_a_pyramid_keeps_its_budget_to_the_token_and_no_layer_more_than_there_is(budget, n, layers, protected, direction):
    protected = min(protected, n, budget)
    counts = pyramid_counts(Pyramid(direction=direction), budget, n, layers, protected)
    assert sum(counts) == layers * min(budget, n)
    assert all(protected <= c <= n for c in counts)
    assert counts == sorted(counts, reverse=direction == "down")


def test_a_pyramid_is_steep_where_there_is_room():
    counts = pyramid_counts(Pyramid(beta=20.0), 100, 1000, 11)
    assert counts[0] == 195 and counts[5] == 100 and counts[-1] == 5


@pytest.mark.parametrize(
    ("budget", "layers", "first", "last", "mean"),
    [(64, 32, 118, 25, 71.5), (64, 80, 118, 39, 78.5), (128, 32, 242, 25, 133.5), (128, 80, 242, 84, 163.0), (512, 32, 991, 61, 526.0)],
)
def test_official_pyramids_are_those_of_kvcache_factory(budget, layers, first, last, mean):
    """Computed from its arithmetic at 8,192 tokens and a window of 8 (shared/spec/heuristic-methods.md, appendix B)."""
    counts = pyramid_counts(Pyramid(official=True), budget, 8192, layers, 8)
    assert (counts[0], counts[-1], sum(counts) / layers) == (first, last, mean)


def test_an_official_pyramid_of_a_short_prompt_is_uniform():
    assert pyramid_counts(Pyramid(official=True), 2048, 3000, 32, 8) == [2048] * 32


@pytest.mark.parametrize("knobs", [{"beta": 1.0}, {"direction": "sideways"}])
def test_pyramid_refuses_a_knob_it_cannot_mean(knobs):
    with pytest.raises(ValueError, match=f"{next(iter(knobs))}="):
        Pyramid(**knobs)


# ---- a table of heads


def table_counts(rule: PerHead, budget: int, n: int, heads: int = 2, protected: int = 0) -> list[list[int]]:
    """[layer][head] tokens kept, heads of n tokens."""
    x = torch.zeros(heads, n, 1)
    obs = observe([Row(x, x, x, x, torch.zeros(n).long(), [list(range(n))] * heads, 0, [torch.zeros(n, 0)] * heads)])
    scores = torch.zeros(1, heads, n)
    scores[..., :protected] = math.inf
    layers = len(rule.table)
    return [rule([scores], torch.tensor([budget]), [replace(obs, layer=i, num_layers=layers)])[0][0].tolist() for i in range(layers)]


@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=6).filter(lambda t: any(map(any, t))),
    st.integers(1, 100),
    st.integers(1, 150),
    st.integers(0, 8),
    st.floats(1, 10),
)
@settings(max_examples=200, deadline=None)
def test_a_table_keeps_its_budget_to_the_token_and_no_head_more_than_there_is(table, budget, n, protected, beta):
    protected = min(protected, n, budget)
    counts = table_counts(PerHead(tuple(table), beta), budget, n, 2, protected)
    assert sum(map(sum, counts)) == 2 * len(table) * min(budget, n)
    assert all(protected <= c <= n for row in counts for c in row)


def test_heads_keep_what_headkv_gives_them():
    """base = C - C / beta, pool = C / beta * heads, split by the table (arXiv:2410.19258)."""
    assert table_counts(PerHead(((4.0, 1.0), (3.0, 2.0)), beta=2.0), 40, 1000) == [[52, 28], [44, 36]]


def test_query_heads_are_averaged_over_their_group():
    assert (
        table_counts(PerHead(((6.0, 2.0, 1.0, 1.0),), 1.0), 50, 1000) == table_counts(PerHead(((4.0, 1.0),), 1.0), 50, 1000) == [[80, 20]]
    )


@pytest.mark.parametrize("text", ["[[4, 1], [3, 2]]", '{"0-0": [5, 3], "0-1": 1, "1-0": [3], "1-1": 2}'])
def test_a_table_is_read_from_json(text, tmp_path):
    (tmp_path / "heads.json").write_text(text)
    assert PerHead.read(tmp_path / "heads.json").table == ((4.0, 1.0), (3.0, 2.0))


def test_a_table_is_read_from_safetensors(tmp_path):
    save_file({"heads": torch.tensor([[4.0, 1.0], [3.0, 2.0]])}, tmp_path / "heads.safetensors")
    assert PerHead.read(tmp_path / "heads.safetensors").table == ((4.0, 1.0), (3.0, 2.0))


JUNK = ["", "[[1, 2], [3]]", "[[1, -2]]", "[[0, 0]]", '[["a"]]', "7", '{"0-1": 1}', '{"zero": 1}', "[]", "[[NaN]]", '{"0": [1]}']
JUNK += ['{"0-0": []}', f"[[1{'0' * 400}]]", "[" * 5000, '[["12"]]', '{"0-0": "12"}', "[[true, false]]"]


@pytest.mark.parametrize("text", JUNK)
def test_what_is_no_table_is_refused_with_its_file(text, tmp_path):
    (tmp_path / "heads.json").write_text(text)
    with pytest.raises(ValueError, match=r"heads\.json holds no table of heads"):
        PerHead.read(tmp_path / "heads.json")


@pytest.mark.parametrize("budget, streaming, retrieval", [(60, 20, 100), (40, 20, 60), (80, 60, 100), (20, 20, 20)])
def test_a_table_of_zeros_and_ones_is_duo_attention_as_far_as_the_budget_goes(budget, streaming, retrieval):
    """Streaming heads keep the 20 protected tokens, retrieval heads the rest of the budget up to all 100; then streaming heads get it."""
    counts = table_counts(PerHead(((1.0, 0.0), (0.0, 1.0)), beta=1.0), budget, 100, protected=20)
    assert counts == [[retrieval, streaming], [streaming, retrieval]]


def test_a_tables_name_changes_with_its_numbers():
    one, same, other = (repr(PerHead(((4.0, x), (3.0, 2.0)))) for x in (1.0, 1.0, 2.0))
    assert one == same != other and "2 x 2 heads, beta=1.01" in one


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"heads\.json is no file; give a table of heads"):
        PerHead.read(tmp_path / "heads.json")


def test_a_table_of_another_model_is_refused_with_both_sides():
    with pytest.raises(ValueError, match=r"1 layers x 3 heads, the model has 1 x 2 KV heads"):
        table_counts(PerHead(((1.0, 1.0, 1.0),)), 10, 20)


# ---- threshold


def test_a_threshold_keeps_what_scores_enough_up_to_the_budget():
    layer = [[[(0, math.inf), (1, 2.0), (2, 0.5)], [(0, -1.0), (1, 0.5), (2, 0.5), (3, 2.0)]]]
    assert allocate(Threshold(0.5), [layer], [9]) == [[[3, 3]]]
    assert allocate(Threshold(1.0), [layer], [9]) == [[[2, 1]]]
    assert allocate(Threshold(0.5), [layer], [2]) == [[[2, 2]]]
