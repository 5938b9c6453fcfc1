"""A student of an encoder or an ensemble: contrast over interleaved teacher and student vectors, and L1.

JTCSE's own script is not released; this is the recipe of the same group's CACSE (specification 1.6).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import l1_loss

from embedlab.objectives.pair_nce import pair_nce
from embedlab.objectives.precision import full_precision, to_fp32
from embedlab.objectives.softmax import Contrast


class Distillation(NamedTuple):
    """The two weighted terms, whose sum is the loss, and what the contrast says of them."""

    contrast: Tensor
    """``k1 * X``"""
    l1: Tensor
    """``(1 - k1) * mean |student - teacher|``"""
    diagnostics: Contrast


@full_precision
def distillation(
    rows: Tensor,
    candidates: Tensor,
    tau: float = 0.05,
    k1: float = 0.01,
    *,
    offset: int = 0,
    row_hashes: Tensor | None = None,
    candidate_hashes: Tensor | None = None,
) -> Distillation:
    """``k1 * X(rows, candidates) + (1 - k1) * L1``.

    Args:
        rows: ``[2N, D]``, teacher 0, student 0, teacher 1, student 1, ... (`pair_nce.interleave`).
        candidates: the same of the whole gathered batch, ``[M, D]``.
        tau: temperature.
        k1: weight of the contrast; 0.01 for a twin teacher, 0.1 for the mixed ensemble.
        offset, row_hashes, candidate_hashes: as in `pair_nce`.
    """
    contrast = pair_nce(
        rows, candidates, tau, offset=offset, anchor_hashes=row_hashes, candidate_hashes=candidate_hashes
    )
    teacher, student = to_fp32(rows)[0::2], to_fp32(rows)[1::2]
    return Distillation(k1 * contrast.loss, (1 - k1) * l1_loss(student, teacher), contrast)
