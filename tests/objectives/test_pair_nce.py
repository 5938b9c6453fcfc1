"""X(a, b), the contrast over interleaved views: invariants 10 to 15 of the specification."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from embedlab.objectives.pair_nce import interleave, pair_nce

TAU = 0.05


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(a: Tensor, b: Tensor, tau: float = TAU) -> float:
    a, b = normalize(a, dim=-1), normalize(b, dim=-1)
    total = 0.0
    for r in range(len(a)):
        weights = {c: math.exp(float(a[r] @ b[c]) / tau) for c in range(len(b)) if c != r}
        total -= math.log(weights[r ^ 1] / sum(weights.values()))
    return total / len(a)


def x(a: Tensor, b: Tensor, tau: float = TAU) -> float:
    return pair_nce(a, b, tau).loss.item()


def test_equals_the_sum_written_out() -> None:
    a, b = vectors(10, 7), vectors(10, 7, seed=1)
    assert x(a, b) == pytest.approx(by_hand(a, b), rel=1e-12)


def test_invariant_10_equal_vectors_give_the_logarithm_of_the_candidates() -> None:
    same = torch.ones(128, 8, dtype=torch.float64)
    assert x(same, same) == pytest.approx(4.844187, abs=5e-7)
    assert x(same, same) == pytest.approx(math.log(2 * 64 - 1), rel=1e-12)


def test_invariant_11_equal_views_of_orthogonal_sentences() -> None:
    views = torch.eye(64, dtype=torch.float64).repeat_interleave(2, 0)
    assert x(views, views) == pytest.approx(math.log1p((2 * 64 - 2) * math.exp(-20)), rel=1e-9)
    assert x(views, views) == pytest.approx(2.597e-7, rel=1e-3)


def test_invariant_12_one_tower_with_itself_and_the_direction_between_two() -> None:
    u, v = vectors(8, 6), vectors(8, 6, seed=1)
    assert x(u, u) == pytest.approx(by_hand(u, u), rel=1e-12)
    assert abs(x(u, v) - x(v, u)) > 1e-3


def test_invariant_13_order_of_views_and_sentences_is_nothing() -> None:
    u, v = vectors(8, 6), vectors(8, 6, seed=1)
    swapped = torch.arange(8) ^ 1
    assert x(u[swapped], v[swapped]) == pytest.approx(x(u, v), rel=1e-12)
    order = torch.stack([2 * (o := torch.tensor([2, 0, 3, 1])), 2 * o + 1], 1).flatten()
    assert x(u[order], v[order]) == pytest.approx(x(u, v), rel=1e-12)


def test_invariant_14_length_of_a_vector_is_nothing() -> None:
    u, v = vectors(8, 6).requires_grad_(), vectors(8, 6, seed=1).requires_grad_()
    scale = torch.logspace(-2, 2, 8, dtype=torch.float64)[:, None]
    assert x(scale * u, v) == pytest.approx(x(u, v), rel=1e-9)
    assert x(u, scale * v) == pytest.approx(x(u, v), rel=1e-9)
    for vector, gradient in zip((u, v), torch.autograd.grad(pair_nce(u, v, TAU).loss, (u, v)), strict=True):
        assert gradient.norm() > 0.1
        assert (vector * gradient).sum(1).abs().max() < 1e-12


def test_invariant_15_the_partner_is_the_label_and_the_same_row_never_counts() -> None:
    rows = torch.arange(8)
    assert torch.equal((rows ^ 1) ^ 1, rows)
    assert ((rows ^ 1) != rows).all()
    # One sentence: the partner is the only candidate left, whatever stands on the diagonal.
    a, b = vectors(2, 5), vectors(2, 5, seed=1)
    assert x(a, b) == 0.0
    assert x(a, a) == 0.0
    # The same row is the nearest possible candidate and has no weight.
    anchor = vectors(1, 5)
    others = vectors(5, 5, seed=2)
    one = torch.cat([anchor, others]).requires_grad_()
    fixed = torch.cat([anchor, others])
    loss = pair_nce(fixed[:1], one, TAU, offset=0).loss
    (gradient,) = torch.autograd.grad(loss, one)
    assert gradient[0].abs().max() == 0
    assert gradient[1:].abs().min() > 0
    assert math.isfinite(loss.item())


def test_a_wrong_interleave_shows() -> None:
    """Views stacked one after the other instead of interleaved make strangers partners."""
    first = vectors(16, 32)
    second = first + 0.05 * vectors(16, 32, seed=1)
    right, wrong = interleave(first, second), torch.cat([first, second])
    assert torch.equal(right[0::2], first)
    assert torch.equal(right[1::2], second)
    assert x(right, right) < 0.01
    assert x(wrong, wrong) > 10
    assert pair_nce(right, right, TAU).accuracy.item() == 1.0


def test_shards_of_a_gathered_batch_add_up() -> None:
    a, b = vectors(12, 6), vectors(12, 6, seed=1)
    parts = [pair_nce(a[i : i + 4], b, TAU, offset=i).loss for i in (0, 4, 8)]
    assert torch.stack(parts).mean().item() == pytest.approx(x(a, b), rel=1e-12)


def test_a_repeated_sentence_is_no_negative() -> None:
    u, v = vectors(8, 6), vectors(8, 6, seed=1)
    ids = torch.tensor([5, 5, 7, 7, 5, 5, 9, 9])
    masked = pair_nce(u, v, TAU, anchor_hashes=ids, candidate_hashes=ids).loss.item()
    a, b = normalize(u, dim=-1), normalize(v, dim=-1)
    total = 0.0
    for r in range(8):
        weights = {
            c: math.exp(float(a[r] @ b[c]) / TAU)
            for c in range(8)
            if c == r ^ 1 or (c != r and ids[c] != ids[r])
        }
        total -= math.log(weights[r ^ 1] / sum(weights.values()))
    assert masked == pytest.approx(total / 8, rel=1e-12)
    distinct = torch.arange(4).repeat_interleave(2)
    assert pair_nce(u, v, TAU, anchor_hashes=distinct, candidate_hashes=distinct).loss.item() == x(u, v)


def test_cosines_beside_the_loss() -> None:
    u, v = vectors(8, 6), vectors(8, 6, seed=1)
    cosines = normalize(u, dim=-1) @ normalize(v, dim=-1).T
    contrast = pair_nce(u, v, TAU)
    rows = torch.arange(8)
    own, partner = torch.eye(8, dtype=torch.bool), torch.eye(8, dtype=torch.bool)[rows ^ 1]
    assert contrast.positive_cosine.item() == pytest.approx(cosines[partner].mean().item())
    assert contrast.negative_cosine.item() == pytest.approx(cosines[~own & ~partner].mean().item())


def test_half_precision_vectors_give_an_fp32_loss() -> None:
    u = 1e3 * vectors(64, 32)
    for dtype in (torch.bfloat16, torch.float16):
        contrast = pair_nce(u.to(dtype), u.to(dtype), 0.01)
        assert contrast.loss.dtype == torch.float32
        assert math.isfinite(contrast.loss.item())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(
            pair_nce(u.float(), u.float(), TAU).loss, pair_nce(u.float(), u.float(), TAU).loss
        )
        assert pair_nce(u.float(), u.float(), TAU).loss.item() == pytest.approx(x(u, u), rel=1e-4)
