"""RoPE of the model at hand: its frequencies, and how to take it off again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def rotary_frequencies(model: nn.Module) -> tuple[Tensor, float]:
    """Inverse frequencies [R / 2] float32 of the R dimensions that rotate in full-attention layers, and the factor of cos and sin.

    They are those of the one rotary module as it stands: scaling that changes with the length (dynamic, LongRoPE) is not followed.
    No frequencies where the model has no such module.
    """
    find: Callable[[], nn.Module] = getattr(model, "get_decoder", lambda: model)  # an image tower may rotate too
    for module in find().modules():
        for prefix in ("", "full_attention_"):  # Gemma 3 has one set per layer type
            frequencies = getattr(module, f"{prefix}inv_freq", None)
            if isinstance(frequencies, Tensor):
                return frequencies.float(), float(getattr(module, f"{prefix}attention_scaling", 1.0))
    return torch.zeros(0), 1.0


def changes_with_length(model: nn.Module) -> bool:
    """Whether the model's frequencies hang on how long its input is."""
    return any(getattr(module, "rope_type", "") in ("dynamic", "longrope") for module in model.modules())


def turn_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] float32 turned back by angles of which cos and sin are given, [..., R / 2]; dimensions from R on do not rotate."""
    half = cos.shape[-1]
    a, b, still = x.tensor_split((half, 2 * half), -1)
    return torch.cat([torch.addcmul(a * cos, b, sin), torch.addcmul(b * cos, a, sin, value=-1), still], -1)


def renumbered(keys: Tensor, moved: Tensor, frequencies: Tensor) -> Tensor:
    """keys [..., D] turned on by `moved` [...] int positions, in the keys' type; those that move by 0 stay to the bit."""
    out, turned = keys.clone(), moved != 0
    angle = moved[turned][:, None] * frequencies
    out[turned] = turn_back(keys[turned].float(), angle.cos(), -angle.sin()).to(keys.dtype)
    return out
