"""Weights that others published, as gates of ours; `learnkv.checkpoint.save_gate` then writes them in our form."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from learnkv.capture import evictable_layers
from learnkv.gates.base import Gate
from learnkv.gates.fast_kvzip import FastKVzip, FastKVzipConfig
from learnkv.gates.kvzap import KVzap, KVzapConfig
from learnkv.models import PreTrainedModel, describe

G = TypeVar("G", bound=Gate)
Layer = Mapping[str, Tensor]  # a state dict of one decoder layer's module
Names = Mapping[str, tuple[str, Callable[[Tensor], Tensor]]]  # our parameter -> (theirs, how a layer of it becomes one of ours)


def import_fast_kvzip(path: str | Path, model: PreTrainedModel) -> FastKVzip:
    """The gate in a file of huggingface.co/Jang-Hyun/Fast-KVzip, such as qwen3-8b/q4_dim16_sink16.pt, for the model it was trained on.

    The file is a pickle: tensors and numpy arrays are read from it, and anything else is refused.
    """
    path, base = Path(path), describe(model)
    layers = full_attention_layers(unpickled(path), model, path)
    refuse_other_names(layers, {theirs for theirs, _ in FAST_KVZIP.values()}, path)
    width = layers[0]["q_norm.weight"].numel()
    sinks = layers[0]["k_base"].numel() // max(1, base.num_kv_heads * width)
    if not (width and sinks):
        sides = f"width {width} with {sinks} sinks for {base.num_kv_heads} KV heads"
        raise ValueError(f"{path} holds a gate of {sides}; take the file of this model")
    return filled(FastKVzip(FastKVzipConfig(width=width, num_sinks=sinks), base), FAST_KVZIP, layers, path)


def import_kvzap(path: str | Path, model: PreTrainedModel) -> KVzap:
    """The gate in the model.safetensors of huggingface.co/nvidia/KVzap-linear-* or KVzap-mlp-*, for the model it was trained on."""
    path, base = Path(path), describe(model)
    layers = full_attention_layers(by_layer(read_safetensors(path), path), model, path)
    names = KVZAP_MLP if "2.weight" in layers[0] else KVZAP_LINEAR
    refuse_other_names(layers, {theirs for theirs, _ in names.values()}, path)
    width = layers[0]["0.bias"].numel() if names is KVZAP_MLP else 0
    return filled(KVzap(KVzapConfig(width=width), base), names, layers, path)


def turned(x: Tensor) -> Tensor:
    """[out, in] of nn.Linear -> [in, out]."""
    return x.transpose(0, 1)


def row(x: Tensor) -> Tensor:
    """[out] of a bias -> [1, out]."""
    return x[None]


def same(x: Tensor) -> Tensor:
    return x


def per_head(x: Tensor) -> Tensor:
    """[H, 1, ...] -> [H, ...]."""
    return x.squeeze(1)


FAST_KVZIP: Names = {
    "query_weight": ("q_proj.weight", turned),
    "query_bias": ("q_proj.bias", row),
    "key_weight": ("k_proj.weight", turned),
    "query_gain": ("q_norm.weight", same),
    "key_gain": ("k_norm.weight", same),
    "sinks": ("k_base", per_head),
    "bias": ("b", per_head),
}
KVZAP_MLP: Names = {
    "first_weight": ("0.weight", turned),
    "first_bias": ("0.bias", row),
    "last_weight": ("2.weight", turned),
    "last_bias": ("2.bias", row),
}
KVZAP_LINEAR: Names = {"last_weight": ("weight", turned), "last_bias": ("bias", row)}


def filled(gate: G, names: Names, layers: Sequence[Layer], path: Path) -> G:
    """The gate with the layers' weights in float32, ready to score."""
    for ours, (theirs, of_layer) in names.items():
        weight = gate.get_parameter(ours)
        for index, layer in enumerate(layers):
            try:
                found = of_layer(layer[theirs])
            except IndexError:  # fewer dimensions than theirs has
                found = layer[theirs]
            refuse_no_weights(found, f"{path}: {theirs} of its layer {index}")
            if found.shape != weight[index].shape:
                sides = f"becomes {tuple(found.shape)}, a {gate.METHOD} gate of {gate.base.name} has {tuple(weight[index].shape)}"
                raise ValueError(f"{path}: {theirs} of its layer {index} {sides}; take the file of this model")
            weight.data[index] = found
    return gate.eval().requires_grad_(False)


