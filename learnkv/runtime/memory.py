"""MemoryReport: what a cache holds, layer by layer and head by head, as a table and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True)
class MemoryReport:
    """What an EvictionCache holds at one moment, and the most that it ever held.

    tokens  [layers, B, H] int64 tokens kept
    nbytes  [layers, B, H] int64 bytes of the pages that each head owns, their empty slots, positions and memory included; a page that
            rows or clones share counts for each of them
    seen    [B] int64 tokens so far, evicted ones included
    total   bytes of everything: these pages, free ones, tables, last queries, sliding layers
    peak    the largest total so far, measured when a layer has stored its new tokens and not evicted yet
    """

    tokens: Tensor
    nbytes: Tensor
    seen: Tensor
    total: int
    peak: int

    def __str__(self) -> str:
        head = f"{'layer':>5}  {'tokens kept per head':>24}  {'MiB':>8}"
        lines = [self.line(layer) for layer in range(len(self.tokens))]
        kept = self.tokens.double().mean() / max(1.0, self.seen.double().mean().item())
        seen = "/".join(map(str, self.seen.tolist()))
        foot = f"kept {kept:.1%} of {seen} tokens; holds {mib(self.total)} MiB, at its peak {mib(self.peak)} MiB"
        return "\n".join([head, *lines, foot])

    def line(self, layer: int) -> str:
        """One layer: fewest, mean and most tokens of its heads, and its bytes."""
        tokens = self.tokens[layer].double()
        spread = f"{tokens.min():.0f} / {tokens.mean():.1f} / {tokens.max():.0f}"
        return f"{layer:>5}  {spread:>24}  {mib(int(self.nbytes[layer].sum())):>8}"

    def draw(self, path: str | Path) -> None:
        """Tokens kept by each layer and head, rows of the batch side by side, as PNG."""
        from matplotlib.figure import Figure  # a second to import, for pictures only

        layers, B, H = self.tokens.shape
        figure = Figure(figsize=(2 + 0.5 * max(4, B * H), 2 + 0.2 * layers), layout="constrained")
        axis = figure.subplots()
        image = axis.imshow(self.tokens.flatten(1).numpy(), aspect="auto", vmin=0)
        axis.set(xlabel="KV head" if B == 1 else f"row and KV head ({H} of each row)", ylabel="layer", title=f"{mib(self.total)} MiB held")
        for row in range(1, B):
            axis.axvline(row * H - 0.5, color="white")
        figure.colorbar(image, label="tokens kept")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
