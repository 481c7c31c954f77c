"""Exported presses in kvpress itself, by hand: its transformers does not fit learnkv's, so that each side runs in its own environment.

python -m tests.check_exports FOLDER MODEL           here: exports a gate of every method, writes what learnkv scores and keeps
python tests/check_exports.py FOLDER MODEL           where kvpress is installed: the same prompt under the presses
MODEL is a folder of weights that both can read, of the geometry of checkpoints/kvp-smollm2-135m.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TOKENS, KEPT = 300, 150
HERE = importlib.util.find_spec("kvpress") is None


def ids_of(vocabulary: int) -> Tensor:
    return torch.randint(10, vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def export_all(folder: Path, model_folder: str) -> None:
    """One press and one file of expectations per method: the shipped KVP gate, of the others gates of random weights."""
    from learnkv.checkpoint import load_gate
    from learnkv.export import export_press
    from learnkv.gates import GATES
    from learnkv.methods import METHODS
    from learnkv.models import describe, load_model
    from learnkv.runtime.attach import attach
    from learnkv.runtime.cache import EvictionCache
    from tests.probe_parts import served

    model, _ = load_model(model_folder)
    ids = ids_of(model.config.vocab_size)
    for name, kind in GATES.items():
        if name == "kvp":
            gate = load_gate("checkpoints/kvp-smollm2-135m", model)
        else:
            torch.manual_seed(0)
            gate = kind(kind.Config(), describe(model))
            gate.meet(model)
            for weight in gate.parameters():
                weight.data += 0.02 * torch.randn(weight.shape)
        export_press(gate.eval(), folder / f"{name}_press.py")
        with attach(model):
            cache = EvictionCache(METHODS[name](KEPT, gate=gate, allocate="uniform"), model)
            model(ids, cache=cache)
        kept = torch.stack([pages.slots().positions[0] for pages in cache.held_pages()])
        save_file({"scores": torch.cat(served(gate, ids[0], model)), "kept": kept}, folder / f"{name}.safetensors")
        sys.stdout.write(f"{name}: written\n")


@torch.no_grad()
def check_all(folder: Path, model_folder: str) -> None:
    """A line per method: how far scores lie apart, and how many of the kept tokens are the same."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    ids, full = ids_of(model.config.vocab_size), DynamicCache()
    model.model(ids, past_key_values=full)
    sys.path.insert(0, str(folder))
    for path in sorted(folder.glob("*_press.py")):
        want = load_file(folder / path.name.replace("_press.py", ".safetensors"))
        noted, held = noting(importlib.import_module(path.stem)), DynamicCache()
        press = sys.modules[path.stem].Press(1 - KEPT / TOKENS)
        with press(model):
            model.model(ids, past_key_values=held)
        apart = (torch.cat(noted) - want["scores"]).abs() / want["scores"].abs().clamp(min=1)
        if held.get_seq_length() == KEPT:
            pairs = zip(held.layers, full.layers, want["kept"], strict=True)
            same = torch.stack([places(mine.keys, whole.keys) == kept for mine, whole, kept in pairs])
            line = f"kept tokens that are learnkv's: {same.float().mean():.4%}"
        else:
            line = f"masks {sum(len(layer.self_attn.masked_key_indices[0]) for layer in model.model.layers)} tokens"
        sys.stdout.write(f"{path.stem}: scores apart by {apart.max():.1e} at most; {line}\n")


def noting(module: ModuleType) -> list[Tensor]:
    """Where the module's press will put its scores, layer by layer, before it protects any token."""
    noted: list[Tensor] = []
    marked = module.marked

    def note(scores: Tensor, num_sinks: int, num_recent: int) -> Tensor:
        noted.append(scores)
        return marked(scores, num_sinks, num_recent)

    module.marked = note  # type: ignore[attr-defined]
    return noted


def places(keys: Tensor, of: Tensor) -> Tensor:
    """[H, k] where each key of [1, H, k, D] is among [1, H, n, D], ascending."""
    return torch.cdist(keys[0].double(), of[0].double()).argmin(-1).sort().values


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    (export_all if HERE else check_all)(Path(sys.argv[1]), sys.argv[2])
