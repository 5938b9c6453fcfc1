"""CLS energy and sinks against values written out by hand, and a whole suite run."""

from __future__ import annotations

import pytest
import torch

from embedlab.evaluation.cls_energy import METRICS, _marks, measure

MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
PUNCTUATION = torch.tensor([[False, True, False, True, True], [True, False, False, False, False]])


def lengths(values: list[list[float]]) -> torch.Tensor:
    """States [B, L, 2] with these norms."""
    norms = torch.tensor(values)
    return torch.stack([0.6 * norms, 0.8 * norms], -1)


def measured(states: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    return measure(states, 2 * states, states, weights, MASK, *_marks(MASK, PUNCTUATION))


def uniform() -> torch.Tensor:
    real = MASK.float()
    return (real / real.sum(1, keepdim=True))[:, None, None].expand(2, 3, 5, 5)


def test_marks_are_disjoint_and_padding_is_none() -> None:
    first, last, punctuation = _marks(MASK, PUNCTUATION)
    assert first.tolist() == [[True, False, False, False, False], [True, False, False, False, False]]
    assert last.tolist() == [[False, False, False, True, False], [False, False, True, False, False]]
    assert punctuation.tolist() == [[False, True, False, False, False], [False] * 5], (
        "the last token stays SEP"
    )
    left = torch.tensor([[0, 0, 1, 1, 1]])
    first, last, _ = _marks(left, torch.zeros(1, 5, dtype=torch.bool))
    assert first[0].nonzero().item() == 2
    assert last[0].nonzero().item() == 4


def test_uniform_states_and_attention() -> None:
    found = measured(lengths([[2.0] * 5, [3.0] * 5]), uniform())
    for name in ("E1", "nE2", "E1_context", "E1_sum"):
        torch.testing.assert_close(found[name], torch.ones(2))
    torch.testing.assert_close(found["E2"], torch.tensor([1 / 4, 1 / 3]))
    torch.testing.assert_close(found["E3"], torch.tensor([1 / 4, 1 / 3]))
    torch.testing.assert_close(found["deficit"], torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(found["sink"], torch.tensor([1 / 4, 1 / 3]))


def test_by_hand() -> None:
    found = measured(lengths([[4.0, 1.0, 2.0, 3.0, 99.0], [1.0, 2.0, 3.0, 99.0, 99.0]]), uniform())
    torch.testing.assert_close(found["E1"], torch.tensor([4 / 2, 1 / 2.5]))
    torch.testing.assert_close(found["E2"], torch.tensor([4 / 10, 1 / 6]))
    torch.testing.assert_close(found["nE2"], torch.tensor([16 / 10, 3 / 6]))
    torch.testing.assert_close(found["E3"], torch.tensor([16 / 30, 1 / 14]))


def test_attention_mass_by_kind_adds_up_and_finds_the_sink() -> None:
    weights = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    weights = weights * MASK[:, None, None]
    weights[:, :, :, 2] += 5 * MASK[:, None, None, 2]
    weights = weights / weights.sum(-1, keepdim=True)
    found = measured(lengths([[1.0] * 5] * 2), weights)
    total = sum(found[f"A_{kind}"] for kind in ("CLS", "SEP", "punct", "other"))
    torch.testing.assert_close(total, torch.ones(2))
    # Token 2 is an ordinary one in the first sentence and the last one in the second.
    assert found["sink_is_SEP"].tolist() == [0.0, 1.0]
    assert found["sink_is_CLS"].tolist() == [0.0, 0.0]
    by_hand = weights[0, :, :4, 2].mean()
    assert found["sink"][0].item() == pytest.approx(by_hand.item())
    assert set(found) == set(METRICS)
