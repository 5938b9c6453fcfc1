"""Which tokens are masked, how, and what the loss counts."""

from __future__ import annotations

import math

import pytest
import torch

from embedlab.objectives.masked_lm import IGNORED, mask_tokens, masked_lm

MASK, VOCAB = 4, 1000


def batch(rows: int = 64, length: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(10, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))
    maskable = torch.ones_like(ids, dtype=torch.bool)
    maskable[:, 0] = maskable[:, -1] = False
    maskable[: rows // 2, length // 2 :] = False
    return ids, maskable


@pytest.mark.parametrize("rule", ["bernoulli", "exact"])
def test_never_masks_special_tokens_or_padding(rule: str) -> None:
    ids, maskable = batch()
    masked = mask_tokens(ids, maskable, MASK, VOCAB, 0.15, rule)
    predicted = masked.positions[masked.labels != IGNORED]
    assert maskable.flatten()[predicted].all()
    untouched = torch.ones(ids.numel(), dtype=torch.bool)
    untouched[predicted] = False
    assert (masked.input_ids.flatten()[untouched] == ids.flatten()[untouched]).all()
    assert (masked.labels[masked.labels != IGNORED] == ids.flatten()[predicted]).all()


@pytest.mark.parametrize("rule", ["bernoulli", "exact"])
def test_fifteen_percent_of_which_80_10_10(rule: str) -> None:
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


def test_a_row_with_nothing_to_mask_is_left_alone() -> None:
    ids, maskable = batch(rows=2, length=20)
    maskable[:] = False
    for rule in ("bernoulli", "exact"):
        masked = mask_tokens(ids, maskable, MASK, VOCAB, 0.15, rule)
        assert (masked.labels == IGNORED).all()
        assert (masked.input_ids == ids).all()
        assert masked_lm(torch.zeros(len(masked.labels), VOCAB), masked.labels).item() == 0.0


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
    assert masked_lm(logits, labels).item() == pytest.approx(math.log(VOCAB), rel=1e-6)


def test_unknown_rule() -> None:
    ids, maskable = batch()
    with pytest.raises(ValueError, match="bernoulli"):
        mask_tokens(ids, maskable, MASK, VOCAB, rule="random")
