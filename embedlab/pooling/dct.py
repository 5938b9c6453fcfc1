"""The separable DCT-II of S2Sent's Frequency Selection, on each sentence's own length.

A pair (a, b) squeezes N blocks and K tokens to one number a feature, with the weights gamma_a(n) * beta_b(l):

    gamma_a(n) = c_a(N) cos(pi a (n + 1/2) / N)
    beta_b(l)  = mask_l [b < K] c_b(K) cos(pi b (p_l + 1/2) / K)

where p_l is the token's position among the K that are counted. ``norm`` chooses c: ``mean`` (1/K, and
sqrt(2)/K above frequency 0, so that (0, 0) is the masked mean at any length), ``ortho`` (1/sqrt(K) and
sqrt(2/K)) or ``sum`` (1, the paper's equations as printed). Everything is computed in fp32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def constants(frequencies: Tensor, size: Tensor | int, norm: str) -> Tensor:
    """c_b(size), broadcast."""
    above = (frequencies > 0).to(frequencies.dtype)
    if norm == "mean":
        return (1 + (math.sqrt(2) - 1) * above) / size
    if norm == "ortho":
        return ((1 + above) / size).sqrt()
    return torch.ones_like(above)


def cosines(frequencies: Tensor, positions: Tensor, size: Tensor | int) -> Tensor:
    """cos(pi b (p + 1/2) / size), broadcast."""
    return torch.cos(math.pi * frequencies * (positions + 0.5) / size)


def block_basis(frequencies: Sequence[int], blocks: int, norm: str) -> Tensor:
    """gamma ``[m, N]`` for the block frequencies of m groups; those of ``blocks`` and above are zero."""
    a = torch.tensor(frequencies, dtype=torch.get_default_dtype())[:, None]
    n = torch.arange(blocks, dtype=a.dtype)
    return constants(a, blocks, norm) * cosines(a, n, blocks) * (a < blocks)


def token_basis(frequencies: Tensor, mask: Tensor, norm: str) -> Tensor:
    """beta ``[B, m, L]``: zero at padding, and in groups whose frequency is not below the sentence's length.

    Args:
        frequencies: ``[m]``, of the token axis.
        mask: ``[B, L]``, 1 at the tokens counted, on whichever side the padding is.
        norm: see above.
    """
    length = mask.sum(1, keepdim=True)
    size = length.clamp(min=1)
    position = mask.long().cumsum(1) - 1  # of integers: deterministic
    scale = (frequencies < length) * constants(frequencies, size, norm)
    waves = cosines(frequencies[:, None], position[:, None].to(frequencies.dtype), size[:, None])
    return waves * scale[:, :, None] * mask[:, None]


def adaptive_bins(bins: int, size: int, device: torch.device | None = None) -> Tensor:
    """``[bins, size]``: adaptive average pooling from ``size`` to ``bins`` as a matrix."""
    i = torch.arange(bins, device=device)[:, None]
    at = torch.arange(size, device=device)
    start = (i * size).div(bins, rounding_mode="floor")
    end = ((i + 1) * size + bins - 1).div(bins, rounding_mode="floor")
    return ((at >= start) & (at < end)).to(torch.get_default_dtype()) / (end - start)
