"""The pairwise sigmoid against a plain loop; its pieces add up."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from embedlab.objectives.sigmoid import sigmoid

T, BIAS = torch.tensor(math.log(10.0), dtype=torch.float64), torch.tensor(-10.0, dtype=torch.float64)


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_equals_the_sum_written_out_and_its_gradients() -> None:
    a, p = vectors(4, 5), vectors(4, 5, seed=1)
    x, y = normalize(a, dim=-1), normalize(p, dim=-1)
    total = 0.0
    for i in range(4):
        for j in range(4):
            z = 1 if i == j else -1
            total -= math.log(1 / (1 + math.exp(-z * (10 * float(x[i] @ y[j]) - 10))))
    assert sigmoid(a, p, T, BIAS).loss.item() == pytest.approx(total / 4, rel=1e-12)
    inputs = [v.clone().requires_grad_() for v in (a, p, T, BIAS)]
    assert torch.autograd.gradcheck(lambda *v: sigmoid(*v).loss, inputs)


def test_orthogonal_vectors_at_the_start() -> None:
    width = 16
    loss = sigmoid(torch.eye(width)[:8], torch.eye(width)[8:], T.float(), BIAS.float()).loss
    assert loss.item() == pytest.approx(10.0004, abs=5e-5)


def test_pieces_of_the_candidates_and_ranks_add_up() -> None:
    a, p = vectors(6, 5), vectors(6, 5, seed=1)
    whole = sigmoid(a, p, T, BIAS).loss
    pieces = [sigmoid(a, p[k : k + 2], T, BIAS, offset=-k).loss for k in (0, 2, 4)]
    torch.testing.assert_close(sum(pieces), whole)
    ranks = [sigmoid(a[k : k + 3], p, T, BIAS, offset=k).loss for k in (0, 3)]
    torch.testing.assert_close(sum(ranks) / 2, whole)


def test_a_text_that_comes_again_is_no_term_but_the_own_positive_stays() -> None:
    a, p = vectors(3, 5), vectors(3, 5, seed=1)
    alone = sigmoid(a, p, T, BIAS, excluded=torch.ones(3, 3, dtype=torch.bool)).loss
    expected = torch.stack([sigmoid(a[i : i + 1], p[i : i + 1], T, BIAS).loss for i in range(3)]).mean()
    torch.testing.assert_close(alone, expected)
