"""Every heuristic against plain float64 loops, for MHA and GQA, ragged heads, shuffled pages, padded batches and odd sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learnkv import budgets
from learnkv.budgets import adaptive, uniform
from learnkv.heuristics.chunkkv import ChunkKV
from learnkv.heuristics.criticalkv import BoundCriticalKV, CriticalKV
from learnkv.heuristics.cur import CUR
from learnkv.heuristics.expected_attention import ExpectedAttention
from learnkv.heuristics.h2o import H2O
from learnkv.heuristics.keep_digits import KeepDigits
from learnkv.heuristics.keep_rare import KeepRare
from learnkv.heuristics.key_diff import KeyDiff
from learnkv.heuristics.key_norm import KeyNorm
from learnkv.heuristics.lagkv import LagKV
from learnkv.heuristics.oracle import Oracle
from learnkv.heuristics.qfilter import QFilter
from learnkv.heuristics.random import Random
from learnkv.heuristics.recency_hybrid import RecencyHybrid
from learnkv.heuristics.scissorhands import Scissorhands
from learnkv.heuristics.simlayerkv import SimLayerKV
from learnkv.heuristics.snapkv import SnapKV
from learnkv.heuristics.streaming_llm import StreamingLLM
from learnkv.heuristics.tova import TOVA
from learnkv.heuristics.vatp import VATP
from learnkv.observation import Observation, Scorer
from learnkv.policy import Policy
from tests.observations import Row, make_row, observe, with_memory

LAYERS = 2
Reference = Callable[[Row, int], list[float]]  # scores of one head's kept tokens


class Rotary(nn.Module):
    """What a model's rotary embedding offers: frequencies of 6 of the 8 dimensions, so that the last two do not rotate."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.3, 0.05]))
        self.attention_scaling = 1.25


class Words:
    """A tokenizer of 7 tokens, of which 1 and 4 hold digits, and 6 is special."""

    texts = ("a", "12", "b", " ", " x7", "é", "")

    def __len__(self) -> int:
        return len(self.texts)

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return ["".join(self.texts[i] for i in ids) for ids in sequences]


def array(x: Tensor) -> np.ndarray:
    return x.double().numpy()


def attention(row: Row, q: int, h: int, i: int) -> np.ndarray:
    """Softmax attention of query head q at position i on head h's kept tokens."""
    keys, query = array(row.keys[h]), array(row.queries[q, i])
    weights = np.array([math.exp(keys[j] @ query / math.sqrt(keys.shape[1])) if j <= i else 0.0 for j in row.kept[h]])
    return weights / max(weights.sum(), 1e-300)


def group(row: Row, h: int) -> range:
    G = row.queries.shape[0] // row.keys.shape[0]
    return range(h * G, (h + 1) * G)


def snapkv(window: int, kernel: int, reduce: Callable) -> Reference:
    def scores(row: Row, h: int) -> list[float]:
        last = range(max(0, row.num_seen - window), row.num_seen)
        mass = np.mean([attention(row, q, h, i) for q in group(row, h) for i in last], 0)
        half = kernel // 2
        return [reduce(mass[max(0, j - half) : j + half + 1]) for j in range(len(mass))]

    return scores


def tova(row: Row, h: int) -> list[float]:
    H = row.keys.shape[0]
    heads = []
    for other in range(H):
        mass = np.mean([attention(row, q, other, row.num_seen - 1) for q in group(row, other)], 0)
        heads.append(dict(zip(row.kept[other], mass, strict=True)))
    return [sum(mass.get(j, 0.0) for mass in heads) / H for j in row.kept[h]]


def key_norm(row: Row, h: int) -> list[float]:
    return [-math.sqrt(float((array(row.keys[h, j]) ** 2).sum())) for j in row.kept[h]]


def key_diff(row: Row, h: int) -> list[float]:
    keys = array(row.keys[h])[row.kept[h]]
    anchor = np.mean([k / np.linalg.norm(k) for k in keys], 0)
    return [-float(k @ anchor / np.linalg.norm(k) / np.linalg.norm(anchor)) for k in keys]


def streaming_llm(row: Row, h: int) -> list[float]:
    return [float(j) for j in row.kept[h]]


