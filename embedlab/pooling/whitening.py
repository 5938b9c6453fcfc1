"""BERT-whitening (Su et al. 2021, arXiv 2103.15316): vectors of another pooling, linearly mapped to unit covariance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.pooling import PoolingConfig
from embedlab.config.template import Template
from embedlab.errors import UserError
from embedlab.kernels.packed_rows import PackedRows
from embedlab.pooling import build_pooling, pooling_config
from embedlab.pooling.base import Marks, Pooling

_LEAST = 1e-10
"""Variance of a kept direction as a share of the largest: below it is rounding."""


class Whitened(NamedTuple):
    """What ``(x - mean) @ matrix`` needs, in float64."""

    mean: Tensor
    """``[D]``."""
    matrix: Tensor
    """``[D, k]``: eigenvectors over the roots of their eigenvalues, the largest first."""


def fit_whitening(vectors: Iterable[Tensor], k: int, fewer: bool = False) -> Whitened:
    """The mean and the map by which the k directions of largest variance have unit covariance.

    Covariance over n - 1, in float64; of an eigenvector, the entry of largest size is positive.

    Args:
        vectors: ``[n_i, D]`` each, of a corpus of n sentences.
        k: directions to keep, at most D.
        fewer: whether vectors that lie in fewer directions are whitened in those, as what a LayerNorm gives lies in
            D - 1. What too few sentences span is refused all the same.

    Raises:
        UserError: too few sentences, vectors that lie in fewer than k directions, or that are all the same.
    """
    n, origin, total, outer = 0, None, None, None
    for batch in vectors:
        x = batch.double()
        if origin is None or total is None or outer is None:
            origin = x.mean(0)  # near the mean, so that the squares below do not cancel
            total, outer = torch.zeros_like(origin), x.new_zeros(x.shape[1], x.shape[1])
        x = x - origin
        n, total, outer = n + len(x), total + x.sum(0), outer + x.T @ x
    if n <= k or origin is None or total is None or outer is None:
        raise UserError(
            f"{n} sentences do not span {k} directions",
            key="method.k",
            value=k,
            fix="more text, or a smaller k",
        )
    shift = total / n
    values, directions = torch.linalg.eigh((outer - n * torch.outer(shift, shift)) / (n - 1))
    values, directions = values.flip(0), directions.flip(1)
    varying = int((values > _LEAST * values[0]).sum()) if values[0] > 0 else 0
    if varying < k and not (fewer and varying):
        raise UserError(
            f"the vectors vary in {varying} directions only",
            key="method.k",
            value=k,
            fix=f"method.k={varying}",
        )
    values, directions = values[: min(k, varying)], directions[:, : min(k, varying)]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return Whitened(origin + shift, directions * largest.sign() / values.sqrt())


@dataclass(frozen=True)
class WhiteningConfig(PoolingConfig):
    name: str = "whitening"
    of: dict[str, Any] = field(default_factory=lambda: {"name": "first_last"})
    """The pooling whose vectors are mapped."""
    k: int = 256
    """Width of the result."""

    @property
    def counts_padding(self) -> bool:
        return pooling_config(self.of).counts_padding

    @property
    def averages_tokens(self) -> bool:
        return pooling_config(self.of).averages_tokens

    def check(self, info: BackboneInfo, template: Template | None, method: str) -> list[str]:
        raise UserError(
            "it is fitted to an encoder's vectors, not trained",
            key="pooling",
            value=self.name,
            fix="method=whitening with the pooling that is to be mapped, or method.encoder=RUN",
        )


class Whitening(Pooling):
    """``(x - mean) @ matrix`` of another pooling's x; mean and matrix are saved with the encoder."""

    config_class = WhiteningConfig
    config: WhiteningConfig
    mean: Tensor
    matrix: Tensor

    def __init__(self, config: PoolingConfig, info: BackboneInfo) -> None:
        super().__init__(config, info)
        self.inner = build_pooling(self.config.of, info)
        self.needs_all_layers = self.inner.needs_all_layers
        self.dim = self.config.k
        self.register_buffer("mean", torch.zeros(self.inner.dim))
        self.register_buffer("matrix", torch.zeros(self.inner.dim, self.dim))

    def set(self, fitted: Whitened) -> None:
        """Take over what `fit_whitening` found."""
        self.mean.copy_(fitted.mean)
        self.matrix.copy_(fitted.matrix)

    def position(self, attention_mask: Tensor, marks: Marks) -> Tensor | None:
        return self.inner.position(attention_mask, marks)

    def forward(self, hidden: tuple[Tensor, ...], attention_mask: Tensor, marks: Marks) -> Tensor:
        return self._mapped(self.inner(hidden, attention_mask, marks))

    def packed(self, hidden: tuple[Tensor, ...], rows: PackedRows, marks: Marks) -> Tensor:
        return self._mapped(self.inner.packed(hidden, rows, marks))

    def _mapped(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return (x - self.mean.to(x.dtype)) @ self.matrix.to(x.dtype)
