"""PCL's lists: the published case of equal cosines, plain loops, who is in a list, ranks, and where gradients go."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from embedlab.objectives.peer_contrast import list_divergence, peer_logits, positives_bce

TAU = 0.2


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(x: Tensor, y: Tensor) -> float:
    return float(torch.cosine_similarity(x, y, dim=0))


def test_equal_cosines() -> None:
    """9 positives and 63 others: each has 1/72."""
    ones = torch.ones(64, 4)
    logits = peer_logits(ones, ones.expand(9, -1, -1), ones, 0.05)
    assert logits.shape == (64, 73)
    assert positives_bce(logits, 9).item() == pytest.approx(0.698380, abs=1e-6)
    assert list_divergence(logits, logits).item() == 0


def plain(a: Tensor, positives: Tensor, others: Tensor, texts: list[int] | None = None) -> list[list[float]]:
    """The lists, by a loop; of texts that come again only the own positives."""
    lists = []
    for i in range(len(a)):
        mine = [cosine(a[i], p[i]) / TAU for p in positives]
        there = [j for j in range(len(others)) if j != i and (texts is None or texts[j] != texts[i])]
        lists.append(mine + [cosine(a[i], others[j]) / TAU for j in there])
    return lists


def softmax(row: list[float]) -> list[float]:
    total = sum(map(math.exp, row))
    return [math.exp(x) / total for x in row]


@pytest.mark.parametrize("texts", [None, [7, 8, 7, 9, 8]])
def test_both_losses_by_a_loop(texts: list[int] | None) -> None:
    a, p, c = normal(5, 6, seed=0), normal(3, 5, 6, seed=1), normal(5, 6, seed=2)
    b, q, d = normal(5, 6, seed=3), normal(3, 5, 6, seed=4), normal(5, 6, seed=5)
    hashes = None if texts is None else torch.tensor(texts)
    one, two = (
        peer_logits(x, y, z, TAU, anchor_hashes=hashes, other_hashes=hashes)
        for x, y, z in ((a, p, c), (b, q, d))
    )
    bce, divergence = 0.0, 0.0
    for first, second in zip(plain(a, p, c, texts), plain(b, q, d, texts), strict=True):
        u, v = softmax(first), softmax(second)
        terms = [math.log(1 + math.exp(x)) - (x if i < 3 else 0) for i, x in enumerate(u)]
        bce += sum(terms) / len(terms) / 5
        divergence += sum(x * (math.log(x) - math.log(y)) for x, y in zip(u, v, strict=True)) / len(u) / 5
    assert positives_bce(one, 3).item() == pytest.approx(bce, rel=1e-9)
    assert list_divergence(one, two).item() == pytest.approx(divergence, rel=1e-9)
    assert divergence > 0


def test_the_gradient_goes_to_both_lists_and_to_nothing_that_is_absent() -> None:
    a, b = (normal(4, 6, seed=s).requires_grad_() for s in (0, 1))
    p = normal(2, 4, 6, seed=2)
    texts = torch.tensor([1, 1, 2, 3])
    one, two = (peer_logits(x, p, x, TAU, anchor_hashes=texts, other_hashes=texts) for x in (a, b))
    for logits in (one, two):
        logits.retain_grad()
    (list_divergence(one, two) + positives_bce(one, 2)).backward()
    for x, logits in ((a, one), (b, two)):
        assert x.grad is not None
        assert logits.grad is not None
        assert torch.isfinite(x.grad).all()
        assert x.grad.abs().max() > 1e-4
        absent = logits == float("-inf")
        assert absent.sum() == 6
        assert (logits.grad[absent] == 0).all()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_score_their_rows_average_to_the_whole_batch(world: int) -> None:
    a, p, c = normal(8, 5, seed=0), normal(2, 8, 5, seed=1), normal(8, 5, seed=2)
    b = normal(8, 5, seed=3)
    texts = torch.tensor([1, 2, 3, 1, 4, 5, 6, 7])
    rows = 8 // world

    def losses(at: int, n: int) -> Tensor:
        own = slice(at, at + n)
        one, two = (
            peer_logits(x[own], p[:, own], c, TAU, offset=at, anchor_hashes=texts[own], other_hashes=texts)
            for x in (a, b)
        )
        return torch.stack([positives_bce(one, 2), list_divergence(one, two)])

    parts = torch.stack([losses(r * rows, rows) for r in range(world)])
    torch.testing.assert_close(parts.mean(0), losses(0, 8))
