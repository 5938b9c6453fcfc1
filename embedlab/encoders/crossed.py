"""A twin whose towers exchange attention at inference too, for comparison: the released protocol is without."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import Tensor

from embedlab.encoders.cross_attention import CrossAttention, Route, check_alike, cross_layers
from embedlab.encoders.twin import TwinEncoder
from embedlab.errors import UserError


class CrossedTwin(TwinEncoder):
    """Two towers whose vectors come from the streams that exchange attention. It shares the twin's weights."""

    def __init__(self, twin: TwinEncoder, n_ca: int, route: Route = "query_owner") -> None:
        super().__init__(twin.towers, twin.weights, twin.card)
        if len(twin.towers) != 2:
            raise UserError("attention is exchanged between two towers", value=len(twin.towers))
        first, second = (tower.backbone for tower in twin.towers)
        check_alike(first, second)
        self._name = f"n_ca={n_ca} route={route}"
        self._cross = CrossAttention(first, second, cross_layers(n_ca, first.info.layers), route)
        self.train(twin.training)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, capacity: int | None = None) -> Tensor:
        states = self._cross(input_ids, attention_mask, main=False).side
        parts = [
            weight * tower.pooling(own, attention_mask, tower.tokenization.marks)
            for tower, weight, own in zip(self.towers, self.weights, states, strict=True)
        ]
        return parts[0] + parts[1]

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{super().fingerprint()} {self._name}".encode()).hexdigest()[:16]

    def write(self, folder: Path, dtype: str | None = None, merge: bool = True) -> None:
        raise UserError("a twin is saved without its cross-attention", fix="save the twin itself")
