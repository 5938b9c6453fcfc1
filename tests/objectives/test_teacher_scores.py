"""A teacher's scores: plain loops, what leaves them unmoved, and sentence-transformers' losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from embedlab.objectives.teacher_scores import listed_scores, margin_mse, score_kl

ST = pytest.importorskip("sentence_transformers.sentence_transformer.losses")


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_margins_equal_the_sum_written_out() -> None:
    s, t = vectors(3, 4), vectors(3, 4, seed=1)
    terms = [
        (float(s[i, 0] - s[i, k]) - float(t[i, 0] - t[i, k])) ** 2 for i in range(3) for k in range(1, 4)
    ]
    assert margin_mse(s, t).item() == pytest.approx(sum(terms) / 9, rel=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_divergence_equals_the_sum_written_out(temperature: float) -> None:
    s, t = vectors(3, 4), vectors(3, 4, seed=1)
    total = 0.0
    for i in range(3):
        p, q = (
            [
                math.exp(float(v) / temperature) / sum(math.exp(float(w) / temperature) for w in x[i])
                for v in x[i]
            ]
            for x in (t, s)
        )
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert score_kl(s, t, temperature).item() == pytest.approx(temperature**2 * total / 3, rel=1e-12)


@pytest.mark.parametrize("loss", [margin_mse, score_kl])
def test_nothing_at_equality_and_a_constant_a_row_is_nothing(loss) -> None:  # type: ignore[no-untyped-def]
    s, t = vectors(3, 4).requires_grad_(), vectors(3, 4, seed=1)
    assert loss(t, t).item() == pytest.approx(0, abs=1e-15)
    shift = vectors(3, 1, seed=2)
    torch.testing.assert_close(loss(s + shift, t - 2 * shift), loss(s, t))
    assert torch.autograd.gradcheck(lambda x: loss(x, t), s)
    torch.testing.assert_close(
        torch.stack([loss(s[i : i + 1], t[i : i + 1]) for i in range(3)]).mean(), loss(s, t)
    )


@pytest.mark.parametrize("negatives", [1, 3])
@pytest.mark.parametrize(("name", "ours"), [("MarginMSELoss", margin_mse), ("DistillKLDivLoss", score_kl)])
def test_equal_to_sentence_transformers(negatives: int, name: str, ours) -> None:  # type: ignore[no-untyped-def]
    x = vectors(2 + negatives, 5, 6)
    teacher = vectors(5, 1 + negatives, seed=1)
    theirs = getattr(ST, name)(torch.nn.Identity()).compute_loss_from_embeddings(list(x), teacher)
    torch.testing.assert_close(ours(listed_scores(x[0], x[1:], normalise=False), teacher), theirs)
