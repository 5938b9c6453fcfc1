"""The sum over first columns: sentence-transformers' loss, the whole width alone, and who gets a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from embedlab.objectives.cosent import cosine, ranking
from embedlab.objectives.info_nce import info_nce
from embedlab.objectives.matryoshka import nested

DIMS, WEIGHTS = (8, 4, 2), (1.0, 0.5, 2.0)


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_equals_the_sum_of_the_objective_of_cut_vectors() -> None:
    a, p = vectors(5, 8), vectors(5, 8, seed=1)
    found = nested(lambda d: info_nce(a[:, :d], p[:, :d], 0.1), DIMS, WEIGHTS)
    expected = sum(w * info_nce(a[:, :d], p[:, :d], 0.1).loss for d, w in zip(DIMS, WEIGHTS, strict=True))
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.positive_cosine, info_nce(a, p, 0.1).positive_cosine)


def test_the_whole_width_alone_is_the_objective_and_columns_past_the_most_get_nothing() -> None:
    a, p = vectors(5, 8).requires_grad_(), vectors(5, 8, seed=1)
    assert nested(lambda d: info_nce(a[:, :d], p[:, :d], 0.1), (8,), (1.0,)).loss == info_nce(a, p, 0.1).loss
    nested(lambda d: info_nce(a[:, :d], p[:, :d], 0.1), (4, 2), (1.0, 1.0)).loss.backward()
    assert a.grad[:, 4:].abs().max() == 0
    assert (a.grad[:, :4].abs() > 0).all()


def test_equal_to_sentence_transformers() -> None:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    a, b, scores = vectors(6, 8), vectors(6, 8, seed=1), vectors(6, seed=2)

    class Model(nn.Module):
        def get_embedding_dimension(self) -> int:
            return 8

        get_sentence_embedding_dimension = get_embedding_dimension

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"sentence_embedding": features["x"]}

    model = Model()
    theirs = losses.MatryoshkaLoss(model, losses.CoSENTLoss(model), list(DIMS), list(WEIGHTS))
    expected = theirs([{"x": a}, {"x": b}], scores)
    found = nested(lambda d: ranking(cosine(a[:, :d], b[:, :d]), scores), DIMS, WEIGHTS)
    torch.testing.assert_close(found, expected)


def test_of_a_plain_tensor_too() -> None:
    assert nested(lambda d: torch.tensor(float(d)), (3, 1), (1.0, 10.0)).item() == 13.0
