"""Whitening: unit covariance on what it was fitted to, its directions, and what cannot be fitted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.errors import UserError
from embedlab.pooling import build_pooling, pooling_config
from embedlab.pooling.whitening import Whitening, WhiteningConfig, fit_whitening


def correlated(n: int = 400, width: int = 12) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    mix = torch.randn(width, width, generator=draw)
    return torch.randn(n, width, generator=draw) @ mix + 5 * torch.randn(width, generator=draw)


@pytest.mark.parametrize("k", [12, 5])
def test_what_was_fitted_has_unit_covariance(k: int) -> None:
    x = correlated()
    mean, matrix = fit_whitening(x.split(90), k)
    y = (x.double() - mean) @ matrix
    torch.testing.assert_close(torch.cov(y.T), torch.eye(k, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.mean(0), torch.zeros(k, dtype=torch.float64), atol=1e-8, rtol=0)


def test_a_covariance_known_by_heart() -> None:
    """[[2, 1], [1, 2]]: variances 3 and 1 along the diagonals."""
    root = torch.linalg.cholesky(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    x = corners * (3 / 4) ** 0.5 @ root.T  # n - 1 of n
    _, matrix = fit_whitening([x], 2)
    torch.testing.assert_close(matrix.square().sum(0), torch.tensor([1 / 3, 1.0], dtype=torch.float64))
    half = 0.5**0.5
    torch.testing.assert_close(matrix[:, 0] * 3**0.5, torch.tensor([half, half], dtype=torch.float64))


def test_directions_are_nested_and_batches_are_nothing() -> None:
    x = correlated()
    whole = fit_whitening([x], 12)
    for fitted in (fit_whitening(x.split(37), 5), fit_whitening(x[torch.randperm(400)].split(50), 5)):
        torch.testing.assert_close(fitted.mean, whole.mean)
        torch.testing.assert_close(fitted.matrix, whole.matrix[:, :5])
    assert (whole.matrix.gather(0, whole.matrix.abs().argmax(0, keepdim=True)) > 0).all()


def test_a_far_origin_costs_no_digits() -> None:
    x = correlated().double()
    moved = fit_whitening([x + 1e4], 12)
    torch.testing.assert_close(moved.matrix, fit_whitening([x], 12).matrix, rtol=1e-6, atol=1e-8)


def test_what_spans_too_little_is_refused() -> None:
    x = correlated()
    with pytest.raises(UserError, match="12 sentences do not span 12"):
        fit_whitening([x[:12]], 12)
    with pytest.raises(UserError, match=r"5 directions only.*method\.k=5"):
        fit_whitening([x[:, :5] @ torch.randn(5, 12, generator=torch.Generator().manual_seed(1))], 12)
    with pytest.raises(UserError, match="0 sentences"):
        fit_whitening([], 3)


@pytest.mark.parametrize("rank", [1, 5, 11])
def test_vectors_of_fewer_directions_are_whitened_in_those(rank: int) -> None:
    x = correlated().double()
    flat = x[:, :rank] @ torch.randn(rank, 12, generator=torch.Generator().manual_seed(1)).double()
    mean, matrix = fit_whitening(flat.split(90), 12, fewer=True)
    assert matrix.shape == (12, rank)
    cov = torch.cov((flat - mean).matmul(matrix).T).reshape(rank, rank)
    torch.testing.assert_close(cov, torch.eye(rank, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(matrix, fit_whitening([flat], rank).matrix, rtol=1e-6, atol=1e-8)
    assert fit_whitening([x], 5, fewer=True).matrix.shape == (12, 5)


def test_fewer_directions_are_neither_too_few_sentences_nor_none() -> None:
    x = correlated()
    with pytest.raises(UserError, match="12 sentences do not span 12"):
        fit_whitening([x[:12]], 12, fewer=True)
    with pytest.raises(UserError, match="0 directions only"):
        fit_whitening([x[:1].expand(40, 12)], 12, fewer=True)


@pytest.mark.parametrize("inner", ["cls", "mean", "first_last"])
def test_it_maps_the_vectors_of_another_pooling(tiny: Callable[..., Path], inner: str) -> None:
    backbone, _ = load_backbone(BackboneConfig(source="local", path=str(tiny("bert"))))
    pooling = build_pooling(WhiteningConfig(of={"name": inner}, k=6), backbone.info)
    assert isinstance(pooling, Whitening)
    fitted = fit_whitening([torch.randn(50, 32, generator=torch.Generator().manual_seed(0))], 6)
    pooling.set(fitted)
    draw = torch.Generator().manual_seed(1)
    hidden = tuple(torch.randn(3, 4, 32, generator=draw) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    x = build_pooling(inner, backbone.info)(hidden, mask, {})
    torch.testing.assert_close(pooling(hidden, mask, {}), ((x - fitted.mean) @ fitted.matrix).float())
    assert pooling.dim == 6
    assert set(pooling.state_dict()) == {"mean", "matrix"}
    with pytest.raises(UserError, match="method=whitening"):
        pooling_config({"name": "whitening"}).check(backbone.info, None, "simcse")
