"""Embeddings and blocks with gradients written out: the states and gradients of transformers' modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embedlab.backbones import Backbone, fused_block
from embedlab.pooling import build_pooling
from embedlab.training.compute_copy import ComputeCopy
from tests.backbones.test_attention import load
from tests.backbones.test_last_block import MODELS, batch

Tiny = Callable[..., Path]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off a card too, wherever the build is known."""
    monkeypatch.setattr(fused_block, "applies", lambda backbone, device: fused_block.fusable(backbone))


def step(backbone: Backbone, read: Callable[[Backbone], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """What `read` gives with the weights of a copy in fp32, and the gradients of all weights."""
    twins = ComputeCopy(backbone, torch.float32)
    torch.manual_seed(5)
    with twins.swapped():
        out = read(backbone)
        out.sin().sum().backward()
    twins.hand_over(add=False)
    found = {n: p.grad.clone() for n, p in backbone.named_parameters() if p.grad is not None}
    for p in backbone.parameters():
        p.grad = None
    return out.detach(), found


def whole(backbone: Backbone) -> Tensor:
    ids, mask = batch()
    return backbone(ids, mask, capacity=int(mask.sum()) + 7)[0]


def all_layers(backbone: Backbone) -> Tensor:
    ids, mask = batch("left")
    return torch.stack(backbone(ids, mask, capacity=int(mask.sum()) + 7, all_layers=True))


def one(backbone: Backbone) -> Tensor:
    ids, mask = batch()
    mask[2] = 0  # a row without tokens
    pool = build_pooling("cls", backbone.info)
    return pool(backbone(ids, mask, capacity=40, position=pool.position(mask, {})), mask, {})


@pytest.mark.parametrize("read", [whole, all_layers, one])
@pytest.mark.parametrize("model_type", [*MODELS, "xlm-roberta"])
def test_states_and_gradients_are_those_of_the_modules(
    tiny: Tiny, model_type: str, read: Callable[[Backbone], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load(tiny, model_type).eval()
    want, its = step(backbone, read)
    monkeypatch.setattr(fused_block, "applies", lambda backbone, device: fused_block.fusable(backbone))
    called = []
    real = fused_block.states
    monkeypatch.setattr(fused_block, "states", lambda *a, **k: called.append(1) or real(*a, **k))
    got, mine = step(backbone, read)
    assert called == [1]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert mine.keys() == its.keys()
    for name in its:
        torch.testing.assert_close(
            mine[name], its[name], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_gradients_with_dropout_are_those_of_finite_differences(tiny: Tiny, everywhere: None) -> None:
    backbone = load(tiny, "bert").train().double()
    assert backbone.info.dropout > 0
    twins = ComputeCopy(copy.deepcopy(backbone).float(), torch.float32)
    backbone = twins.module  # type: ignore[assignment]
    parameters = dict(backbone.named_parameters())
    with torch.no_grad():
        for p in parameters.values():
            p.add_(torch.randn_like(p) * 0.05)
    _, gradients = step(backbone, whole)
    generator = torch.Generator().manual_seed(1)
    direction = {
        n: torch.randn(p.shape, generator=generator) * p.detach().std().clamp(min=1e-2)
        for n, p in parameters.items()
    }
    inner = sum(float((gradients[n] * direction[n]).sum()) for n in gradients)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for n, p in parameters.items():
                p.add_(direction[n], alpha=sign * 1e-3)
        values.append(float(step(backbone, whole)[0].double().sin().sum()))
        with torch.no_grad():
            for n, p in parameters.items():
                p.sub_(direction[n], alpha=sign * 1e-3)
    assert inner == pytest.approx((values[0] - values[1]) / 2e-3, rel=2e-2)
