"""Filters of Q-Filters: a float64 SVD of what attention sees, for the evictable layers, as a file and by name."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from learnkv.calibration import NUM_TOKENS, calibration_texts, query_filters, save_filters
from learnkv.capture import capture
from learnkv.evaluation.compare import compare, plan
from learnkv.evaluation.contenders import contenders_of
from learnkv.heuristics.qfilter import QFilter
from learnkv.policy import Policy
from learnkv.runtime.cache import EvictionCache
from tests.comparison_parts import letter_tokenizer, short_prompt, tiny_model


def gemma():
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    shape = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, head_dim=16)
    return Gemma3ForCausalLM(Gemma3TextConfig(**shape, num_key_value_heads=1, sliding_window=8, layer_types=kinds)).eval()


def texts(*lengths):
    return [torch.randint(2, 60, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]


@torch.no_grad()
def by_svd(model, ids, layers, H):
    """The same by numpy's SVD of all queries of a head below each other."""
    taken = []
    with capture(model, {"queries"}) as captured:
        for each in ids:
            model(each[None])
            taken.append([captured.queries[i][0].double().numpy() for i in layers])
    found = []
    for layer in range(len(layers)):
        for head in range(taken[0][layer].shape[0]):
            queries = np.concatenate([text[layer][head] for text in taken])
            first = np.linalg.svd(queries, full_matrices=False)[2][0]
            found.append(first * np.sign((queries @ first).mean()))
    D = len(found[0])
    return torch.tensor(np.array(found)).view(len(layers), H, -1, D).mean(2).float()


@pytest.mark.parametrize(("make", "layers", "H"), [(tiny_model, [0, 1, 2], 2), (gemma, [1, 3], 1)])
def test_filters_are_the_first_singular_vectors_of_the_evictable_layers_queries(make, layers, H):
    model, ids = make(), texts(40, 25)
    torch.testing.assert_close(query_filters(model, ids), by_svd(model, ids, layers, H), rtol=1e-4, atol=1e-5)


def test_filters_need_a_text():
    with pytest.raises(ValueError, match="none was given; calibration_texts"):
        query_filters(tiny_model(), [])


def test_calibration_texts_are_the_same_each_time_and_fit_the_model():
    found, again = (calibration_texts(tiny_model(max_tokens=128), letter_tokenizer()) for _ in range(2))
    assert [len(ids) for ids in found] == [128] * 3 and all(map(torch.equal, found, again))
    assert {len(ids) for ids in calibration_texts(tiny_model(max_tokens=4096), letter_tokenizer())} == {NUM_TOKENS}


def test_filters_come_back_from_a_file(tmp_path):
    model = tiny_model()
    filters = query_filters(model, texts(30))
    for _ in range(2):
        save_filters(filters, tmp_path / "filters.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["filters.safetensors"]
    assert torch.equal(QFilter(str(tmp_path / "filters.safetensors")).bind(model).directions, filters)


@pytest.mark.parametrize("content", ["nothing", "text", "tensor"])
def test_a_file_without_filters_is_named(tmp_path, content):
    path = tmp_path / "filters.safetensors"
    if content == "text":
        path.write_text("0.1 0.2")
    if content == "tensor":
        save_file({"heads": torch.zeros(2, 2)}, path)
    found = "is no file" if content == "nothing" else "holds no filters"
    with pytest.raises(ValueError, match=rf"filters\.safetensors {found}.*learnkv\.calibration"):
        QFilter(path)


def test_filters_of_another_model_are_refused_when_the_cache_is_made():
    with pytest.raises(ValueError, match="filters are of 2 layers x 1 KV heads x 16, the model has 3 x 2 x 8; calibrate"):
        EvictionCache(Policy(QFilter(query_filters(gemma(), texts(20))), 64), tiny_model())


def test_qfilter_runs_by_name_calibrated_on_the_spot_or_from_a_file(tmp_path):
    model, tokenizer = tiny_model(), letter_tokenizer()
    save_filters(query_filters(model, calibration_texts(model, tokenizer)), tmp_path / "filters.safetensors")
    contenders = contenders_of(["qfilter", f"qfilter(filters={tmp_path}/filters.safetensors)+adaptive", "snapkv"], model, tokenizer)
    one, two = (c.policy.scorer.directions for c in contenders if c.scorer == "qfilter")
    assert torch.equal(one, two)
    rows = compare(model, tokenizer, [short_prompt()], plan(contenders, [0.3]))
    assert [row.allocator for row in rows if row.scorer == "qfilter"] == ["uniform", "adaptive"]


def test_rows_of_another_file_of_filters_are_other_rows(tmp_path):
    model, tokenizer, hashes = tiny_model(), letter_tokenizer(), []
    filters = query_filters(model, calibration_texts(model, tokenizer))
    for each in (filters, -filters):
        save_filters(each, tmp_path / "filters.safetensors")
        hashes.append(contenders_of([f"qfilter(filters={tmp_path}/filters.safetensors)"], model, tokenizer)[-1].gate)
    assert all(hashes) and hashes[0] != hashes[1]
