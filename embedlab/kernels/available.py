"""Which kernels of this project can run here: what they need beside PyTorch."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch

SHORT = "embedlab_short"
"""Attention for short sequences, by the name that transformers knows it by."""
SHORT_LONGEST = 128


@cache
def has_triton() -> bool:
    """Whether Triton is installed; looked up once, because a training step asks."""
    return importlib.util.find_spec("triton") is not None


def short_kernel(config: Any, longest: int) -> bool:
    """Whether the kernel for short sequences can run (and make it known to transformers if so).

    It needs CUDA and Triton, bidirectional or causal masks given as tensors, and a head width that is a power of two.
    """
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_heads", None)
    width = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0)
    same = getattr(config, "num_key_value_heads", None) in (None, heads)
    if not (torch.cuda.is_available() and has_triton() and same):
        return False
    if longest > SHORT_LONGEST or width not in (16, 32, 64, 128):
        return False
    from embedlab.kernels.short_attention import register

    register(SHORT)
    return True