def lagkv(lag: int, first: int) -> Reference:
    def spread(part: np.ndarray, following: np.ndarray) -> np.ndarray:
        low, high = following.min(0), following.max(0)
        std = np.array([np.std((x - low) / np.maximum(high - low, 1e-6), ddof=1) for x in part])
        return np.exp(std) / np.exp(std).sum()

    def scores(row: Row, h: int) -> list[float]:
        n = len(row.kept[h])
        keys, values = (array(x[h])[row.kept[h]] for x in (row.keys, row.values))
        out = [2.0 if j < first else 1.0 for j in range(n)]
        for start in range(first, n - 2 * lag + 1, lag):
            part, following = slice(start, start + lag), slice(start + lag, start + 2 * lag)
            worth = (spread(keys[part], keys[following]) + spread(values[part], values[following])) / 2
            for rank, j in enumerate(np.argsort(worth, kind="stable")):
                out[start + j] = rank / lag
        return out

    return scores


def rotation(position: int) -> np.ndarray:
    """The 8 x 8 matrix that Rotary stands for."""
    out = np.eye(8)
    for pair, frequency in enumerate((1.0, 0.3, 0.05)):
        a, b, angle = pair, pair + 3, position * frequency
        out[a, a] = out[b, b] = 1.25 * math.cos(angle)
        out[a, b], out[b, a] = -1.25 * math.sin(angle), 1.25 * math.sin(angle)
    return out


def expected_attention(row: Row, h: int) -> list[float]:
    future, first, epsilon = 5, 2, 0.02
    ahead = np.mean([rotation(row.num_seen + f) for f in range(future)], 0)
    counted = [j for j in row.kept[h] if j >= first]
    attention = np.zeros(len(counted))
    for q in group(row, h):
        sample = array(row.before_rope[q])[max(first, row.num_seen - row.num_new) :]
        mean = sample.mean(0) if len(sample) else np.zeros(8)
        covariance = (sample - mean).T @ (sample - mean) / max(1, len(sample))
        mean, covariance = ahead @ mean, ahead @ covariance @ ahead.T
        keys = array(row.keys[h])[counted]
        logits = np.array([k @ mean / math.sqrt(8) + k @ covariance @ k / 16 for k in keys])
        weights = np.exp(logits - logits.max()) if len(logits) else logits
        attention += weights / weights.sum() / len(group(row, h))
    scores = {j: (p + epsilon) * float(np.linalg.norm(array(row.values[h, j]))) for j, p in zip(counted, attention, strict=True)}
    return [scores.get(j, math.inf) for j in row.kept[h]]


def oracle_utility(H: int) -> Tensor:
    return torch.rand(LAYERS, H, 40, generator=torch.Generator().manual_seed(3))


def oracle(row: Row, h: int) -> list[float]:
    utility = oracle_utility(row.keys.shape[0])
    return [float(utility[1, h, j]) if j < 40 else float(torch.finfo(torch.float32).min) for j in row.kept[h]]


def filters(H: int) -> Tensor:
    return torch.randn(LAYERS, H, 8, generator=torch.Generator().manual_seed(5))


def qfilter(row: Row, h: int) -> list[float]:
    direction = array(filters(row.keys.shape[0])[1, h])
    return [float(array(row.keys[h, j]) @ direction) for j in row.kept[h]]


def h2o(row: Row, h: int) -> list[float]:
    mass = sum(attention(row, q, h, i) for q in group(row, h) for i in range(row.num_seen - row.num_new, row.num_seen))
    return [float(m) for m in array(row.memory[h][:, 0]) + mass]


