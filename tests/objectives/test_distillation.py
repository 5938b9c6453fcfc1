from __future__ import annotations

import pytest
import torch

from embedlab.objectives.distillation import distillation
from embedlab.objectives.pair_nce import interleave, pair_nce


def vectors(seed: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("k1", [0.01, 0.1, 1.0])
def test_two_weighted_terms(k1: float) -> None:
    teacher, student = vectors(0), vectors(1)
    rows = interleave(teacher, student)
    terms = distillation(rows, rows, 0.05, k1)
    assert terms.contrast.item() == pytest.approx(k1 * pair_nce(rows, rows, 0.05).loss.item())
    assert terms.l1.item() == pytest.approx((1 - k1) * (teacher - student).abs().mean().item())


def test_a_perfect_student_has_no_distance_left() -> None:
    teacher = vectors(0)
    terms = distillation(interleave(teacher, teacher), interleave(teacher, teacher))
    assert terms.l1.item() == 0.0
    assert terms.diagnostics.positive_cosine.item() == pytest.approx(1.0)


def test_shards_of_a_gathered_batch_add_up() -> None:
    rows = interleave(vectors(0), vectors(1))
    whole = distillation(rows, rows, 0.05, 0.1)
    parts = [distillation(rows[i : i + 6], rows, 0.05, 0.1, offset=i) for i in (0, 6)]
    for name in ("contrast", "l1"):
        mean = torch.stack([getattr(p, name) for p in parts]).mean()
        torch.testing.assert_close(mean, getattr(whole, name))
