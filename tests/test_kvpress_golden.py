"""Scores and selections beside those of kvpress 0.5.5 on the same tensors (tests/make_kvpress_golden.py); a test says where ours differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from learnkv.budgets import Adaptive, uniform
from learnkv.heuristics.criticalkv import BoundCriticalKV
from learnkv.heuristics.cur import CUR
from learnkv.heuristics.expected_attention import BoundExpectedAttention, ExpectedAttention
from learnkv.heuristics.key_diff import KeyDiff
from learnkv.heuristics.key_norm import KeyNorm
from learnkv.heuristics.lagkv import LagKV
from learnkv.heuristics.snapkv import SnapKV
from learnkv.heuristics.tova import TOVA
from learnkv.observation import Observation, Scorer, Slots
from learnkv.policy import Policy
from tests.observations import with_memory

GOLDEN = load_file(Path(__file__).parent / "data" / "kvpress_golden.safetensors")
WINDOW = 64  # SnapKV's, kvpress's default
RATIOS = [0.3, 0.7]  # fractions removed


@pytest.fixture(params=["gqa", "mha"])
def golden(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    return {name.removeprefix(f"{request.param}."): x for name, x in GOLDEN.items() if name.startswith(request.param)}


def seen(golden: dict[str, Tensor], scorer: Scorer) -> Observation:
    """The tensors as the cache shows them after a prefill of one sequence."""
    keys, values, queries = (golden[name][None] for name in ("keys", "values", "queries"))
    _, H, n, D = keys.shape
    W, count = scorer.observation_window, torch.tensor([n])
    return Observation(
        layer=0,
        num_layers=1,
        num_seen=count,
        num_new=count,
        new_slots=torch.arange(n).expand(1, H, n),
        slots=Slots.dense(keys, values, memory=torch.zeros(1, H, n, scorer.memory_size)),
        queries=queries[:, :, queries.shape[2] - W :],
        num_queries=torch.tensor([W]),
        scale=D**-0.5,
        queries_pre_rope=golden["queries_pre_rope"][None],
        rope_offset=torch.zeros(1, dtype=torch.int64),
    )


def remembered(golden: dict[str, Tensor], scorer: Scorer) -> Observation:
    """With what the scorer wrote beside the tokens."""
    obs = seen(golden, scorer)
    return with_memory(obs, scorer.remember(obs))


def ours(golden: dict[str, Tensor], scorer: Scorer) -> Tensor:
    return scorer.score(seen(golden, scorer))[0]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "scorer"), [("key_norm", KeyNorm()), ("key_diff", KeyDiff()), ("cur", CUR())])
def test_scores_of_keys_and_values_are_kvpresss(golden, name, scorer):
    close(ours(golden, scorer), golden[name])


def test_snapkv_is_kvpresss_but_for_the_pools_at_both_ends(golden):
    """kvpress pools before it adds its window, with zeros beyond both ends, and counts them; the window gets its maximum and 1."""
    scores, want = ours(golden, SnapKV(WINDOW, 5, "mean")), golden["snapkv"]
    body = slice(2, want.shape[1] - WINDOW - 2)
    close(scores[:, body], want[:, body])
    close(scores[:, :2] * torch.tensor([3, 4]) / 5, want[:, :2])
    assert (want[:, -WINDOW:] == want[:, :-WINDOW].max() + 1).all()


def test_tova_is_kvpresss_but_for_the_last_token(golden):
    """kvpress makes the last token win; ours has what attention it got."""
    scores, want = ours(golden, TOVA()), golden["tova"]
    close(scores[:, :-1], want[:, :-1])
    assert (want[:, -1] == want[:, :-1].max() + 1).all() and (scores[:, -1] < 1).all()


@pytest.mark.parametrize(("name", "knobs"), [("", (512, 4, 0.0)), ("_0.02", (37, 4, 0.02))])
def test_expected_attention_is_kvpresss_and_its_first_tokens_win_in_both(golden, name, knobs):
    scorer = BoundExpectedAttention(*knobs, frequencies=golden["inv_freq"], attention_scaling=1.0)
    scores, want = ours(golden, scorer), golden[f"expected_attention{name}"]
    close(scores[:, 4:], want[:, 4:])
    assert (want[:, :4] == want[:, 4:].max() + 1).all() and scores[:, :4].isinf().all()


def test_expected_attentions_defaults_are_kvpresss():
    assert ExpectedAttention() == ExpectedAttention(512, 4, 0.0)


@pytest.mark.parametrize("lag", [128, 19])
def test_lagkv_is_kvpresss_but_first_tokens_win_and_a_short_head_is_ordered_by_ties(golden, lag):
    """kvpress gives first tokens 1 as the last ones; heads too short for two partitions get a ramp, ours 1 for all: the later wins."""
    scores, want = ours(golden, LagKV(lag=lag)), golden["lagkv" if lag == 128 else f"lagkv_{lag}"]
    assert (want[:, :4] == 1).all() and (scores[:, :4] == 2).all()
    if want.shape[1] >= 4 + 2 * lag:
        close(scores[:, 4:], want[:, 4:])
    else:
        assert (scores[:, 4:] == 1).all() and (want[:, 4:].diff() > 0).all()


@dataclass(frozen=True, eq=False)
class Given(Scorer):
    """Scores as they are written: kvpress's own."""

    scores: Tensor  # [H, n]

    def score(self, obs: Observation) -> Tensor:
        return self.scores[None]


