"""How far the similarities within a batch are from given ones: relational distillation.

Squared difference of cosine matrices: similarity-preserving distillation (Tung and Mori 2019, equations 2 to 4, with
cosines for their products). Divergence of softmaxed rows: PKT (Passalis and Tefas 2018, equation 6) and CompRess
(Koohpayegani et al. 2020, equation 2).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import kl_div

from embedlab.objectives.precision import full_precision, unit


@full_precision
def cosines(rows: Tensor, candidates: Tensor) -> Tensor:
    """Cosine of every row ``[B, D]`` to every candidate ``[M, D]``: ``[B, M]``."""
    return unit(rows) @ unit(candidates).T


@full_precision
def squared_difference(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference of two matrices of cosines ``[B, M]``."""
    return (student - teacher).square().mean()


@full_precision
def row_divergence(student: Tensor, teacher: Tensor, tau: float, itself: Tensor) -> Tensor:
    """Mean over the rows of ``KL(softmax(teacher / tau) || softmax(student / tau))``.

    Args:
        student, teacher: cosines ``[B, M]``.
        tau: temperature.
        itself: bool ``[B, M]``, candidates that are left out: with a cosine of 1, a row itself would have nearly the
            whole softmax of both. A row without others counts as 0.
    """
    alone = itself.all(1, keepdim=True)
    # Not -inf, whose products with a probability of 0 are no numbers.
    least = -1e4 - 1 / tau  # below any cosine's
    log_q, log_p = ((x / tau).masked_fill(itself & ~alone, least).log_softmax(1) for x in (student, teacher))
    kl = kl_div(log_q, log_p, reduction="none", log_target=True).masked_fill(itself, 0.0)
    return kl.sum(1).mean()
