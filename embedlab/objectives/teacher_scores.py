"""A student's scores of an anchor's positive and negatives, to those of a teacher."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from embedlab.objectives.precision import full_precision, to_fp32


@full_precision
def margin_mse(student: Tensor, teacher: Tensor) -> Tensor:
    """``mean over [B, n] of ((s_p - s_k) - (t_p - t_k))^2`` (Hofstaetter et al. 2020, arXiv 2010.02666).

    Args:
        student, teacher: ``[B, 1 + n]``, scores of the positive and of each negative.
    """
    s, t = to_fp32(student), to_fp32(teacher)
    return ((s[:, :1] - s[:, 1:]) - (t[:, :1] - t[:, 1:])).square().mean()


@full_precision
def score_kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """``T^2 mean over B of KL(softmax(t / T) || softmax(s / T))`` (Hinton et al. 2015).

    Args:
        student, teacher: ``[B, 1 + n]``, scores of the positive and of each negative.
        temperature: T.
    """
    s, t = (to_fp32(x) / temperature for x in (student, teacher))
    kl = kl_div(s.log_softmax(1), t.log_softmax(1), reduction="batchmean", log_target=True)
    return temperature**2 * kl


@full_precision
def listed_scores(anchors: Tensor, listed: Tensor, normalise: bool = True) -> Tensor:
    """Cosine (or dot product) of each anchor ``[B, D]`` with its own texts ``[1 + n, B, D]``: ``[B, 1 + n]``."""
    a, x = to_fp32(anchors), to_fp32(listed)
    if normalise:
        a, x = (torch.nn.functional.normalize(v, dim=-1) for v in (a, x))
    return torch.einsum("bd,kbd->bk", a, x)
