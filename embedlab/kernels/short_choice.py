"""Which attention kernel suits a captured training step."""

from __future__ import annotations

from typing import Any

import torch

from embedlab.kernels.available import has_triton

SHORT = "embedlab_short"
SHORT_LONGEST = 128


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

    register()
    return True
