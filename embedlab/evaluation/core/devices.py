"""Where a scorer's own arithmetic runs."""

from __future__ import annotations

import torch


def scoring_device(name: str | None) -> str:
    """`name`, else CUDA if there is one, else the CPU.

    Never mps: it has no float64, and what a scorer computes is too small to gain from it.
    """
    if name in (None, "auto"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu" if str(name) == "mps" else str(name)
