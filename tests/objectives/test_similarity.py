"""Relational distillation against plain loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embedlab.objectives.similarity import cosines, row_divergence, squared_difference


def vectors(n: int, width: int, seed: int) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_sum(values: list[float]) -> float:
    most = max(values)
    return most + math.log(sum(math.exp(value - most) for value in values))


def divergence(student: Tensor, teacher: Tensor, tau: float, itself: Tensor) -> float:
    total = 0.0
    for i in range(len(student)):
        others = [j for j in range(student.shape[1]) if not itself[i, j]]
        log_p, log_q = (
            [float(x[i, j]) / tau - log_sum([float(x[i, k]) / tau for k in others]) for j in others]
            for x in (teacher, student)
        )
        total += sum(math.exp(a) * (a - b) for a, b in zip(log_p, log_q, strict=True))
    return total / len(student)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 6), st.integers(1, 9), st.sampled_from([1e-5, 0.05, 1.0]), st.integers(0, 99))
def test_the_terms_are_their_formulas(rows: int, candidates: int, tau: float, seed: int) -> None:
    a, b = vectors(rows, 5, seed), vectors(candidates, 5, seed + 1)
    student = cosines(a, b)
    expected = [[float(x @ y / x.norm() / y.norm()) for y in b] for x in a]
    torch.testing.assert_close(student, torch.tensor(expected, dtype=torch.float64))
    teacher = cosines(vectors(rows, 3, seed + 2), vectors(candidates, 3, seed + 3))
    mean = sum(float(s - t) ** 2 for s, t in zip(student.flatten(), teacher.flatten(), strict=True))
    assert float(squared_difference(student, teacher)) == pytest.approx(mean / student.numel())
    itself = torch.rand(rows, candidates, generator=torch.Generator().manual_seed(seed)) < 0.3
    expected_kl = divergence(student, teacher, tau, itself)
    assert float(row_divergence(student, teacher, tau, itself)) == pytest.approx(
        expected_kl, abs=1e-9, rel=1e-9
    )


def test_equal_matrices_are_no_distance_apart_and_a_lonely_row_has_finite_gradients() -> None:
    same = cosines(vectors(4, 5, 0), vectors(4, 5, 0)).requires_grad_()
    itself = torch.eye(4, dtype=torch.bool)
    itself[2] = True
    loss = row_divergence(same, same.detach(), 0.05, itself) + squared_difference(same, same.detach())
    assert loss.item() == pytest.approx(0, abs=1e-12)
    other = cosines(vectors(4, 5, 1), vectors(4, 5, 1))
    row_divergence(same, other, 0.05, itself).backward()
    assert same.grad is not None
    assert torch.isfinite(same.grad).all()
    assert not same.grad[itself].any()
    assert same.grad[0].any()


def test_what_is_left_out_has_no_weight_at_any_temperature() -> None:
    """Not where all others are far off: their cosines over a small temperature are below any constant."""
    student, teacher = torch.tensor([[1.0, -0.9, -0.8]]), torch.tensor([[1.0, -0.5, -0.6]])
    itself = torch.tensor([[True, False, False]])
    expected = divergence(student, teacher, 1e-5, itself)
    assert float(row_divergence(student, teacher, 1e-5, itself)) == pytest.approx(expected, rel=1e-4)
