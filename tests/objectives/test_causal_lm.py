"""Next-token loss against values by hand."""

from __future__ import annotations

import math

import pytest
import torch

from embedlab.objectives.causal_lm import causal_lm, next_tokens


def test_labels_stop_at_padding_on_either_side() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [0, 5, 6, 7], [1, 2, 3, 4]])
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    expected = torch.tensor([[6, 7, -100, -100], [-100, 6, 7, -100], [2, 3, 4, -100]])
    assert torch.equal(next_tokens(ids, mask), expected)


def test_uniform_logits_cost_log_v() -> None:
    labels = torch.tensor([[1, 2, -100]])
    assert causal_lm(torch.zeros(1, 3, 8), labels).item() == pytest.approx(math.log(8))


def test_value_by_hand() -> None:
    logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [9.0, -9.0]]])
    labels = torch.tensor([[0, 0, -100]])
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1))) / 2
    assert causal_lm(logits, labels).item() == pytest.approx(expected, rel=1e-6)


def test_nothing_to_predict_is_zero_and_finite() -> None:
    logits = torch.randn(2, 3, 8, requires_grad=True)
    loss = causal_lm(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0


def test_half_precision_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(2, 50, 100, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(100, (2, 50), generator=torch.Generator().manual_seed(1))
    half = causal_lm(logits.bfloat16(), labels)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, causal_lm(logits, labels), atol=1e-2, rtol=0)
