"""sentence-transformers' pooling modes and dense layers, token by token in float64; its own code in tests/encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from embedlab.config.backbone import BackboneInfo
from embedlab.pooling import build_pooling
from embedlab.pooling.base import Pooling

WIDTH, LENGTHS = 6, (1, 2, 5, 0)
INFO = BackboneInfo("encoder", 3, WIDTH, 64, True, 0.1, "bert", True)
MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda x: x[0],
    "lasttoken": lambda x: x[-1],
    "max": lambda x: x.amax(0),
    "mean": lambda x: sum(x) / len(x),
    "mean_sqrt_len_tokens": lambda x: sum(x) / len(x) ** 0.5,
    "weightedmean": lambda x: sum(i * row for i, row in enumerate(x, 1)) / sum(range(1, len(x) + 1)),
}


def build(**settings: Any) -> Pooling:
    pooling = build_pooling({"name": "modules", **settings}, INFO).eval()
    torch.manual_seed(1)
    for p in pooling.parameters():
        p.data = torch.randn_like(p)
    return pooling


def states(left: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rows, and the same in one batch with NaN in the padding, and its mask."""
    torch.manual_seed(0)
    rows = [torch.randn(n, WIDTH, dtype=torch.float64) - 2 for n in LENGTHS]
    hidden = torch.full((len(rows), 7, WIDTH), torch.nan, dtype=torch.float64)
    mask = torch.zeros(len(rows), 7, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(7 - len(row), 7) if left else slice(0, len(row))
        hidden[i, at], mask[i, at] = row, 1
    return rows, hidden, mask


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_its_definition(mode: str, left: bool) -> None:
    rows, hidden, mask = states(left)
    found = build(modes=[mode])((hidden,), mask, {})
    torch.testing.assert_close(found[:-1], torch.stack([MODES[mode](row) for row in rows[:-1]]))
    if mode not in ("cls", "lasttoken"):
        assert found[-1].abs().sum() == 0, "where no token is left"


def test_modes_stand_side_by_side_before_what_follows() -> None:
    _, hidden, mask = states(left=False)
    hidden, mask = hidden[:-1], mask[:-1]
    both = torch.cat([build(modes=[mode])((hidden,), mask, {}) for mode in ("max", "cls")], 1)
    assert torch.equal(build(modes=["max", "cls"])((hidden,), mask, {}), both)
    pooling = build(
        modes=["max", "cls"],
        head=[
            {"kind": "dense", "out": 5, "activation": "ReLU"},
            {"kind": "dense", "out": 5, "bias": False, "residual": True},
            {"kind": "dense", "out": 3, "activation": "Identity", "residual": True},
            {"kind": "layer_norm"},
            {"kind": "normalize"},
        ],
    ).double()
    one, two, three, norm, _ = pooling.head  # type: ignore[misc]
    x = F.relu(both @ one.linear.weight.T + one.linear.bias)
    x = x + torch.tanh(x @ two.linear.weight.T)
    x = x @ three.linear.weight.T + three.linear.bias + x @ three.residual.weight.T
    x = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    x = x * norm.weight + norm.bias
    torch.testing.assert_close(pooling((hidden,), mask, {}), x / x.norm(dim=1, keepdim=True))
    assert pooling.dim == 3


def test_a_dense_layer_is_sentence_transformers() -> None:
    """Its defaults: a bias, tanh, nothing added."""
    _, hidden, mask = states(left=False)
    pooling = build(head=[{"kind": "dense", "out": 4}]).double()
    layer = pooling.head[0].linear  # type: ignore[index]
    x = build()((hidden,), mask, {})
    torch.testing.assert_close(pooling((hidden,), mask, {}), torch.tanh(x @ layer.weight.T + layer.bias))
