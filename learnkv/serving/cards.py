"""Cards by what their data sheets say, or by what `learnkv.bench kernels` measured on one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from learnkv.names import nearest


@dataclass(frozen=True)
class Card:
    """What a server's accelerator can do.

    memory  bytes
    bytes   a second from its memory
    flops   operations of matrix products a second, bfloat16, dense
    link    bytes a second to the host, one way; 0 where card and host share one memory
    source  of these figures
    """

    name: str
    memory: float
    bytes: float
    flops: float
    link: float
    source: str


REACHED = (4.3e12 / 4.8e12, 790e12 / 989e12)  # of an H200's data sheet in copies and matrix products: learnkv.evaluation.roofline.H200

PCIE4, PCIE5 = 32e9, 64e9  # x16, one way, half of what data sheets give for both
CARDS = {
    card.name: card
    for card in (
        Card("a100-80gb", 80e9, 2.039e12, 312e12, PCIE4, "NVIDIA A100 Tensor Core GPU data sheet, SXM"),
        Card("h100-80gb", 80e9, 3.35e12, 989e12, PCIE5, "NVIDIA H100 Tensor Core GPU data sheet, SXM; half of the rate with sparsity"),
        Card("h200-141gb", 141e9, 4.8e12, 989e12, PCIE5, "NVIDIA H200 Tensor Core GPU data sheet, SXM; half of the rate with sparsity"),
        Card("l40s-48gb", 48e9, 864e9, 362e12, PCIE4, "NVIDIA L40S data sheet"),
        Card("rtx4090-24gb", 24e9, 1.008e12, 165e12, PCIE4, "NVIDIA Ada GPU architecture white paper, float32 accumulation"),
        Card("orin-nano-8gb", 8e9, 102e9, 17e12, 0, "NVIDIA Jetson Orin Nano Super data sheet: a quarter of 67 TOPS of sparse int8"),
    )
}


def card_of(name: str, memory_gb: float | None = None) -> Card:
    """A card at the rates that can be reached: of its data sheet the shares REACHED on an H200, of a measurement all.

    name       of CARDS, or a .json file as `python -m learnkv.bench kernels` leaves it
    memory_gb  instead of the data sheet's, 1e9 bytes; a measurement does not know it
    """
    if name.endswith(".json"):
        return measured_card(Path(name), memory_gb)
    if name not in CARDS:
        raise ValueError(f"unknown card {name!r}; {nearest(name, CARDS)}; or a .json file that `learnkv.bench kernels` wrote")
    card = CARDS[name]
    memory = card.memory if memory_gb is None else memory_gb * 1e9
    source = f"{card.source}; of it {REACHED[0]:.0%} in memory and {REACHED[1]:.0%} in products, as an H200 was measured to reach"
    return Card(card.name, memory, card.bytes * REACHED[0], card.flops * REACHED[1], card.link, source)


def measured_card(path: Path, memory_gb: float | None) -> Card:
    """The ceilings in a result of `bench kernels`; the link is taken for PCIe 4."""
    if memory_gb is None:
        raise ValueError(f"plan.card={path} says nothing of the card's memory; give plan.memory_gb as well")
    try:
        found = json.loads(path.read_text())
        rates = {name: float(found["ceilings"][name]) for name in ("bytes", "flops")}
        device = str(found["machine"]["device"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no result of learnkv.bench kernels: {type(error).__name__}: {error}") from error
    return Card(device, memory_gb * 1e9, rates["bytes"], rates["flops"], PCIE4, f"measured, {path}")
