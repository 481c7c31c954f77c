"""Calibration: the directions that Q-Filters (arXiv:2503.02812) wants of a model beforehand.

filters = query_filters(model, calibration_texts(model, tokenizer))
save_filters(filters, "filters.safetensors")        evaluate "method=qfilter(filters=filters.safetensors)"
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save
from torch import Tensor

from learnkv.capture import capture, decoder_of, evictable_layers
from learnkv.files import write_atomically
from learnkv.geometry import kv_shape, max_positions
from learnkv.models import PreTrainedModel
from learnkv.prompts.haystack import Style, passage
from learnkv.prompts.prompt import Tokenizer

NUM_TOKENS = 1024  # of a text; filters of other texts lie within a few degrees of these on the bundled model
STYLES: tuple[Style, ...] = ("prose", "docstrings", "code")


@torch.no_grad()
def query_filters(model: PreTrainedModel, texts: Sequence[Tensor]) -> Tensor:
    """[layers, H, D] float32: the direction of the queries of each KV head of each evictable layer.

    texts  token ids, [n] int64 each

    A query head's direction is the first right singular vector of its queries as attention sees them, rotated, with the sign that makes
    their mean projection positive; a KV head's is the mean over its group (arXiv:2503.02812, section 3.2).

    Differs: the vector is found as the first eigenvector of Q'Q, summed in float64 over texts, so that no queries are kept.
    """
    if not any(len(ids) for ids in texts):
        raise ValueError("filters are calibrated on texts, and none was given; calibration_texts(model, tokenizer) has some")
    texts = [ids.long() for ids in texts if len(ids)]
    with capture(model, {"queries"}) as taken:
        sums = [query_sums(model, ids, taken.queries) for ids in texts]
    squares, total = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
    first = torch.linalg.eigh(squares).eigenvectors[..., -1]  # [layers, Q, D]
    first = torch.where((first * total).sum(-1, keepdim=True) < 0, -first, first)
    return first.unflatten(1, (kv_shape(model)[1], -1)).mean(2).float().cpu()


def query_sums(model: PreTrainedModel, ids: Tensor, queries: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Q'Q [layers, Q, D, D] and the sum [layers, Q, D] of one text's queries, float64; `queries` is what a capture fills."""
    decoder_of(model)(input_ids=ids[None].to(model.device), use_cache=False)
    of_layers = [queries[i][0].double() for i in evictable_layers(model)]  # [Q, n, D] each
    return torch.stack([q.mT @ q for q in of_layers]), torch.stack([q.sum(1) for q in of_layers])


def calibration_texts(model: PreTrainedModel, tokenizer: Tokenizer) -> list[Tensor]:
    """Token ids of a passage of each style of our training split, NUM_TOKENS each or as many as the model has positions."""
    most = int(min(NUM_TOKENS, max_positions(model)))
    texts = ["\n".join(passage(Random(f"calibration {style}"), style, "train", 8 * most)) for style in STYLES]
    return [torch.tensor(tokenizer(text, add_special_tokens=False, truncation=True, max_length=most)["input_ids"]) for text in texts]


def save_filters(filters: Tensor, path: str | Path) -> None:
    """Writes what `query_filters` gave to a safetensors file: the old file or the whole new one is there at any moment."""
    content = save({"filters": filters.contiguous()})
    write_atomically(Path(path), lambda to: to.write_bytes(content))
