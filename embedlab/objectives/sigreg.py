"""SIGReg (LeJEPA, arXiv 2511.08544): vectors are held to a standard normal law, one direction at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from embedlab.objectives.precision import full_precision


@full_precision
def sigreg(
    z: Tensor,
    slices: int = 256,
    points: int = 17,
    t_max: float = 3.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Mean over random unit directions of the Epps-Pulley statistic of the projected rows.

    ``N * integral |phi(t) - exp(-t^2 / 2)|^2 exp(-t^2 / 2) dt`` with the empirical characteristic function phi,
    by the trapezoid rule on [0, t_max], doubled for symmetry.

    Args:
        z: ``[N, D]``, **not** normalised: a projection of unit rows has the standard deviation 1 / sqrt(D), which no
            direction can bring to 1 (the authors of BEPA normalise, which is a defect).
        slices: directions, drawn anew each time.
        points: of the rule.
        t_max: its upper end.
        generator: of the directions; the device's default when None (needed inside a CUDA graph).
    """
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    directions = torch.randn(z.shape[1], slices, device=z.device, dtype=z.dtype, generator=generator)
    projected = z @ torch.nn.functional.normalize(directions, dim=0)
    t = torch.linspace(0, t_max, points, device=z.device, dtype=z.dtype)
    normal = (-t.square() / 2).exp()
    phase = projected.unsqueeze(-1) * t  # [N, slices, points]
    gap = (phase.cos().mean(0) - normal).square() + phase.sin().mean(0).square()
    return 2 * len(z) * torch.trapezoid(gap * normal, t).mean()
