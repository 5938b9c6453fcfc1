"""The modulus constraint of twin encoders (TNCSE, AAAI 2025: l_TN; JTCSE, arXiv 2505.02366: L_ICTM)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cosine_similarity

from embedlab.objectives.precision import full_precision, to_fp32

FLOOR = 1e-4
"""The cosine that stands for one that is not positive (the authors' constant); -log of it is 9.2103."""

Clamp = Literal["range", "official"]


@full_precision
def relative_difference(p: Tensor, q: Tensor) -> Tensor:
    """``||p - q|| / (||p|| + ||q||)`` of each row, in [0, 1]: ``[N, D]`` twice to ``[N]``.

    With ``k = ||q|| / ||p||`` and ``t = cos(p, q)`` it is ``sqrt(1 + k^2 - 2 k t) / (1 + k)``: 0 for equal
    vectors only, smallest at k = 1 for a given direction, and ``sqrt((1 - t) / 2)`` there, so that it is no
    pure norm penalty.
    """
    p, q = to_fp32(p), to_fp32(q)
    both = vector_norm(p, dim=-1) + vector_norm(q, dim=-1)
    return vector_norm(p - q, dim=-1) / both.clamp(min=torch.finfo(both.dtype).tiny)


@full_precision
def modulus_term(
    u: Tensor,
    v: Tensor,
    p: Tensor,
    q: Tensor,
    scale: float = 0.5,
    floor: float = FLOOR,
    clamp: Clamp = "range",
) -> Tensor:
    """``Y(u, v; p, q)``: the mean over sentences i of ``-log cos(u_2i, v_2i+1) * l(p_2i, q_2i+1) * scale``.

    Args:
        u, v: ``[2N, D]`` interleaved views; vectors of tower 1 and of tower 2, whose direction counts.
        p, q: ``[2N, D]``; the vectors of the same rows whose modulus counts (pooler outputs).
        scale: 1/2 in the authors' code, 1 in the formula that is printed for TNCSE.
        floor: the least cosine; there is no gradient to u and v below it.
        clamp: ``range`` holds the cosine in [floor, 1]; ``official`` replaces a negative one by ``floor`` and
            leaves the rest, so that the loss has a pole at 0 and can be negative by rounding above 1.

    Returns:
        A scalar. L_ICTM is ``modulus_term(u, v, p, q) + modulus_term(v, u, q, p)``.
    """
    cosine = cosine_similarity(to_fp32(u)[0::2], to_fp32(v)[1::2], dim=-1)
    if clamp == "range":
        cosine = cosine.clamp(floor, 1.0)
    else:
        cosine = torch.where(cosine < 0, floor, cosine)
    return (-cosine.log() * relative_difference(p[0::2], q[1::2])).mean() * scale
