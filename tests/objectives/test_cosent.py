"""CoSENT and AnglE's angle against plain loops, their limits, and sentence-transformers' losses."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from embedlab.objectives.cosent import angle_similarity, cosine, ranking

ST = pytest.importorskip("sentence_transformers.sentence_transformer.losses")


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(s: Tensor, y: Tensor, scale: float) -> float:
    total = 1.0
    for i in range(len(s)):
        for j in range(len(s)):
            if y[i] < y[j]:
                total += math.exp(scale * float(s[i].detach() - s[j].detach()))
    return math.log(total)


SCORES = torch.tensor([0.1, 0.9, 0.9, 0.3, 0.0, 0.5], dtype=torch.float64)


def test_equals_the_sum_written_out_and_its_gradient() -> None:
    s = vectors(6).tanh().requires_grad_()
    assert ranking(s, SCORES, 5.0).item() == pytest.approx(by_hand(s, SCORES, 5.0), rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: ranking(x, SCORES, 3.0), s)


def test_only_differences_and_order_count() -> None:
    s = vectors(6).tanh()
    expected = ranking(s, SCORES)
    torch.testing.assert_close(ranking(s + 0.3, SCORES), expected)
    torch.testing.assert_close(ranking(s, SCORES.exp() * 7 - 2), expected)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    torch.testing.assert_close(ranking(s[order], SCORES[order]), expected)


def test_limits() -> None:
    s = vectors(6).tanh()
    assert ranking(s, torch.ones(6)).item() == 0.0
    assert ranking(s[:1], SCORES[:1]).item() == 0.0
    ordered = sum(a < b for a in SCORES.tolist() for b in SCORES.tolist())
    assert ranking(torch.ones(6), SCORES).item() == pytest.approx(math.log(1 + ordered), rel=1e-6)
    perfect = SCORES * 100
    assert ranking(perfect, SCORES).item() < 1e-6
    assert ranking(-perfect, SCORES).item() > 1000


def test_finite_and_in_fp32_under_autocast() -> None:
    x = (1e3 * vectors(8, 16)).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = ranking(cosine(x, x.flip(0)), torch.arange(8.0), 100.0)
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("name", ["CoSENTLoss", "AnglELoss"])
def test_equal_to_sentence_transformers(name: str) -> None:
    first, second = vectors(6, 8), vectors(6, 8, seed=1)
    theirs = getattr(ST, name)(torch.nn.Identity()).compute_loss_from_embeddings([first, second], SCORES)
    ours = ranking({"CoSENTLoss": cosine, "AnglELoss": angle_similarity}[name](first, second), SCORES)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("width", [1, 2, 7, 8])
def test_the_angle_is_that_of_complex_numbers(width: int) -> None:
    x, y = vectors(5, width), vectors(5, width, seed=1)
    half = (width + 1) // 2
    for i in range(5):
        a = [*x[i].tolist(), 0.0][:half] + [*x[i].tolist(), 0.0][half : 2 * half]
        c = [*y[i].tolist(), 0.0][:half] + [*y[i].tolist(), 0.0][half : 2 * half]
        products = [complex(a[k], a[k + half]) * complex(c[k], -c[k + half]) for k in range(half)]
        total = sum(z.real + z.imag for z in products)
        expected = abs(total) / float(x[i].norm() * y[i].norm())
        assert angle_similarity(x, y)[i].item() == pytest.approx(expected, rel=1e-12)
    x.requires_grad_()
    assert torch.autograd.gradcheck(angle_similarity, (x, y))


def test_what_the_angle_takes_for_similar() -> None:
    x, y = vectors(4, 6), vectors(4, 6, seed=1)
    torch.testing.assert_close(angle_similarity(x, x), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(angle_similarity(x, -x), torch.ones(4, dtype=torch.float64))
    assert (angle_similarity(x, y) - angle_similarity(y, x)).abs().max() > 0.01
    a, b = x.chunk(2, 1)
    turned = torch.cat([b, -a], 1)
    found = (cosine(x, y) + cosine(turned, y)).abs()
    torch.testing.assert_close(angle_similarity(x, y), found)
    best = angle_similarity(x, x + turned)
    torch.testing.assert_close(best, torch.full_like(best, math.sqrt(2)))


def test_more_pairs_in_the_wrong_order_cost_more() -> None:
    s = torch.linspace(0, 1, 6)
    losses = [ranking(s, torch.roll(torch.arange(6.0), k)).item() for k in range(4)]
    assert all(a < b for a, b in pairwise(losses))
