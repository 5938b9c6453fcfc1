"""Frozen teachers beside the encoder that is trained: their vectors of a batch, each of its own tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from embedlab.encoders.base import Encoder
from embedlab.encoders.loading import load
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.twin import TwinEncoder, same_tokenizer
from embedlab.engine.step import backbones_of
from embedlab.errors import UserError
from embedlab.pooling import pooling_config


def load_teacher(path: str, key: str, pooling: str | None = None) -> Encoder:
    """What `embedlab.load` takes, read by another pooling without weights where one is named.

    Raises:
        UserError: by the key that named it.
    """
    try:
        found = load(path)
        if pooling is not None:
            for tower in found.towers:
                tower.read_by(pooling_config(pooling))
    except UserError as error:
        error.key = key
        raise
    return found


class Teacher:
    """A frozen encoder in evaluation mode. It is no sub-module of a method: neither the optimiser, DDP, checkpoints nor
    ``train()`` reach it.

    Args:
        encoder: with vectors of any width.
        student: how the method's views are tokenised; towers that read text otherwise get views of their own.
        name: of these views, before the tower's number.
    """

    def __init__(self, encoder: Encoder, student: Tokenization, name: str = "teacher") -> None:
        self.encoder = encoder.requires_grad_(False).eval()
        self._own = {
            i: f"{name}{i}"
            for i, tower in enumerate(encoder.towers, 1)
            if not same_tokenizer(student, tower.tokenization)
        }

    def views(self, max_length: int | None) -> dict[str, tuple[str, Tokenization]]:
        """Its own views of a sentence, for `Method.views`."""
        own = {i: self.encoder.towers[i - 1].tokenization for i in self._own}
        return {
            self._own[i]: ("sentence", Tokenization(t.tokenizer, t.template, max_length, t.preparation))
            for i, t in own.items()
        }

    @torch.no_grad()
    def __call__(self, batch: dict[str, dict[str, Tensor]]) -> Tensor:
        """Vectors ``[B, D]`` of a batch's sentences."""
        towers = self.encoder.towers
        views = [batch[self._own.get(i, "sentence")] for i in range(1, len(towers) + 1)]
        rows = [(view["input_ids"], view["attention_mask"]) for view in views]
        if not self._own:
            vectors: Tensor = self.encoder(*rows[0])
            return vectors
        weights = self.encoder.weights if isinstance(self.encoder, TwinEncoder) else (1.0,)
        parts = [w * tower(*each) for w, tower, each in zip(weights, towers, rows, strict=True)]
        return torch.stack(parts).sum(0)

    def begin(self, device: torch.device, compiles: bool) -> None:
        """Before the first step: to the device, with compiled blocks where the step has them."""
        self.encoder.to(device)
        if compiles:
            for backbone in backbones_of(self.encoder):
                backbone.compile_blocks(dynamic=False)
