"""DapQ: pseudo tokens at the positions to come, and what they see."""

import copy

import pytest
import torch

from learnkv.heuristics.dapq import CONTENTS, DapQ
from learnkv.methods import METHODS
from learnkv.observation import Probe
from tests.probe_parts import ids, model, rows_by_hand, served

SMALL = dict(num_tokens=6, kernel_size=3)


def test_scores_are_the_formula_in_float64():
    tokens, plain = ids(26), copy.deepcopy(model()).double()
    rows = torch.cat([tokens[:3], tokens[-3:]])
    want = rows_by_hand(plain, plain, tokens, plain.get_input_embeddings()(rows)).unflatten(1, (2, 2)).mean(2)
    around = torch.stack([want[..., max(0, i - 1) : i + 2].amax(-1) for i in range(26)], -1)
    torch.testing.assert_close(torch.cat(served(DapQ(**SMALL), tokens)).double(), around, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("content", "wanted"), [("edges", [1, 2, 3, 7, 8, 9]), ("fixed", [1] * 6)], ids=lambda value: value if isinstance(value, str) else ""
)
def test_pseudo_tokens_are_taken_from_the_prompt(content, wanted):
    (probe,) = DapQ(num_tokens=6, content=content).probe(torch.arange(1, 10))
    assert probe.rows.tolist() == wanted
    assert (probe.start, probe.stop, probe.position) == (0, 9, 9)


def test_random_pseudo_tokens_are_a_function_of_the_seed():
    tokens = torch.arange(100)
    drawn = [DapQ(content="random", seed=seed).probe(tokens)[0].rows for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert all(len(rows) == 32 and set(rows.tolist()) <= set(range(100)) for rows in drawn)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_prompt_shorter_than_its_pseudo_tokens_is_scored(content, n):
    assert len(DapQ(content=content).probe(torch.arange(n))[0].rows) >= n
    assert torch.cat(served(DapQ(content=content), ids(n + 9), budget=4)).isfinite().all()


def test_position_decides_where_content_stays():
    tokens = ids(26)
    there, elsewhere = DapQ(**SMALL), DapQ(**SMALL, place="start")
    assert elsewhere.probe(tokens)[0].position == 0
    assert not torch.allclose(torch.cat(served(there, tokens)), torch.cat(served(elsewhere, tokens)), atol=1e-4)


def test_a_registered_method_with_knobs_for_the_ablation():
    policy = METHODS["dapq"](64, content="random", place="start", num_tokens=48, seed=3)
    assert policy.scorer == DapQ(48, content="random", place="start", seed=3)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [({"num_tokens": 0}, "num_tokens=0"), ({"kernel_size": 2}, "odd"), ({"content": "edge"}, "edges"), ({"place": "nxt"}, "next")],
)
def test_impossible_knobs_are_refused(knobs, says):
    with pytest.raises(ValueError, match=says):
        DapQ(**knobs)


def test_rows_of_a_probe_are_ids_without_a_decoder_of_their_own():
    (probe,) = DapQ().probe(torch.arange(50))
    assert isinstance(probe, Probe) and probe.decoder is None and not probe.rows.is_floating_point()
