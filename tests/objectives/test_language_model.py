"""Which tokens are masked, how, and what the loss counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from embedlab.objectives.language_model import (
    IGNORED,
    mask_tokens,
    next_tokens,
    token_accuracy,
    token_cross_entropy,
)

MASK, VOCAB = 4, 1000


def batch(rows: int = 64, length: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(10, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))
    maskable = torch.ones_like(ids, dtype=torch.bool)
    maskable[:, 0] = maskable[:, -1] = False
    maskable[: rows // 2, length // 2 :] = False
    return ids, maskable


@pytest.mark.parametrize("rule", ["bernoulli", "exact"])
def test_never_masks_special_tokens_or_padding(rule: Any) -> None:
    ids, maskable = batch()
    masked = mask_tokens(ids, maskable, MASK, VOCAB, 0.15, rule)
    predicted = masked.positions[masked.labels != IGNORED]
    assert maskable.flatten()[predicted].all()
    untouched = torch.ones(ids.numel(), dtype=torch.bool)
    untouched[predicted] = False
    assert (masked.input_ids.flatten()[untouched] == ids.flatten()[untouched]).all()
    assert (masked.labels[masked.labels != IGNORED] == ids.flatten()[predicted]).all()


@pytest.mark.parametrize("rule", ["bernoulli", "exact"])
def test_fifteen_percent_of_which_80_10_10(rule: Any) -> None:
    torch.manual_seed(0)
    ids, maskable = batch(512)
    masked = mask_tokens(ids, maskable, MASK, VOCAB, 0.15, rule)
    predicted = masked.positions[masked.labels != IGNORED]
    assert len(predicted) / maskable.sum() == pytest.approx(0.15, abs=0.01)
    new, old = masked.input_ids.flatten()[predicted], ids.flatten()[predicted]
    assert (new == MASK).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (new == old).float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_exact_count_in_every_row() -> None:
    ids, maskable = batch(rows=8, length=40)
    masked = mask_tokens(ids, maskable, MASK, VOCAB, 0.15, "exact")
    predicted = masked.positions[masked.labels != IGNORED]
    per_row = torch.bincount(predicted // 40, minlength=8)
    expected = (maskable.sum(1) * 0.15).floor().clamp(min=1).long()
    assert per_row.tolist() == expected.tolist()


@pytest.mark.parametrize("length", [100, 300, 400])
def test_every_exact_share_has_its_labels(length: int) -> None:
    """Whole numbers of tokens, at which fp32 and fp64 round to different sides."""
    ids = torch.full((3, length), 10)
    for share in (percent / 100 for percent in range(1, 100)):
        masked = mask_tokens(ids, torch.ones_like(ids, dtype=torch.bool), MASK, VOCAB, share, "exact")
        predicted = masked.positions[masked.labels != IGNORED]
        most = max(1, math.floor(length * share))
        assert torch.bincount(predicted // length, minlength=3).tolist() == [most] * 3, share
        assert set((masked.input_ids != ids).flatten().nonzero().flatten().tolist()) <= set(
            predicted.tolist()
        )


def test_a_row_with_nothing_to_mask_is_left_alone() -> None:
    ids, maskable = batch(rows=2, length=20)
    maskable[:] = False
    rules: tuple[Any, ...] = ("bernoulli", "exact")
    for rule in rules:
        masked = mask_tokens(ids, maskable, MASK, VOCAB, 0.15, rule)
        assert (masked.labels == IGNORED).all()
        assert (masked.input_ids == ids).all()
        assert token_cross_entropy(torch.zeros(len(masked.labels), VOCAB), masked.labels).item() == 0.0


def test_draws_differ_and_follow_the_generator() -> None:
    ids, maskable = batch()
    one = mask_tokens(ids, maskable, MASK, VOCAB, generator=torch.Generator().manual_seed(1))
    again = mask_tokens(ids, maskable, MASK, VOCAB, generator=torch.Generator().manual_seed(1))
    other = mask_tokens(ids, maskable, MASK, VOCAB, generator=torch.Generator().manual_seed(2))
    assert (one.input_ids == again.input_ids).all()
    assert (one.input_ids != other.input_ids).any()


def test_shapes_do_not_depend_on_the_draw() -> None:
    ids, maskable = batch()
    shapes = {tuple(mask_tokens(ids, maskable, MASK, VOCAB).positions.shape) for _ in range(8)}
    assert len(shapes) == 1


def test_loss_is_the_mean_in_nats_over_the_labels() -> None:
    logits = torch.zeros(5, VOCAB, dtype=torch.bfloat16)
    labels = torch.tensor([1, 2, IGNORED, 3, IGNORED])
    assert token_cross_entropy(logits, labels).item() == pytest.approx(math.log(VOCAB), rel=1e-6)


def test_labels_stop_at_padding_on_either_side() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [0, 5, 6, 7], [1, 2, 3, 4]])
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    expected = torch.tensor([[6, 7, -100, -100], [-100, 6, 7, -100], [2, 3, 4, -100]])
    assert torch.equal(next_tokens(ids, mask), expected)


def test_uniform_logits_cost_log_v() -> None:
    labels = torch.tensor([[1, 2, -100]])
    assert token_cross_entropy(torch.zeros(1, 3, 8), labels).item() == pytest.approx(math.log(8))


def test_value_by_hand() -> None:
    logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [9.0, -9.0]]])
    labels = torch.tensor([[0, 0, -100]])
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1))) / 2
    assert token_cross_entropy(logits, labels).item() == pytest.approx(expected, rel=1e-6)


def test_nothing_to_predict_is_zero_and_finite() -> None:
    logits = torch.randn(2, 3, 8, requires_grad=True)
    loss = token_cross_entropy(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0


def test_accuracy_is_the_share_of_the_labels() -> None:
    logits = torch.eye(4).expand(2, 4, 4)
    labels = torch.tensor([[0, 1, 0, IGNORED], [IGNORED, IGNORED, IGNORED, 3]])
    assert token_accuracy(logits, labels).item() == pytest.approx(3 / 4)
    assert token_accuracy(logits, torch.full((2, 4), IGNORED)).item() == 0


def test_half_precision_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(2, 50, 100, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(100, (2, 50), generator=torch.Generator().manual_seed(1))
    half = token_cross_entropy(logits.bfloat16(), labels)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, token_cross_entropy(logits, labels), atol=1e-2, rtol=0)
