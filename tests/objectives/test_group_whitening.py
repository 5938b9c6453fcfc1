"""Shuffled group whitening: unit covariance, its limits, places that are kept, a gradient at equal eigenvalues."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embedlab.objectives.group_whitening import group_whitening, inverse_root


def rows(n: int, width: int, seed: int = 0) -> Tensor:
    """Features with covariances of their own, away from 0."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=draw, dtype=torch.float64)
    return torch.randn(n, width, generator=draw, dtype=torch.float64) @ mix + 3


def order(width: int, seed: int = 1) -> Tensor:
    return torch.randperm(width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("groups", [1, 3, 4, 12])
def test_each_group_has_unit_covariance(groups: int) -> None:
    x, places = rows(40, 12), order(12)
    y = group_whitening(x, places, groups, 0.0)[:, places].view(40, groups, -1)
    torch.testing.assert_close(y.mean(0), torch.zeros_like(y[0]), atol=1e-9, rtol=0)
    for g in range(groups):
        unit = torch.eye(12 // groups, dtype=y.dtype)
        torch.testing.assert_close(y[:, g].T @ y[:, g] / 40, unit, atol=1e-5, rtol=0)
    single = group_whitening(x.float(), places, groups, 0.0)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), group_whitening(x, places, groups, 0.0), atol=1e-2, rtol=1e-2)


def test_one_group_is_zca_in_any_order() -> None:
    x = rows(30, 5)
    centred = x - x.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred / 30 + 0.1 * torch.eye(5))
    expected = centred @ (vectors @ torch.diag(values**-0.5) @ vectors.T)
    for places in (torch.arange(5), order(5)):
        torch.testing.assert_close(group_whitening(x, places, 1, 0.1), expected)


def test_a_feature_comes_back_to_its_place() -> None:
    x, places = rows(200, 12), order(12)
    y = group_whitening(x, places, 4, 0.0)
    together = torch.corrcoef(torch.cat([x, y], 1).T)[:12, 12:]
    assert (together.diagonal() > 0.1).all()
    by_hand = torch.empty_like(y)
    for g in range(4):
        own = places[3 * g : 3 * g + 3]
        by_hand[:, own] = group_whitening(x[:, own], torch.arange(3), 1, 0.0)
    torch.testing.assert_close(y, by_hand)


def test_the_gradient_is_that_of_differences() -> None:
    x = rows(9, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: group_whitening(v, order(6), 2, 1e-3), (x,))
    square = rows(5, 3)
    assert torch.autograd.gradcheck(
        lambda v: inverse_root(v @ v.mT, 1e-2), (square.T.contiguous().requires_grad_(),)
    )


def test_equal_eigenvalues_and_none_have_a_gradient() -> None:
    for matrix in (torch.eye(3), torch.zeros(3, 3), torch.diag(torch.tensor([2.0, 2.0, 0.0]))):
        s = matrix.clone().requires_grad_()
        inverse_root(s, 1e-5)[0, 1].backward()
        assert s.grad is not None
        assert torch.isfinite(s.grad).all()
    s = torch.eye(3, dtype=torch.float64).requires_grad_()
    inverse_root(s, 0.0)[0, 0].backward()
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[0, 0] = -0.5  # of s^(-1/2) at 1
    torch.testing.assert_close(s.grad, expected)
