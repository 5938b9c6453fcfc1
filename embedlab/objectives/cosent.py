"""Ranking losses over scored pairs: CoSENT (Su 2022) and AnglE's angle (Li and Li 2023, arXiv 2309.12871).

Both say of every two pairs of the batch that the one with the higher score is to be the more similar one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from embedlab.objectives.precision import full_precision, to_fp32


@full_precision
def ranking(similarities: Tensor, scores: Tensor, scale: float = 20.0) -> Tensor:
    """``log(1 + sum over i, j with y_i < y_j of exp(scale (s_i - s_j)))``.

    Args:
        similarities: ``[M]``, s of the pairs of the whole (gathered) batch.
        scores: ``[M]``, y; only their order counts.
        scale: lambda.

    Returns:
        A scalar: 0 where all scores are equal.
    """
    s = scale * to_fp32(similarities)
    difference = s[:, None] - s[None, :]
    lower = scores[:, None] < scores[None, :]
    terms = difference.masked_fill(~lower, float("-inf")).flatten()
    return torch.logsumexp(torch.cat([terms.new_zeros(1), terms]), 0)


@full_precision
def cosine(first: Tensor, second: Tensor) -> Tensor:
    """The cosine of each pair ``[B]``, in fp32, of ``[B, D]`` each."""
    return cosine_similarity(to_fp32(first), to_fp32(second), dim=-1)


@full_precision
def angle_similarity(first: Tensor, second: Tensor) -> Tensor:
    """AnglE's similarity of each pair ``[B]``: ``|sum_k ((ac + bd) + (bc - ad))_k| / (|x| |y|)``.

    A vector's halves [a | b] and [c | d] are real and imaginary parts, and the sum is over those of x / y (the
    paper's equation 6, as its release computes it). It equals ``|cos(x, y) + cos(Jx, y)|`` with J[a | b] = [b | -a]:
    1 for x = y and for x = -y too, at most the root of 2, and another one for (y, x).

    Args:
        first, second: ``[B, D]``, x and y; an odd D is filled up with a 0.
    """
    x, y = (pad(to_fp32(v), (0, v.shape[-1] % 2)) for v in (first, second))
    (a, b), (c, d) = x.chunk(2, -1), y.chunk(2, -1)
    total = ((a * c + b * d) + (b * c - a * d)).sum(-1)
    lengths = (x.norm(dim=-1) * y.norm(dim=-1)).clamp(min=1e-8)
    return (total / lengths).abs()
