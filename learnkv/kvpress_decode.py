"""kvpress's Ada-SnapKV, decoding: run by `bench.kvpress` with the Python of an environment of its own, without learnkv.

python kvpress_decode.py FOLDER DTYPE NUM_TOKENS STEPS TURNS KEPT -> one line of JSON: full_ms and ms a token, full_bytes and bytes held
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch


def caches_of(model: Any, ids: torch.Tensor, kept: float) -> dict[str, Any]:
    """A full cache of the prompt and a pressed one."""
    from kvpress import AdaKVPress, SnapKVPress
    from transformers import DynamicCache

    caches = {"full": DynamicCache(), "pressed": DynamicCache()}
    model.model(ids, past_key_values=caches["full"])
    with AdaKVPress(SnapKVPress(compression_ratio=1 - kept))(model):
        model.model(ids, past_key_values=caches["pressed"])
    return caches


def decode(model: Any, cache: Any, pressed: dict[int, Any], steps: int) -> float:
    """Milliseconds a token; `pressed` are the keys that kvpress masks, by layer, None for a full cache."""
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.masked_key_indices = pressed.get(i)
    begin = time.perf_counter()
    for _ in range(steps):
        model(torch.tensor([[100]]), past_key_values=cache)
    return (time.perf_counter() - begin) / steps * 1000


@torch.no_grad()
def main(folder: str, dtype: str, num_tokens: int, steps: int, turns: int, kept: float) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = torch.randint(10, model.config.vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    caches = caches_of(model, ids, kept)
    masked = {i: layer.self_attn.masked_key_indices for i, layer in enumerate(model.model.layers)}
    held = {name: sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values)) for name, cache in caches.items()}
    spent: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(turns + 1):  # the first turn only warms up
        for name, cache in caches.items():
            spent[name].append(decode(model, cache, masked if name == "pressed" else {}, steps))
    full, pressed = (min(each[1:]) for each in spent.values())
    sys.stdout.write(json.dumps({"full_ms": full, "ms": pressed, "full_bytes": held["full"], "bytes": held["pressed"]}) + "\n")


if __name__ == "__main__":
    folder, dtype, num_tokens, steps, turns, kept = sys.argv[1:]
    main(folder, dtype, int(num_tokens), int(steps), int(turns), float(kept))
