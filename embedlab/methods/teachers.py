"""Frozen encoders whose vectors a student learns: computed in each step, or once for all texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embedlab.data.vectors import text_vectors
from embedlab.encoders.base import Encoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.twin import TwinEncoder, check_widths, same_tokenizer
from embedlab.engine.module import Batch, Method
from embedlab.engine.step import backbones_of

Views = dict[str, tuple[str, Tokenization]]


class Teacher:
    """An encoder that is no sub-module of the method: neither the optimiser, DDP, checkpoints nor train() reach it.

    Args:
        encoder: the teacher.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder.requires_grad_(False).eval()

    @property
    def width(self) -> int:
        return self.encoder.dim

    def read(self, max_length: int | None) -> Views:
        """The views of a batch that only this teacher reads, by name.

        Args:
            max_length: tokens of a sentence.
        """
        return {}

    def begin(self, method: Method) -> None:
        """Before the first step of a fit."""

    def vectors(self, batch: Batch) -> Tensor:
        """Of the batch's texts, ``[B, width]``."""
        raise NotImplementedError


class InStep(Teacher):
    """Computes its vectors in each step, of its own tokens where it reads text otherwise than the student.

    Args:
        encoder: the teacher.
        student: whose tokens it takes where it reads text in the same way.
        first: number of its first tower among those of all teachers.
    """

    def __init__(self, encoder: Encoder, student: Encoder, first: int) -> None:
        super().__init__(encoder)
        self._views = {
            i: f"teacher{first + i}"
            for i, tower in enumerate(encoder.towers)
            if not same_tokenizer(student.tokenization, tower.tokenization)
        }
        """Of the towers that read text otherwise than the student, by number."""

    def read(self, max_length: int | None) -> Views:
        found = {}
        for i, view in self._views.items():
            own = self.encoder.towers[i].tokenization
            found[view] = ("sentence", Tokenization(own.tokenizer, own.template, max_length))
        return found

    def begin(self, method: Method) -> None:
        self.encoder.to(method.device)
        if method.runner.compiles:
            for backbone in backbones_of(self.encoder):
                backbone.compile_blocks(dynamic=False)

    def vectors(self, batch: Batch) -> Tensor:
        of = [batch[self._views.get(i, "sentence")] for i in range(len(self.encoder.towers))]
        if not self._views:
            return self.encoder(of[0]["input_ids"], of[0]["attention_mask"])  # type: ignore[no-any-return]
        weights = self.encoder.weights if isinstance(self.encoder, TwinEncoder) else (1.0,)
        parts = [
            weight * tower(view["input_ids"], view["attention_mask"])
            for weight, tower, view in zip(weights, self.encoder.towers, of, strict=True)
        ]
        return torch.stack(parts).sum(0)


class Cached(Teacher):
    """Encodes every text of the data once; a step takes its rows' vectors from the device.

    It reads as many tokens of a text as the student does, or fewer where its own limit is lower.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder)
        self._found: Tensor | None = None

    def read(self, max_length: int | None) -> Views:
        for tower in self.encoder.towers:
            own: Tokenization = tower.tokenization
            around = own.overhead if own.template is not None else 0
            model = None if own.model_limit is None else own.model_limit - around
            limits = [limit for limit in (own.max_length, model, max_length) if limit is not None]
            limit = min(limits, default=None)
            tower.tokenization = Tokenization(own.tokenizer, own.template, limit, own.preparation)
        return {}

    def begin(self, method: Method) -> None:
        data: Any = method.trainer.datamodule  # type: ignore[attr-defined]
        found = text_vectors(self.encoder, data.config, data.table, "sentence", method.device)
        self._found = torch.from_numpy(found).to(method.device)

    def vectors(self, batch: Batch) -> Tensor:
        assert self._found is not None, "begin was not called"
        return self._found[batch["rows"]].float()


def load_teachers(
    student: Encoder, encoders: Sequence[Encoder], cached: bool, same_width: bool
) -> list[Teacher]:
    """Teachers of a student.

    Args:
        student: the encoder that is trained.
        encoders: the teachers' own.
        cached: whether their vectors are computed once.
        same_width: whether they need the student's width.

    Raises:
        UserError: one has another width, and may not.
    """
    found: list[Teacher] = []
    towers = 0
    for encoder in encoders:
        if same_width:
            check_widths(student, encoder, "the teacher")
        found.append(Cached(encoder) if cached else InStep(encoder, student, 1 + towers))
        towers += len(encoder.towers)
    return found
