"""How fast a run is, against the card's limit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

# Dense bf16 matrix peak in TFLOP/s by the vendors' data sheets (without sparsity), by a part of the device name.
PEAKS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "A10G": 70.0,
         "V100": 125.0, "RTX 4090": 165.0, "RTX 3090": 71.0}  # fmt: skip


def peak_tflops(device: torch.device) -> tuple[float, str] | None:
    """Named peak of the device, or None where it is not known (no utilisation is reported then)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next(((peak, key) for key, peak in PEAKS.items() if key in name), None)


def matmul_parameters(blocks: Iterable[nn.Module]) -> int:
    """Weights of the linear layers that every token passes: those of the blocks, not the embeddings.

    A frozen one counts as two thirds: it takes 4 of the 6 operations, as it has no gradient of its own. 4-bit
    ones lie two in a byte.
    """
    total = 0.0
    for p in (p for block in blocks for p in block.parameters() if p.ndim >= 2):
        packed = 2 if p.dtype == torch.uint8 else 1
        total += packed * p.numel() * (1 if p.requires_grad else 2 / 3)
    return round(total)


def training_flops(tokens: float, parameters: int, width: int, layers: int, length: float) -> float:
    """Floating-point operations of forward and backward over ``tokens`` tokens in sequences of ``length``.

    6 per weight and token, and 12 * layers * width * length per token for the attention scores and their use.
    """
    return tokens * (6 * parameters + 12 * layers * width * length)
