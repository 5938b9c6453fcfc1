"""Accuracy@1 of translations against cases that can be counted by hand."""

from __future__ import annotations

import pytest
import torch

from embedlab.evaluation import bitext
from embedlab.evaluation.bitext import bitext_accuracy


def test_an_identity_is_found_whole_and_a_rotation_of_rows_not_at_all() -> None:
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    assert bitext_accuracy(x, 3.0 * x) == {"forward": 100.0, "backward": 100.0, "mean": 100.0}
    assert bitext_accuracy(x, x.roll(1, dims=0)) == {"forward": 0.0, "backward": 0.0, "mean": 0.0}


def test_directions_are_told_apart() -> None:
    """Both sources are nearest to target 0; each target is nearest to its own source."""
    source = torch.tensor([[1.0, 0.0], [0.8, 0.6]])
    target = torch.tensor([[1.0, 0.1], [-0.1, 1.0]])
    assert bitext_accuracy(source, target) == {"forward": 50.0, "backward": 100.0, "mean": 75.0}
    assert bitext_accuracy(target, source) == {"forward": 100.0, "backward": 50.0, "mean": 75.0}


def test_a_collapsed_encoder_scores_chance() -> None:
    assert bitext_accuracy(torch.ones(20, 4), torch.ones(20, 4))["mean"] == 5.0
    assert bitext_accuracy(torch.zeros(20, 4), torch.zeros(20, 4))["mean"] == 5.0


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(37, 8, generator=generator)
    y = x + 0.7 * torch.randn(37, 8, generator=generator)
    whole = bitext_accuracy(x.numpy(), y.numpy())
    assert 0 < whole["mean"] < 100
    monkeypatch.setattr(bitext, "_SCORES_AT_ONCE", 100)
    assert bitext_accuracy(x, y) == whole


def test_uneven_sides_are_refused() -> None:
    with pytest.raises(ValueError, match=r"source \(3, 2\) and target \(4, 2\)"):
        bitext_accuracy(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(ValueError, match="n > 0"):
        bitext_accuracy(torch.ones(0, 2), torch.ones(0, 2))