def cur(row: Row, h: int) -> list[float]:
    squares = [(array(x[h])[row.kept[h]] ** 2).sum(1) for x in (row.keys, row.values)]
    n = len(row.kept[h])
    shares = [[s[j] / max(s[j // 16 * 16 : j // 16 * 16 + 16].sum(), 1e-30) for j in range(n)] for s in squares]
    product = np.array([k * v for k, v in zip(*shares, strict=True)])
    return [1.0 if j < 4 else p / max(product.sum(), 1e-30) for j, p in enumerate(product)]


def recency_hybrid(row: Row, h: int) -> list[float]:
    fading = 2 ** (-row.num_new / 20)
    new = sum(attention(row, q, h, i) for q in group(row, h) for i in range(row.num_seen - row.num_new, row.num_seen))
    mass = array(row.memory[h][:, 0]) * fading + new
    fresh = [2 ** (-(row.num_seen - 1 - j) / 8) for j in row.kept[h]]
    return [0.6 * m / max(mass.max(), 1e-30) + 0.4 * f for m, f in zip(mass, fresh, strict=True)]


def vatp(row: Row, h: int) -> list[float]:
    return [m * float(np.abs(array(row.values[h, j])).sum()) for m, j in zip(h2o(row, h), row.kept[h], strict=True)]


def chunkkv(row: Row, h: int) -> list[float]:
    chunks: dict[int, list[float]] = {}
    for head, kept in enumerate(row.kept):
        for j, score in zip(kept, key_norm(row, head), strict=True):
            chunks.setdefault(j // 5, []).append(score)
    return [float(np.mean(chunks[j // 5])) for j in row.kept[h]]


def keep_digits(row: Row, h: int) -> list[float]:
    born = [float(int(row.token_ids[j]) in (1, 4)) for j in row.kept[h][-row.num_new :]]
    return row.memory[h][: -row.num_new, 0].tolist() + born


def simlayerkv(threshold: float, first: int, recent: int) -> Reference:
    def near(row: Row, h: int) -> float:
        mass = np.mean([attention(row, q, h, row.num_seen - 1) for q in group(row, h)], 0)
        return sum(m for m, j in zip(mass, row.kept[h], strict=True) if j < first or j >= row.num_seen - recent)

    def scores(row: Row, h: int) -> list[float]:
        H, n = row.keys.shape[0], row.num_seen
        share = max(float(x) for memory in row.memory for x in memory[:, 0])
        if share == 0 and n > first + recent:
            share = sum(near(row, other) for other in range(H)) / H
        span = recent if share > threshold else n
        return [1.0 if j < first else 1 - (n - 1 - j) / span for j in row.kept[h]]

    return scores


BOUND = ExpectedAttention(future=5, first=2, epsilon=0.02).bind(Rotary())
SCORERS: dict[str, tuple[Scorer, Reference]] = {
    "snapkv": (SnapKV(), snapkv(32, 7, max)),
    "snapkv mean": (SnapKV(observation_window=5, kernel_size=3, pooling="mean"), snapkv(5, 3, np.mean)),
    "snapkv unpooled": (SnapKV(observation_window=1, kernel_size=1), snapkv(1, 1, max)),
    "tova": (TOVA(), tova),
    "key_norm": (KeyNorm(), key_norm),
    "key_diff": (KeyDiff(), key_diff),
    "streaming_llm": (StreamingLLM(), streaming_llm),
    "lagkv": (LagKV(lag=5, first=3), lagkv(5, 3)),
    "expected_attention": (BOUND, expected_attention),
    "h2o": (H2O(), h2o),
    "keep_digits": (KeepDigits(Words()), keep_digits),
    "cur": (CUR(), cur),
    "scissorhands": (Scissorhands(observation_window=9), snapkv(9, 1, max)),
    "recency_hybrid": (RecencyHybrid(weight=0.6, mass_half_life=20.0, age_half_life=8.0), recency_hybrid),
    "vatp": (VATP(), vatp),
    "chunkkv": (ChunkKV(KeyNorm(), chunk_size=5), chunkkv),
    "simlayerkv": (SimLayerKV(first=2, recent=10), simlayerkv(0.9, 2, 10)),
}
SHAPES = {"MHA": (3, 1), "GQA": (2, 3), "MQA": (1, 4)}


def with_mass(obs: Observation, rows: list[Row]) -> Observation:
    """What the runtime gives a scorer that needs mass: attention of this step's queries."""
    mass = torch.zeros(obs.positions.shape)
    for b, row in enumerate(rows):
        for h, kept in enumerate(row.kept):
            steps = range(row.num_seen - row.num_new, row.num_seen)
            mass[b, h, : len(kept)] = torch.tensor(sum(attention(row, q, h, i) for q in group(row, h) for i in steps))
    return replace(obs, mass=mass)


def run(scorer: Scorer, rows: list[Row], **layout: int) -> Tensor:
    """[B, H, L] as the runtime would ask for them: remember, store, score."""
    obs = observe(rows, window=scorer.observation_window, layer=1, num_layers=LAYERS, **layout)
    if "mass" in scorer.needs:
        obs = with_mass(obs, rows)
    return scorer.score(with_memory(obs, scorer.remember(obs)) if scorer.memory_size else obs)


def check(scorer: Scorer, reference: Reference, rows: list[Row], **layout: int) -> None:
    scores = run(scorer, rows, **layout)
    assert scores.dtype == torch.float32
    for b, row in enumerate(rows):
        for h, kept in enumerate(row.kept):
            want = torch.tensor(reference(row, h), dtype=torch.float32)
            torch.testing.assert_close(scores[b, h, : len(kept)], want, rtol=2e-5, atol=2e-6)


@pytest.fixture(params=SCORERS)
def case(request: pytest.FixtureRequest) -> tuple[Scorer, Reference]:
    return SCORERS[request.param]


@pytest.fixture(params=SHAPES)
def heads(request: pytest.FixtureRequest) -> tuple[int, int]:
    return SHAPES[request.param]


def rows_of(lengths: tuple[int, ...], heads: tuple[int, int], scorer: Scorer, **kind: float) -> list[Row]:
    H, G = heads
    return [make_row(n, seed, H=H, G=G, C=scorer.memory_size, **kind) for seed, n in enumerate(lengths)]


@pytest.mark.parametrize("n", [1, 2, 31, 63])
def test_scores_equal_a_float64_loop(case, heads, n):
    check(*case, rows_of((n,), heads, case[0]))


def test_scores_of_ragged_heads_equal_the_loop(case, heads):
    check(*case, rows_of((41,), heads, case[0], num_new=3, share=0.8))


def test_scores_of_a_decode_step_equal_the_loop(case, heads):
    check(*case, rows_of((26, 9), heads, case[0], num_new=1, share=0.9))


def test_scores_of_paged_and_padded_batches_equal_the_loop(case, heads):
    check(*case, rows_of((37, 1, 12), heads, case[0]), page=4, padding=3)


def test_a_row_scores_in_a_padded_batch_as_alone(case, heads):
    rows = rows_of((23, 6, 40), heads, case[0])
    batch = run(case[0], rows, page=16)
    for b, row in enumerate(rows):
        alone = run(case[0], [row])
        torch.testing.assert_close(batch[b, :, : row.num_seen], alone[0], rtol=1e-6, atol=1e-7)


def test_scores_of_bfloat16_keys_are_float32_arithmetic(case, heads):
    rows = [
        replace(r, keys=r.keys.bfloat16(), values=r.values.bfloat16(), queries=r.queries.bfloat16()) for r in rows_of((35,), heads, case[0])
    ]
    check(*case, rows)


def test_identical_tokens_give_finite_scores(case, heads):
    scorer, _ = case
    rows = [replace(r, keys=torch.zeros_like(r.keys), values=torch.zeros_like(r.values)) for r in rows_of((33,), heads, scorer)]
    assert not run(scorer, rows).isnan().any()


def test_the_observation_window_counts_only_a_rows_own_queries():
    row = make_row(4)
    torch.testing.assert_close(
        run(SnapKV(observation_window=32, kernel_size=1), [row]), run(SnapKV(observation_window=4, kernel_size=1), [row])
    )


@pytest.mark.parametrize("knobs", [{"observation_window": 0}, {"kernel_size": 4}, {"kernel_size": 0}, {"pooling": "median"}])
def test_snapkv_refuses_a_knob_it_cannot_mean(knobs):
    with pytest.raises(ValueError, match=f"{next(iter(knobs))}="):
        SnapKV(**knobs)


def test_lagkv_of_a_short_head_keeps_its_first_and_latest():
    scores = run(LagKV(lag=128, first=4), [make_row(50)])[0]
    assert (scores[:, :4] == 2).all() and (scores[:, 4:] == 1).all()


def test_random_depends_on_seed_layer_head_and_position_only():
    rows = [make_row(30, share=0.5, num_new=3), make_row(64)]
    together, alone = run(Random(seed=5), rows, page=8, padding=2), run(Random(seed=5), rows[1:])
    torch.testing.assert_close(together[1], alone[0], rtol=0, atol=0)
    for h, kept in enumerate(rows[0].kept):
        assert torch.equal(together[0, h, : len(kept)], alone[0, h, kept])


def test_random_is_uniform_and_unlike_across_seed_layer_and_head():
    layers = [observe([make_row(4096, D=1, H=2)], layer=layer) for layer in (0, 1)]
    draws = [Random(seed).score(obs)[0, h] for seed in (0, 1, -1, 2**40) for obs in layers for h in (0, 1)]
    assert all(d.min() >= 0 and d.max() < 1 and abs(d.mean() - 0.5) < 0.02 and abs(d.var() - 1 / 12) < 0.005 for d in draws)
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlation.abs().max() < 0.08


def test_oracle_scores_by_position_and_unknown_tokens_lowest(heads):
    H, _ = heads
    check(Oracle(oracle_utility(H)), oracle, rows_of((48, 17), heads, StreamingLLM(), num_new=3, share=0.9), page=4)


def test_qfilter_scores_by_each_heads_own_direction(heads):
    H, _ = heads
    check(QFilter(filters(H)), qfilter, rows_of((48, 17, 1), heads, StreamingLLM(), num_new=1, share=0.9), page=4, padding=2)


@pytest.mark.parametrize("given", [torch.zeros(2, 8), torch.zeros(2, 2, 8).long(), torch.full((2, 2, 8), torch.nan), 5, None])
def test_qfilter_refuses_what_is_no_filters(given):
    with pytest.raises(ValueError, match=r"filters=.*give \[layers, KV heads, head_dim\] finite numbers"):
        QFilter(given)


def test_oracle_refuses_another_models_utility():
    with pytest.raises(ValueError, match=r"3 layers x 2 kv heads.*2 x 2"):
        Oracle(torch.rand(3, 2, 5)).score(observe([make_row(5)]))


@pytest.mark.parametrize("shape", [(2, 5), (2, 2, 0)])
def test_oracle_refuses_a_utility_of_no_tokens_or_dimensions(shape):
    with pytest.raises(ValueError, match="utility has shape"):
        Oracle(torch.zeros(shape))


def test_keep_rare_counts_within_the_row_over_prefill_and_decode():
    """The second row's tokens and pads do not count; a decode step adds to the tokens of its id."""
    first = make_row(12, 1, C=2)
    steps = [replace(cut(first, 11), num_new=11), replace(first, num_new=1)]
    scorer, memory = KeepRare(), torch.zeros(1, 2, 11, 2)
    other = make_row(20, 2, C=2)
    for step, n in zip(steps, (11, 12), strict=True):
        obs = observe([step, other], padding=1)
        grown = torch.zeros(*obs.positions.shape, 2)
        grown[0, :, : memory.shape[2]] = memory[0]
        obs = with_memory(obs, grown)
        memory = scorer.remember(obs)[:1, :, :n]
        scores = scorer.score(with_memory(obs, scorer.remember(obs)))[0, :, :n]
        ids = first.token_ids[:n].tolist()
        assert scores.tolist() == [[-float(ids.count(i)) for i in ids]] * 2


def cut(row: Row, n: int) -> Row:
    """The row's first n tokens."""
    return Row(
        row.keys[:, :n], row.values[:, :n], row.queries[:, :n], row.before_rope[:, :n], row.token_ids[:n],
        [list(range(n))] * 2, n, [m[:n] for m in row.memory],
    )  # fmt: skip


def test_keep_rare_goes_on_from_the_largest_count_that_a_head_holds():
    row = replace(make_row(5, C=2), num_new=1, token_ids=torch.tensor([3, 3, 2, 0, 3]), kept=[[1, 2, 4], [2, 3, 4]])
    row = replace(row, memory=[torch.tensor([[3.0, 2], [2, 1], [0, 0]]), torch.tensor([[2.0, 1], [0, 1], [0, 0]])])
    assert run(KeepRare(), [row]).tolist() == [[[-3, -1, -3], [-1, -1, -1]]]


def test_keep_digits_reads_text_and_not_special_tokens():
    assert KeepDigits(Words()).digit_ids.tolist() == [1, 4]


def projections(heads: tuple[int, int]) -> tuple[Tensor, ...]:
    """W_O of LAYERS layers with 5 channels."""
    H, G = heads
    return tuple(torch.randn(5, H * G * 8, generator=torch.Generator().manual_seed(layer)) for layer in range(LAYERS))


def projected(row: Row, h: int, weight: Tensor) -> list[float]:
    """Norms of one head's kept tokens: what was written of the old ones, and those of the new ones."""
    old = row.memory[h][: len(row.kept[h]) - row.num_new, -1].tolist()
    W = [array(weight[:, q * 8 : q * 8 + 8]) for q in group(row, h)]
    return old + [float(np.mean([np.abs(w @ array(row.values[h, j])).sum() for w in W])) for j in row.kept[h][-row.num_new :]]


def critical(base: list[float], norms: list[float], positions: list[int], kept: int, first_stage: float) -> list[float]:
    """One head's refined scores, two stages."""
    order = sorted(range(len(base)), key=lambda j: (base[j], positions[j]), reverse=True)
    first = set(order[: math.floor(kept * first_stage)])
    return [math.inf if j in first else (base[j] + 1e-4) * norms[j] for j in range(len(base))]


CRITICAL = {"without memory": (SnapKV(), snapkv(32, 7, max)), "with memory": (H2O(), h2o)}


@pytest.mark.parametrize("base", CRITICAL)
@pytest.mark.parametrize(("lengths", "num_new"), [((63,), None), ((37, 12), 3), ((26, 9), 1)])
def test_criticalkv_equals_a_float64_loop(heads, base, lengths, num_new):
    scorer = BoundCriticalKV(CRITICAL[base][0], first_stage=0.4, weights=projections(heads))
    rows = rows_of(lengths, heads, scorer, num_new=num_new, share=0.9)
    obs = observe(rows, window=scorer.observation_window, layer=1, page=4, padding=2)
    obs = with_mass(obs, rows) if scorer.needs else obs
    obs = with_memory(obs, scorer.remember(obs))
    scores = scorer.score(obs)
    kept = torch.arange(1, 1 + scores[..., 0].numel()).view(scores.shape[:2]) * 2
    refined = scorer.refine(scores.masked_fill(~obs.filled, -math.inf), kept, obs)
    for b, row in enumerate(rows):
        for h, positions in enumerate(row.kept):
            base_scores, norms = CRITICAL[base][1](row, h), projected(row, h, scorer.weights[1])
            want = critical(base_scores, norms, positions, int(kept[b, h]), 0.4)
            for got, expected in ((scores, base_scores), (refined, want)):
                torch.testing.assert_close(got[b, h, : len(positions)], torch.tensor(expected).float(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("allocate", [uniform, adaptive])
def test_criticalkv_keeps_as_many_as_its_base_and_what_both_stages_choose(allocate):
    scorer = BoundCriticalKV(KeyDiff(), weights=projections((2, 3)))
    rows = rows_of((41,), (2, 3), scorer)
    obs = observe(rows)
    obs = with_memory(obs, scorer.remember(obs))
    rules = {"num_sinks": 1, "num_recent": 2}
    keep, by_base = (Policy(s, 12, allocate, **rules).select([obs])[0][0] for s in (scorer, KeyDiff()))
    assert torch.equal(keep.sum(-1), by_base.sum(-1))
    for h in range(2):
        base = [math.inf if j < 1 or j >= 39 else score for j, score in enumerate(key_diff(rows[0], h))]
        worth = critical(base, projected(rows[0], h, scorer.weights[0]), list(range(41)), int(keep[h].sum()), 0.5)
        best = sorted(range(41), key=lambda j: (worth[j], j), reverse=True)[: int(keep[h].sum())]
        assert keep[h].nonzero()[:, 0].tolist() == sorted(best)


def test_values_of_zero_leave_criticalkv_a_choice():
    scorer = BoundCriticalKV(SnapKV(), weights=projections((2, 2)))
    row = make_row(33, C=1)
    obs = observe([replace(row, values=torch.zeros_like(row.values))], window=32)
    obs = with_memory(obs, scorer.remember(obs))
    assert Policy(scorer, 24, num_recent=8).select([obs])[0].sum(-1).tolist() == [[24, 24]]


@pytest.mark.parametrize("knobs", [{"first_stage": 1.5}, {"epsilon": -1.0}])
def test_criticalkv_refuses_a_knob_it_cannot_mean(knobs):
    with pytest.raises(ValueError, match=f"{next(iter(knobs))}="):
        CriticalKV(**knobs)


def test_criticalkv_is_refused_until_it_knows_the_model():
    with pytest.raises(ValueError, match="bind"):
        CriticalKV().remember(observe([make_row(5, C=1)]))


def test_a_scorer_with_a_last_word_is_no_base():
    with pytest.raises(ValueError, match="VATP: base=CriticalKV has the last word itself"):
        VATP(CriticalKV())


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_a_layer_is_lazy_by_its_last_query(heads, threshold, share):
    scorer, reference = SimLayerKV(threshold, 2, 10), simlayerkv(threshold, 2, 10)
    rows = rows_of((41, 12, 13, 26), heads, scorer, num_new=3, share=share)
    check(scorer, reference, [undecided(row) for row in rows], page=4, padding=2)


def undecided(row: Row) -> Row:
    """The row as its first forward finds it."""
    return replace(row, memory=[torch.zeros_like(memory) for memory in row.memory])


def test_a_layer_stays_as_lazy_as_the_prompt_found_it():
    scorer, row = SimLayerKV(first=2, recent=10), make_row(30, C=1)
    for decided in (0.25, 0.95):
        obs = observe([replace(row, memory=[torch.full_like(m, decided) for m in row.memory])], window=1)
        assert (scorer.remember(obs) == decided).all()


def test_no_layer_is_lazy_while_first_and_recent_tokens_are_all():
    obs = observe([undecided(make_row(n, C=1)) for n in (12, 5, 1)], window=1)
    assert (SimLayerKV(threshold=0.0, first=2, recent=10).remember(obs) == 0).all()


LAZY, BUSY = 0.95, 0.5
SPAN = 12  # first and recent tokens


@pytest.mark.parametrize(
    ("budget", "lazy", "busy"),
    [(26, SPAN, 40), (20, 10, 30), (38, 36, 40)],
    ids=["the paper's own", "below it every span shrinks alike", "above it lazy layers keep more"],
)
def test_lazy_layers_keep_first_and_recent_tokens_and_give_the_rest_to_others(budget, lazy, busy):
    row, scorer = make_row(40, C=1), SimLayerKV(first=2, recent=10)
    layers = [observe([replace(row, memory=[torch.full_like(m, x) for m in row.memory])], layer=i) for i, x in enumerate((LAZY, BUSY))]
    keeps = Policy(scorer, budget, budgets.adaptive_global, num_sinks=2, num_recent=1).select(layers)
    assert [keep.sum(-1).tolist() for keep in keeps] == [[[lazy] * 2], [[busy] * 2]]
    assert all(keep[..., :2].all() and keep[..., -5:].all() for keep in keeps)


@pytest.mark.parametrize("knobs", [{"threshold": 1.1}, {"threshold": math.nan}, {"first": -1}, {"recent": 0}])
def test_simlayerkv_refuses_a_knob_it_cannot_mean(knobs):
    with pytest.raises(ValueError, match=f"{next(iter(knobs))}="):
        SimLayerKV(**knobs)


def test_expected_attention_is_refused_until_it_knows_the_model():
    with pytest.raises(ValueError, match="bind"):
        ExpectedAttention().score(observe([make_row(5)]))


def test_a_model_without_rotary_embedding_is_refused_by_name():
    with pytest.raises(ValueError, match="Linear has no rotary"):
        ExpectedAttention().bind(nn.Linear(1, 1))


def test_mean_rotation_agrees_with_the_models_own():
    """One query distribution without spread and one future position: the expected logit is the true one."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaModel, apply_rotary_pos_emb

    config = LlamaConfig(
        vocab_size=17, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    model, row = LlamaModel(config), make_row(9)
    row = replace(row, before_rope=row.before_rope[:, :1].expand(-1, 9, -1), values=torch.ones_like(row.values))
    obs = observe([row])
    rotated = apply_rotary_pos_emb(row.before_rope[None, :, :1], row.keys[None], *model.rotary_emb(row.keys, torch.tensor([[9]])))[0]
    logits = row.keys[:, None] @ rotated[0].unflatten(0, (2, 2)).mT / 8**0.5  # [H, G, n, 1]
    want = logits[..., 0].softmax(-1).mean(1) * 8**0.5
    got = ExpectedAttention(future=1, first=0).bind(model).score(obs)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
