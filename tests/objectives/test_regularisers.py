"""Distances, VICReg and SIGReg: closed forms, collapse, and T13 of BEPA's specification."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from embedlab.objectives.regularisers import (
    cosine_distance,
    covariance_term,
    participation,
    sigreg,
    squared_distance,
    std,
    variance_term,
)


def normal(n: int = 512, d: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def directions(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_distances_of_known_vectors() -> None:
    x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert float(squared_distance(x, y)) == pytest.approx((1 + 1 + 0 + 1) / 4)
    assert float(cosine_distance(x, y)) == pytest.approx((1 + 0) / 2)


def test_t13_sigreg_wants_normal_vectors_not_unit_ones() -> None:
    z = normal()
    unit = torch.nn.functional.normalize(z, dim=-1)
    good, bad = sigreg(z, generator=directions()), sigreg(unit, generator=directions())
    assert 20 * float(good) < float(bad)
    collapsed = sigreg(torch.ones_like(z), generator=directions())
    assert 20 * float(good) < float(collapsed)
    assert 20 * float(good) < float(sigreg(3 * z, generator=directions()))


def test_sigreg_is_the_rule_written_out() -> None:
    """The trapezoid rule in float64 on the directions that are drawn, with the defaults of LeJEPA's code."""
    z = 0.7 * normal(9, 5)
    drawn = torch.randn(5, 256, generator=directions()).double()
    t = torch.linspace(0, 3, 17, dtype=torch.float64)
    total = 0.0
    for k in range(256):
        along = z.double() @ (drawn[:, k] / drawn[:, k].norm())
        phi = torch.exp(1j * along[:, None] * t).mean(0)
        window = torch.exp(-t * t / 2)
        y = (phi - window).abs() ** 2 * window
        total += 9 * 2 * float(((y[1:] + y[:-1]) / 2).sum()) * 3 / 16
    default = sigreg(z, generator=directions())
    assert float(default) == pytest.approx(total / 256, rel=1e-4)
    assert torch.equal(sigreg(z, 256, 17, 3.0, generator=directions()), default)


def test_sigreg_of_a_point_is_the_integral() -> None:
    """All rows 0: phi = 1, and N * integral over the line of (1 - exp(-t^2 / 2))^2 exp(-t^2 / 2), cut at 3."""
    n, t = 10, torch.linspace(0, 3, 100_001, dtype=torch.float64)
    w = (-t.square() / 2).exp()
    exact = 2 * n * float(torch.trapezoid((1 - w).square() * w, t))
    assert float(sigreg(torch.zeros(n, 4), slices=3)) == pytest.approx(exact, rel=2e-3)


def test_sigreg_brings_vectors_to_unit_variance() -> None:
    z = (0.1 * normal(256, 4)).requires_grad_()
    optimizer = torch.optim.Adam([z], lr=0.05)
    draw = directions()
    for _ in range(150):
        optimizer.zero_grad()
        sigreg(z, 64, generator=draw).backward()
        optimizer.step()
    assert 0.8 < float(z.detach().std(0).mean()) < 1.2


def test_variance_and_covariance_of_known_vectors() -> None:
    z = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
    # variances 2 and 8, covariance 4
    assert float(variance_term(z)) == 0
    assert float(variance_term(torch.ones(4, 3))) == pytest.approx(1 - math.sqrt(1e-4))
    assert float(variance_term(0.1 * z, eps=0.0)) == pytest.approx(
        ((1 - math.sqrt(0.02)) + (1 - math.sqrt(0.08))) / 2
    )
    assert float(covariance_term(z)) == pytest.approx(2 * 4**2 / 2)
    assert float(covariance_term(torch.tensor([[1.0, 1.0], [-1.0, 1.0]]))) == 0


def test_spread_and_participation_tell_collapse() -> None:
    z = normal(400, 16)
    assert float(std(z)) == pytest.approx(1, abs=0.02)
    assert float(std(torch.ones(8, 16))) == pytest.approx(0, abs=1e-3)
    assert float(participation(z)) > 14
    line = torch.linspace(0.5, 1.5, 40)[:, None] * torch.eye(16)[0] + torch.eye(16)[1]
    assert float(participation(line)) == pytest.approx(1, abs=0.05)
    few = normal(5, 16)
    assert 1 < float(participation(few)) <= 4
    # Of k equal eigenvalues the ratio is k: the corners of a cross-polytope.
    corners = torch.cat([torch.eye(6), -torch.eye(6)])
    assert float(participation(corners)) == pytest.approx(6, rel=1e-4)


def test_regularisers_are_in_full_precision_under_autocast() -> None:
    z = normal(64, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for value in (sigreg(z, 8), variance_term(z), covariance_term(z), squared_distance(z, 2 * z)):
            assert value.dtype == torch.float32
