"""KVzip's score as a target of traces: what the live method remembers, and KVzip+ against its formula written out."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from learnkv import reconstruction
from learnkv.capture import capture
from learnkv.heuristics.kvzip import KVzip
from learnkv.observation import Probe
from learnkv.policy import Policy
from learnkv.runtime.attach import attach
from learnkv.runtime.cache import EvictionCache
from learnkv.traces.measure import measure
from tests.born_parts import ONWARD, WHOLE, bare_trace, model_of, remembered
from tests.tiny_models import full_layers

FAMILIES = ["llama", "qwen3", "gemma3"]
CHUNKS = [reconstruction.CHUNK_SIZE, 15]


class Words:
    """A tokenizer of two sentences."""

    def encode(self, text, *, add_special_tokens):
        return {reconstruction.WHOLE: WHOLE, reconstruction.ONWARD: ONWARD}[text].tolist()


@pytest.fixture(params=CHUNKS)
def chunk_size(request, monkeypatch):
    """Contexts are repeated in chunks of this size."""
    in_chunks = reconstruction.repetitions
    monkeypatch.setattr(reconstruction, "repetitions", lambda ids, whole, onward, *rest: in_chunks(ids, whole, onward, request.param))
    return request.param


def targets_of(family, n=40):
    also = ("reconstruction", "reconstruction_plus")
    return measure(model_of(family), bare_trace(n), future="answer", max_new_tokens=0, also=also, dtype=torch.float32).targets


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_recorded_score_is_what_the_live_method_remembers(family, chunk_size):
    model = model_of(family)
    with attach(model):
        cache = EvictionCache(Policy(KVzip(Words(), chunk_size=chunk_size), 10_000), model)
        model(bare_trace(40).ids[None], cache=cache)
    torch.testing.assert_close(targets_of(family)["reconstruction"], remembered(cache)[:, 0], rtol=0, atol=1e-5)


def plus_by_hand(model, chunk_size, n=40):
    """[layers, H, n] float64: context and repetition in one plain forward, weights times ||W_O v|| over ||h|| before the maximum."""
    trace, layers = bare_trace(n), full_layers(model)
    H, G = model.config.num_key_value_heads, model.config.num_attention_heads // model.config.num_key_value_heads
    scores = torch.zeros(len(layers), H, n, dtype=torch.float64)
    for start in range(0, n, chunk_size):
        stop = min(start + chunk_size, n)
        rows = torch.cat([ONWARD if start else WHOLE, trace.ids[max(0, start - 8) : stop]])
        with capture(model, {"queries", "keys", "values", "hidden"}) as taken:
            model(torch.cat([trace.ids, rows])[None])
        seen = torch.zeros(len(rows), n + len(rows), dtype=torch.bool)
        seen[:, sorted({*range(4), *range(start, stop)})] = True
        seen[:, n:] = torch.ones(len(rows), len(rows)).tril().bool()
        for at, layer in enumerate(layers):
            i = layer.layer_idx
            keys, values = (t[i][0].double().repeat_interleave(G, 0) for t in (taken.keys, taken.values))
            logits = (taken.queries[i][0].double() @ keys.mT * layer.scaling)[:, n:].masked_fill(~seen, -torch.inf)
            parts = layer.o_proj.weight.double().unflatten(1, (H * G, -1))  # [M, Q, D]
            norms = torch.einsum("mqd,qnd->qnm", parts, values).norm(dim=-1)[:, None]  # [Q, 1, n + R]
            weights = logits.softmax(-1) * norms / taken.hidden[i][0, n:].double().norm(dim=-1)[:, None]
            scores[at, :, start:stop] = weights.amax(1).unflatten(0, (H, G)).amax(1)[:, start:stop]
    return scores


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_kvzip_plus_is_its_formula_written_out(family, chunk_size):
    got = targets_of(family)["reconstruction_plus"]
    torch.testing.assert_close(got.double(), plus_by_hand(model_of(family), chunk_size), rtol=1e-4, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("rows", [3, 64, 100])
def test_with_norms_of_one_kvzip_plus_is_kvzip(rows):
    generator = torch.Generator().manual_seed(rows)
    draw = partial(torch.randn, generator=generator)
    seen = torch.rand(1, 2, 50, generator=generator) < 0.5
    made = reconstruction.Rows(draw(1, 6, rows, 8), draw(1, 2, rows, 8), draw(1, 2, 50, 8), seen, 0.7)
    hidden = torch.nn.functional.normalize(draw(1, rows, 32), dim=-1)
    plain = reconstruction.attention(made)
    assert plain[seen].min() > 0 and not plain[~seen].any()
    torch.testing.assert_close(reconstruction.attention_plus(made, hidden, torch.ones(1, 6, 50)), plain, rtol=1e-5, atol=1e-6)


def test_rows_repeat_every_chunk_after_the_last_tokens_of_the_one_before():
    ids = torch.arange(40)
    first, second, third = reconstruction.repetitions(ids, WHOLE, ONWARD, chunk_size=15, overlap=2)
    assert first.rows.tolist() == [*WHOLE.tolist(), *range(15)]
    assert second.rows.tolist() == [*ONWARD.tolist(), *range(13, 30)]
    assert third.rows.tolist() == [*ONWARD.tolist(), *range(28, 40)]
    assert [(p.start, p.stop, p.position) for p in (first, second, third)] == [(0, 15, 40), (15, 30, 40), (30, 40, 40)]


def test_a_softmax_spans_the_chunk_and_the_first_tokens():
    positions = torch.tensor([[[0, 1, 5, 7, 9, -1]]])
    chunk, seen = reconstruction.repeated(positions, Probe(torch.empty(0), 6, 9, 10), num_prefix=1)
    assert chunk.tolist() == [[[False, False, False, True, False, False]]]
    assert seen.tolist() == [[[True, False, False, True, False, False]]]


def test_a_trace_without_instructions_is_refused_by_id():
    bare = replace(bare_trace(9), repeat_whole=None)
    with pytest.raises(ValueError, match=f"trace {bare.id} does not say how"):
        measure(model_of(), bare, future="answer", max_new_tokens=0, also=["reconstruction"])
