"""Writes tests/data/kvpress_golden.safetensors: scores of kvpress 0.5.5 on random tensors, that learnkv's scorers are compared with.

kvpress wants a transformers older than learnkv's, so this runs once, in an environment of its own that knows nothing of learnkv:

    python3.11 -m venv /tmp/kvpress
    /tmp/kvpress/bin/pip install "torch==2.13.0" "kvpress==0.5.5" "transformers==5.2.0" cachetools fire
    /tmp/kvpress/bin/python tests/make_kvpress_golden.py

Those versions made the file that lies here; it holds them as metadata.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from kvpress import (
    AdaKVPress,
    CriticalAdaKVPress,
    CriticalKVPress,
    CURPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    LagKVPress,
    SnapKVPress,
    TOVAPress,
)
from kvpress.utils import get_prerope_query_states
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

FILE = Path(__file__).parent / "data" / "kvpress_golden.safetensors"
CASES = {"gqa": (2, 3, 293), "mha": (3, 1, 131)}  # kv heads, query heads of each, tokens: primes
HEAD_DIM, CHANNELS = 8, 24
WINDOW = 64  # of SnapKV, kvpress's default
RATIOS = (0.3, 0.7)  # fractions removed by the two CriticalKV presses

PRESSES = {
    "snapkv": SnapKVPress(window_size=WINDOW, kernel_size=5),
    "key_norm": KnormPress(),
    "key_diff": KeyDiffPress(),
    "lagkv": LagKVPress(),
    "lagkv_19": LagKVPress(lag_size=19),
    "cur": CURPress(),
    "tova": TOVAPress(),
    "expected_attention": ExpectedAttentionPress(),
    "expected_attention_0.02": ExpectedAttentionPress(n_future_positions=37, epsilon=0.02),
}


def attention_of(H: int, G: int, seed: int) -> nn.Module:
    """A Llama's attention layer with random weights, large enough that attention is far from even."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=2, hidden_size=CHANNELS, intermediate_size=8, num_hidden_layers=1, num_attention_heads=H * G, num_key_value_heads=H,
        head_dim=HEAD_DIM, initializer_range=0.3, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaModel(config).eval()
    attention = model.layers[0].self_attn
    attention.rotary_emb = model.rotary_emb  # as kvpress does when it hooks a model
    return attention


def tensors_of(attention: nn.Module, hidden: Tensor) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """What learnkv's scorers read, without the batch, and cos and sin."""
    position_embeddings = attention.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
    queries = get_prerope_query_states(attention, hidden)
    keys, values = (f(hidden).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (attention.k_proj, attention.v_proj))
    rotated, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
    inputs = {"keys": keys, "values": values, "queries_pre_rope": queries, "queries": rotated[:, :, -WINDOW:]}
    fixed = {"inv_freq": attention.rotary_emb.inv_freq, "W_O": attention.o_proj.weight}
    return {name: x[0] for name, x in inputs.items()} | fixed, position_embeddings


def critical(attention: nn.Module, shape: torch.Size, given: tuple, ratio: float) -> dict[str, Tensor]:
    """CriticalKV's scores, and the tokens [H, n] that AdaKV and its form of CriticalKV keep, all over CUR."""
    hidden, keys, values, kwargs = given
    found = {"criticalkv": CriticalKVPress(CURPress(ratio)).score(attention, hidden, keys, values, None, kwargs)[0]}
    adaptive = {
        "adakv": AdaKVPress(CURPress(ratio)),
        "criticalada": CriticalAdaKVPress(CURPress(ratio)),
        "criticalada_floor": CriticalAdaKVPress(CURPress(ratio), alpha_safeguard=0.9),
    }
    for name, press in adaptive.items():
        press.compress(attention, hidden, keys, values, None, kwargs)
        _, head, slot = attention.masked_key_indices
        found[name] = torch.ones(shape, dtype=torch.bool).index_put((head, slot), torch.tensor(False))
    return found


def main() -> None:
    golden: dict[str, Tensor] = {}
    for seed, (case, (H, G, n)) in enumerate(CASES.items()):
        attention = attention_of(H, G, seed)
        hidden = torch.randn(1, n, CHANNELS)
        inputs, position_embeddings = tensors_of(attention, hidden)
        given = hidden, inputs["keys"][None], inputs["values"][None], {"position_embeddings": position_embeddings}
        scores = {name: press.score(attention, *given[:3], None, given[3])[0] for name, press in PRESSES.items()}
        for ratio in RATIOS:
            scores |= {f"{name}_{ratio}": x for name, x in critical(attention, scores["cur"].shape, given, ratio).items()}
        golden |= {f"{case}.{name}": x.detach().contiguous() for name, x in (inputs | scores).items()}
    save_file(golden, FILE, {name: version(name) for name in ("kvpress", "transformers", "torch")})


if __name__ == "__main__":
    with torch.no_grad():
        main()