def refuse_no_weights(found: Tensor, where: str) -> None:
    """Raises a ValueError for a tensor that holds no plain finite numbers."""
    if found.layout != torch.strided or found.device.type != "cpu" or not found.is_floating_point():
        kind = f"{str(found.layout).removeprefix('torch.')} {str(found.dtype).removeprefix('torch.')} on {found.device}"
        raise ValueError(f"{where} is {kind}, where plain floating-point numbers belong; take a file as its authors published it")
    if not found.isfinite().all():
        raise ValueError(f"{where} holds numbers that are not finite; take a file as its authors published it")


def refuse_other_names(layers: Sequence[Layer], wanted: set[str], path: Path) -> None:
    for index, layer in enumerate(layers):
        if set(layer) != wanted:
            raise ValueError(
                f"{path}: its layer {index} holds {sorted(map(str, layer))}, not {sorted(wanted)}; take a file as its authors published it"
            )


def full_attention_layers(layers: Sequence[Layer], model: PreTrainedModel, path: Path) -> list[Layer]:
    """Those of the layers that the model can evict from: a file may hold the sliding-window ones too."""
    full, every = evictable_layers(model), model.config.get_text_config().num_hidden_layers
    if len(layers) not in (len(full), every):
        name = model.config.name_or_path
        raise ValueError(
            f"{path} holds {len(layers)} layers, {name} has {every}, {len(full)} of full attention; take the file of this model"
        )
    return [layers[i] for i in full] if len(layers) == every else list(layers)


# what numpy's arrays are made of in a pickle, by its name in numpy 1 and in numpy 2
RECONSTRUCT = cast(Callable, numpy.empty(0).__reduce__()[0])
ARRAYS: list[Callable | tuple[Callable, str]] = [
    *((RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *(numpy.ndarray, numpy.dtype),
    *(type(numpy.dtype(kind)) for kind in ("float16", "float32", "float64", "int64")),
]
NO_PICKLE = (RuntimeError, OSError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError)  # what unpickling gives on noise


def unpickled(path: Path) -> list[Layer]:
    """The state dicts under "module"."""
    refuse_missing(path)
    try:
        with torch.serialization.safe_globals(ARRAYS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except NO_PICKLE as error:
        reason = type(error).__name__ if isinstance(error, pickle.UnpicklingError) else (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} is no file of tensors as torch.save writes it ({reason})") from error
    layers = content.get("module") if isinstance(content, dict) else None
    if not isinstance(layers, list) or not all(is_layer(layer) for layer in layers):
        raise ValueError(f"{path} holds no list of layers under 'module'; take a file as its authors published it")
    return layers


def is_layer(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(weight, Tensor) for weight in value.values())


def refuse_missing(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is no file; give the one that was downloaded")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    refuse_missing(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error})") from error


def by_layer(tensors: Mapping[str, Tensor], path: Path) -> list[Layer]:
    """layers.<i>.<name> (module_list.<i>.<name> in kvpress's first version) as one mapping per layer."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(?:layers|module_list)\.(\d+)\.(.+)", name)
        if match is None:
            raise ValueError(f"{path} holds {name}, which is no layer's; take a file as its authors published it")
        if layers.setdefault(int(match[1]), {}).setdefault(match[2], tensor) is not tensor:
            raise ValueError(f"{path} holds {match[2]} of layer {int(match[1])} twice; take a file as its authors published it")
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise ValueError(f"{path} holds layers {sorted(layers)}, some are missing; take a file as its authors published it")
    return [layers[i] for i in range(len(layers))]
