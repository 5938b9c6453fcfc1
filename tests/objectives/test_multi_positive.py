"""Several positives: a plain loop, its limits, and InfoNCE where there is one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from embedlab.objectives.info_nce import info_nce
from embedlab.objectives.multi_positive import multi_positive

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
ITSELF = torch.eye(6, dtype=torch.bool)


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(x: Tensor, labels: Tensor, tau: float) -> float:
    x, found = normalize(x, dim=-1), []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        positives = [j for j in others if labels[j] == labels[i]]
        total = sum(math.exp(float(x[i] @ x[j]) / tau) for j in others)
        if positives:
            logs = [math.log(math.exp(float(x[i] @ x[j]) / tau) / total) for j in positives]
            found.append(-sum(logs) / len(positives))
    return sum(found) / len(found)


def test_equals_the_sum_written_out_and_leaves_out_who_has_no_positive() -> None:
    x = vectors(6, 4).requires_grad_()
    found, count = multi_positive(x, x, LABELS, LABELS, 0.2, itself=ITSELF)
    assert found.loss.item() == pytest.approx(by_hand(x, LABELS, 0.2), rel=1e-12)
    assert count.item() == 5
    assert torch.autograd.gradcheck(
        lambda y: multi_positive(y, y, LABELS, LABELS, 0.2, itself=ITSELF)[0].loss, x
    )


def test_one_positive_is_info_nce() -> None:
    a, p, ids = vectors(5, 4), vectors(5, 4, seed=1), torch.arange(5)
    found, count = multi_positive(a, p, ids, ids, 0.1)
    expected = info_nce(a, p, 0.1)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.positive_cosine, expected.positive_cosine)
    torch.testing.assert_close(found.negative_cosine, expected.negative_cosine)
    assert found.accuracy == expected.accuracy
    assert count == 5


def test_its_least_value_is_the_logarithm_of_the_positives() -> None:
    x = torch.eye(2, dtype=torch.float64).repeat_interleave(4, 0)
    labels = torch.arange(2).repeat_interleave(4)
    loss = multi_positive(x, x, labels, labels, 0.01, itself=torch.eye(8, dtype=torch.bool))[0].loss
    assert loss.item() == pytest.approx(math.log(3), rel=1e-9)


@pytest.mark.parametrize("labels", [[0], [0, 1, 2]])
def test_no_positive_at_all_costs_nothing(labels: list[int]) -> None:
    x, ids = vectors(len(labels), 4).requires_grad_(), torch.tensor(labels)
    found, count = multi_positive(x, x, ids, ids, 0.1, itself=torch.eye(len(labels), dtype=torch.bool))
    found.loss.backward()
    assert found.loss.item() == count.item() == 0
    assert torch.isfinite(x.grad).all()


def test_texts_that_come_again_leave_the_denominator_as_in_info_nce() -> None:
    a, p, ids = vectors(5, 4), vectors(5, 4, seed=1), torch.arange(5)
    anchor, other = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([7, 0, 7, 8, 3])
    same = (anchor[:, None] == other) | (other[:, None] == other)
    found, count = multi_positive(a, p, ids, ids, 0.1, excluded=same)
    expected = info_nce(a, p, 0.1, anchor_hashes=anchor, candidate_hashes=other)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)
    assert count == 5
    everything = multi_positive(a, p, ids, ids, 0.1, excluded=torch.ones(5, 5, dtype=torch.bool))[0]
    assert everything.loss == 0
