"""Poolings that read marks: the right token on either padding side, and what they make of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.pooling import build_pooling, pooling_config
from embedlab.pooling.marked import up_to

MARKS = {"rep1": 3, "rep2": 0}
LENGTHS = (9, 6, 4)
INFO: Any = SimpleNamespace(width=5, inner_width=5, layers=2, kind="decoder")
TWO_STAGES = Template('"{sentence}" means something{rep1}, it can be summarized as{rep2}', "text")
NAMES = ["rep1", "rep2", "rep_mean", "rep_concat"]


def _padded(side: str, extra: int = 2) -> tuple[Tensor, Tensor]:
    """Rows of LENGTHS real tokens whose first feature is the distance from the row's last token."""
    width = max(LENGTHS) + extra
    hidden = torch.full((len(LENGTHS), width, 5), float("nan"))
    mask = torch.zeros(len(LENGTHS), width, dtype=torch.long)
    for i, n in enumerate(LENGTHS):
        at = slice(width - n, width) if side == "left" else slice(0, n)
        values = torch.randn(n, 5, generator=torch.Generator().manual_seed(i))
        values[:, 0] = torch.arange(n).flip(0)
        hidden[i, at], mask[i, at] = values, 1
    return hidden, mask


@pytest.mark.parametrize("name", NAMES)
def test_the_same_for_any_padding(name: str) -> None:
    pooling = build_pooling(name, INFO)
    wanted = pooling((_padded("right", 0)[0],), _padded("right", 0)[1], MARKS)
    assert wanted.shape == (3, pooling.dim)
    for side, extra in (("left", 0), ("left", 3), ("right", 5)):
        hidden, mask = _padded(side, extra)
        torch.testing.assert_close(pooling((hidden,), mask, MARKS), wanted)


@pytest.mark.parametrize(("name", "distance"), [("rep1", 3.0), ("rep2", 0.0)])
def test_reads_its_mark(name: str, distance: float) -> None:
    hidden, mask = _padded("left")
    assert build_pooling(name, INFO)((hidden,), mask, MARKS)[:, 0].tolist() == [distance] * 3


def test_mean_and_concat_are_of_unit_vectors() -> None:
    hidden, mask = _padded("right")
    rep1, rep2, mean, concat = (build_pooling(n, INFO)((hidden,), mask, MARKS) for n in NAMES)
    unit1, unit2 = (r / r.norm(dim=1, keepdim=True) for r in (rep1, rep2))
    torch.testing.assert_close(mean, (unit1 + unit2) / 2)
    assert concat.shape == (3, 10)
    between = cosine_similarity(concat[:1], concat[1:2])
    apart = [cosine_similarity(r[:1], r[1:2]) for r in (rep1, rep2)]
    torch.testing.assert_close(between, (apart[0] + apart[1]) / 2)


@pytest.mark.parametrize("side", ["left", "right"])
def test_mask_up_to_a_mark(side: str) -> None:
    _, mask = _padded(side)
    before = mask.clone()
    kept = up_to(mask, MARKS, "rep1")
    assert kept.sum(1).tolist() == [n - 3 for n in LENGTHS]
    assert (kept <= mask).all()
    assert torch.equal(mask, before)
    assert torch.equal(up_to(mask, MARKS, "rep2"), mask)
    shifts = torch.arange(mask.shape[1]) * kept
    firsts = torch.arange(mask.shape[1]) * mask
    assert torch.equal(shifts.max(1).values, firsts.max(1).values - 3)


@pytest.mark.parametrize("name", NAMES)
def test_needs_its_marks(name: str) -> None:
    config = pooling_config(name)
    assert config.check(INFO, TWO_STAGES, "csesfp") == []
    for template in (None, Template('"{sentence}" means something', "text")):
        with pytest.raises(UserError, match=rf"pooling={name}.*template=eol_sum"):
            config.check(INFO, template, "csesfp")


def test_warns_on_an_encoder() -> None:
    encoder: Any = SimpleNamespace(**{**vars(INFO), "kind": "encoder"})
    (warning,) = pooling_config("rep2").check(encoder, TWO_STAGES, "simcse")
    assert "pooling=rep2" in warning
