"""A frozen teacher that encodes every text of the data once, before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embedlab.data.table import TokenTable
from embedlab.data.vectors import text_vectors
from embedlab.encoders.base import Encoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.engine.module import Batch
from embedlab.errors import UserError
from embedlab.methods.teachers import read_to

if TYPE_CHECKING:
    from embedlab.data.module import SentenceDataModule


class CachedTeacher:
    """Vectors of all texts, in half precision on the device, from which a step takes those of its rows.

    As `embedlab.methods.teachers.Teacher`, it is no sub-module of a method. It reads as many tokens of a text as the
    student does, or fewer where its own limit is lower.

    Args:
        encoder: with vectors of any width.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder.requires_grad_(False).eval()
        self._found: Tensor | None = None

    def views(self, max_length: int | None) -> dict[str, tuple[str, Tokenization]]:
        """None of its own; its limit is set, of a student's ``max_length``."""
        for tower in self.encoder.towers:
            tower.tokenization = read_to(tower.tokenization, max_length)
        return {}

    def begin(self, data: SentenceDataModule, device: torch.device) -> None:
        """Before the first step: the vectors, from the cache or computed on the device.

        Raises:
            UserError: as `text_vectors`, or rows that are no single texts.
        """
        if not isinstance(data.table, TokenTable):
            fix = "method.cached=false"
            raise UserError(
                "vectors are cached of one set of texts", key="method.cached", value=True, fix=fix
            )
        found = text_vectors(self.encoder, data.config, data.table, "sentence", device, data.overlap)
        self._found = torch.from_numpy(found).to(device)

    def __call__(self, batch: Batch) -> Tensor:
        """Vectors ``[B, D]`` of a batch's sentences."""
        assert self._found is not None, "begin was not called"
        return self._found[batch["rows"]].float()