def best(scores: Tensor, count: int) -> Tensor:
    """[H, n] bool, what kvpress keeps of such scores."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(count).indices, True)


@pytest.mark.parametrize("ratio", RATIOS)
def test_criticalkv_refines_and_keeps_as_kvpress_does(golden, ratio):
    scorer = BoundCriticalKV(Given(golden["cur"]), weights=(golden["W_O"],))
    obs, want = remembered(golden, scorer), golden[f"criticalkv_{ratio}"]
    H, n = want.shape
    kept = int(n * (1 - ratio))
    refined = scorer.refine(scorer.score(obs), torch.full((1, H), kept), obs)[0]
    first = want == torch.finfo(torch.float32).max  # kvpress's mark of its first stage
    assert torch.equal(refined.isinf(), first) and first.sum(-1).tolist() == [kept // 2] * H
    close(refined[~first], want[~first])
    keep = Policy(scorer, kept, uniform, num_sinks=0, num_recent=0).select([obs])[0][0]
    assert torch.equal(keep, best(want, kept))


def kept_by(golden: dict[str, Tensor], scorer: Scorer, ratio: float, floor: float) -> tuple[Tensor, int]:
    """[H, n] bool what an adaptive policy keeps, and the tokens per head."""
    kept = int(golden["cur"].shape[1] * (1 - ratio))
    policy = Policy(scorer, kept, Adaptive(floor), num_sinks=0, num_recent=0)
    return policy.select([remembered(golden, scorer)])[0][0], kept


@pytest.mark.parametrize("ratio", RATIOS)
def test_adaptive_keeps_as_kvpress_does_with_and_without_criticalkv(golden, ratio):
    base = Given(golden["cur"])
    critical = BoundCriticalKV(base, weights=(golden["W_O"],))
    for name, scorer in {"adakv": base, "criticalada": critical}.items():
        assert torch.equal(kept_by(golden, scorer, ratio, 0.2)[0], golden[f"{name}_{ratio}"])
    assert not torch.equal(golden[f"adakv_{ratio}"], golden[f"criticalada_{ratio}"])


@pytest.mark.parametrize("ratio", RATIOS)
def test_criticalkv_leaves_a_large_floor_to_the_second_stage_and_kvpress_to_the_base(golden, ratio):
    """Heads keep as many, and the same first stage; what the floor is sure of stays in kvpress, and competes in ours."""
    keep, kept = kept_by(golden, BoundCriticalKV(Given(golden["cur"]), weights=(golden["W_O"],)), ratio, 0.9)
    want = golden[f"criticalada_floor_{ratio}"]
    assert torch.equal(keep.sum(-1), want.sum(-1)) and not torch.equal(keep, want)
    for h, scores in enumerate(golden["cur"]):
        assert want[h][best(scores[None], int(kept * 0.9))[0]].all()
        first = best(scores[None], int(want[h].sum()) // 2)[0]
        assert keep[h][first].all() and want[h][first].all()
