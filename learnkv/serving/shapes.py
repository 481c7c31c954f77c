"""Sizes of a model, by name or from its configuration: weights, KV heads, layers that keep every token and layers that keep a window."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from learnkv.names import nearest


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention and gated MLPs; norms and biases are too small to be counted.

    layers       that keep every token, the evictable ones
    kv_heads     of each layer, as many query heads to each as `group` says
    window       tokens that each of the `sliding` other layers keeps, 0 where there are none
    hidden, intermediate    widths of the residual stream and of the MLPs
    vocabulary   tokens; `tied` where embedding and output share their weights
    """

    name: str
    layers: int
    kv_heads: int
    group: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    sliding: int = 0
    window: int = 0

    @property
    def body_weights(self) -> int:
        """Weights that every token goes through."""
        attention = 2 * self.hidden * self.head_dim * self.kv_heads * (self.group + 1)
        return (self.layers + self.sliding) * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Weights of the output, which only rows that are sampled from go through."""
        return self.hidden * self.vocabulary

    @property
    def weights(self) -> int:
        """All of them, the embedding included."""
        return self.body_weights + self.head_weights * (1 if self.tied else 2)

    @property
    def heads(self) -> int:
        """KV heads of all layers that keep every token."""
        return self.layers * self.kv_heads

    def slots(self, resident: int, seen: int) -> int:
        """Token slots over all KV heads where `resident` of `seen` tokens stay in the evictable layers."""
        return self.heads * resident + self.sliding * self.kv_heads * min(seen, self.window)


SOURCES = {
    "smollm2-135m": "the bundled model's own configuration",
    "llama2": "arXiv:2307.09288, and the released configurations",
    "llama3": "arXiv:2407.21783, table 3",
    "qwen": "the released configurations; arXiv:2412.15115 and arXiv:2505.09388, table 1",
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("smollm2-135m", 30, 3, 3, 64, 576, 1536, 49152, tied=True),
        Shape("llama2-7b", 32, 32, 1, 128, 4096, 11008, 32000),
        Shape("llama2-13b", 40, 40, 1, 128, 5120, 13824, 32000),
        Shape("llama2-70b", 80, 8, 8, 128, 8192, 28672, 32000),
        Shape("llama3-8b", 32, 8, 4, 128, 4096, 14336, 128256),
        Shape("llama3-70b", 80, 8, 8, 128, 8192, 28672, 128256),
        Shape("qwen2.5-7b", 28, 4, 7, 128, 3584, 18944, 152064),
        Shape("qwen3-8b", 36, 8, 4, 128, 4096, 12288, 151936),
    )
}


def shape_of(name: str) -> Shape:
    """A model of the table, else a hub id or folder, whose configuration alone is read."""
    if name in SHAPES:
        return SHAPES[name]
    if "/" not in name and not Path(name).is_dir():
        raise ValueError(f"unknown model {name!r}; {nearest(name, SHAPES)}; a hub id or a folder with a config.json has a / in it")
    from learnkv.models import load_config, refuse_unsupported  # transformers, which takes seconds

    config = load_config(name, name)
    refuse_unsupported(name, config)
    return shape_from(name, config.get_text_config().to_dict())


def shape_from(name: str, config: dict) -> Shape:
    """The shape that a configuration's values give; a ValueError for a decoder whose weights it would count wrongly."""
    refuse_uncounted(name, config)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    kinds = config.get("layer_types") or ["full_attention"] * layers
    sliding = kinds.count("sliding_attention")
    return Shape(
        name=name,
        layers=layers - sliding,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        sliding=sliding,
        window=config.get("sliding_window") or 0 if sliding else 0,
    )


NEEDED = ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")


def refuse_uncounted(name: str, config: dict) -> None:
    if missing := [key for key in NEEDED if not isinstance(config.get(key), int)]:
        raise ValueError(f"the configuration of {name} has no {', '.join(missing)}; its weights cannot be counted")
    if experts := [key for key in config if "experts" in key and config[key]]:
        raise ValueError(f"{name} is a mixture of experts ({experts[0]}), which plan does not count")
