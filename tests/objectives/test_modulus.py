"""The modulus function and the directional cross term: invariants 1 to 9 of the specification."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from embedlab.objectives.modulus import modulus_term, relative_difference


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(k: float, t: float) -> tuple[Tensor, Tensor]:
    """Two vectors with norm ratio k and cosine t."""
    p = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    q = k * torch.tensor([[t, math.sqrt(1 - t * t)]], dtype=torch.float64)
    return p, q


GRID = [(k, t) for k in (0.25, 0.9, 1.0, 1.1, 4.0) for t in (-1.0, -0.5, 0.0, 0.5, 0.99, 1.0)]


def test_invariant_01_zero_bounded_symmetric_and_free_of_scale() -> None:
    h, g = vectors(50, 8), vectors(50, 8, seed=1) * torch.logspace(-3, 3, 50, dtype=torch.float64)[:, None]
    assert torch.equal(relative_difference(h, h), torch.zeros(50, dtype=torch.float64))
    value = relative_difference(h, g)
    assert value.min() > 0
    assert value.max() <= 1
    torch.testing.assert_close(relative_difference(g, h), value)
    for a in (1e-3, 7.0, 1e4):
        torch.testing.assert_close(relative_difference(a * h, a * g), value)


@pytest.mark.parametrize(("k", "t"), GRID)
def test_invariant_02_closed_form(k: float, t: float) -> None:
    expected = math.sqrt(max(0.0, 1 + k * k - 2 * k * t)) / (1 + k)
    assert relative_difference(*pair(k, t)).item() == pytest.approx(expected, abs=1e-12)


def test_invariant_03_special_cases() -> None:
    for t in (-0.9, 0.0, 0.3, 0.8):
        value = relative_difference(*pair(1.0, t)).item()
        assert value == pytest.approx(math.sin(math.acos(t) / 2), abs=1e-12)
        assert value == pytest.approx(math.sqrt((1 - t) / 2), abs=1e-12)
    for k in (0.2, 1.0, 3.0):
        assert relative_difference(*pair(k, 1.0)).item() == pytest.approx(abs(1 - k) / (1 + k), abs=1e-12)
        assert relative_difference(*pair(k, -1.0)).item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("t", [-0.9, -0.2, 0.0, 0.6, 1.0])
def test_invariant_04_one_minimum_at_equal_norms(t: float) -> None:
    for k in (0.3, 0.7, 1.5, 3.0):
        ratio = torch.tensor(k, dtype=torch.float64, requires_grad=True)
        p, q = pair(1.0, t)
        value = relative_difference(p, ratio * q).sum()
        value.backward()
        assert ratio.grad is not None
        assert ratio.grad.item() * (k - 1) > 0, "falls below 1, rises above"
        assert relative_difference(*pair(1 / k, t)).item() == pytest.approx(value.item(), abs=1e-12)


def test_invariant_05_it_is_no_pure_norm_penalty() -> None:
    p, q = vectors(20, 6), vectors(20, 6, seed=3)
    assert relative_difference(normalize(p, dim=-1), normalize(q, dim=-1)).min() > 0.1


def test_invariant_06_zero_where_either_factor_is() -> None:
    u, v, p, q = (vectors(12, 8, seed=i) for i in range(4))
    parallel = v.clone()
    parallel[1::2] = 3 * u[0::2]
    assert modulus_term(u, parallel, p, q).item() == pytest.approx(0.0, abs=1e-15)
    equal = q.clone()
    equal[1::2] = p[0::2]
    assert modulus_term(u, v, p, equal).item() == 0.0
    assert modulus_term(u, v, p, q).item() > 0.1


def test_invariant_07_equals_the_loop_over_even_rows() -> None:
    u, v, p, q = (vectors(10, 6, seed=i).abs() for i in range(4))
    total = 0.0
    for i in range(0, 10, 2):
        c = float(u[i] @ v[i + 1] / (u[i].norm() * v[i + 1].norm()))
        total += -math.log(c) * float((p[i] - q[i + 1]).norm() / (p[i].norm() + q[i + 1].norm())) / 2
    assert modulus_term(u, v, p, q).item() == pytest.approx(total / 5, abs=1e-15)


def test_invariant_08_swapping_the_towers_changes_nothing() -> None:
    u, v, p, q = (vectors(10, 6, seed=i) for i in range(4))
    there = modulus_term(u, v, p, q) + modulus_term(v, u, q, p)
    back = modulus_term(v, u, q, p) + modulus_term(u, v, p, q)
    assert there.item() == back.item()


@pytest.mark.parametrize("clamp", ["range", "official"])
def test_invariant_09_a_negative_cosine_counts_as_the_floor_without_gradient(clamp: str) -> None:
    u, p, q = vectors(2, 6), vectors(2, 6, seed=1), vectors(2, 6, seed=2)
    v = torch.stack([vectors(6, seed=3), -u[0] + 0.1 * vectors(6, seed=4)])
    tensors = [x.clone().requires_grad_() for x in (u, v, p, q)]
    loss = modulus_term(*tensors, clamp=clamp)  # type: ignore[arg-type]
    half = relative_difference(p[:1], q[1:]).item() / 2
    assert loss.item() == pytest.approx(9.2103 * half, rel=1e-5)
    loss.backward()
    assert tensors[0].grad.abs().max() == 0  # type: ignore[union-attr]
    assert tensors[1].grad.abs().max() == 0  # type: ignore[union-attr]
    assert tensors[2].grad.abs().max() > 0  # type: ignore[union-attr]
    # Opposite poolers give the cap.
    assert modulus_term(u, v, p, -p.roll(1, 0)).item() == pytest.approx(9.2103 * 0.5 * 1.0, rel=1e-5)


def test_the_pole_of_the_official_rule_is_closed() -> None:
    """A cosine in [0, 1e-4): the official rule explodes, the default does not (specification, A7)."""
    p, q = vectors(2, 2), vectors(2, 2, seed=1)
    u = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    v = torch.tensor([[0.0, 1.0], [1e-9, 1.0]], dtype=torch.float64, requires_grad=True)
    (official,) = torch.autograd.grad(modulus_term(u, v, p, q, clamp="official"), v)
    (ours,) = torch.autograd.grad(modulus_term(u, v, p, q), v)
    assert official.abs().max() > 1e7
    assert ours.abs().max() == 0
    v = v.detach()
    v[1, 0] = 0
    assert modulus_term(u, v, p, q, clamp="official").item() == math.inf
    assert modulus_term(u, v, p, q).item() == pytest.approx(
        9.2103 / 2 * relative_difference(p[:1], q[1:]).item(), rel=1e-5
    )


def test_rounding_above_one_gives_no_negative_loss() -> None:
    u = vectors(512, 768).float()
    v = u.clone()
    v[1::2] = u[0::2]
    assert cosine_similarity(u[0::2], v[1::2]).max() > 1, "the case must occur"
    assert modulus_term(u, v, u, u + 1).item() >= 0


def test_scale_and_half_precision() -> None:
    u, v, p, q = (vectors(16, 8, seed=i).abs() for i in range(4))
    torch.testing.assert_close(modulus_term(u, v, p, q, scale=1.0), 2 * modulus_term(u, v, p, q))
    half = modulus_term(*(x.bfloat16() for x in (u, v, p, q)))
    assert half.dtype == torch.float32
    assert abs(half.item() - modulus_term(u, v, p, q).item()) < 1e-2


def test_equal_and_zero_vectors_have_finite_gradients() -> None:
    p = torch.zeros(2, 4, requires_grad=True)
    q = torch.ones(2, 4, requires_grad=True)
    (relative_difference(p, p) + relative_difference(q, q)).sum().backward()
    assert p.grad is not None
    assert torch.isfinite(p.grad).all()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()
