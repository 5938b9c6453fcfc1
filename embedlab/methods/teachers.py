"""Frozen teachers beside the encoder that is trained: their vectors of a batch, computed in the step or before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embedlab.config.pooling import PoolingConfig
from embedlab.data.table import TokenTable
from embedlab.data.vectors import text_vectors
from embedlab.encoders.base import Encoder
from embedlab.encoders.loading import load
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.twin import TwinEncoder, same_tokenizer
from embedlab.engine.module import Batch
from embedlab.engine.step import backbones_of
from embedlab.errors import UserError, blamed_on
from embedlab.pooling import pooling_config

if TYPE_CHECKING:
    from embedlab.data.module import SentenceDataModule

_POOLINGS = "a pooling without weights that the teachers' own templates have, such as cls or mean"


def load_teacher(path: str, key: str, pooling: str | None = None) -> Encoder:
    """What `embedlab.load` takes, read by another pooling without weights where one is named.

    Raises:
        UserError: by the key that named it.
    """
    with blamed_on(key, path):
        found = load(path)
    if pooling is not None:
        config = teacher_pooling(pooling)
        with blamed_on("method.teacher_pooling", pooling, _POOLINGS):
            for tower in found.towers:
                tower.read_by(config)
    return found


def teacher_pooling(name: str) -> PoolingConfig:
    """The settings of the pooling called ``name``, by ``method.teacher_pooling``.

    Raises:
        UserError: there is none of that name.
    """
    with blamed_on("method.teacher_pooling", name, _POOLINGS):
        return pooling_config(name)


def read_to(own: Tokenization, max_length: int | None) -> Tokenization:
    """A teacher's tokenization for a student's ``max_length``: as much of a text, or less where its limit is lower."""
    template, model = own.template, own.model_limit
    if template is not None and model is not None:
        model = (model - own.overhead) // (1 if template.between is None else 2)
    limits = [limit for limit in (own.max_length, model, max_length) if limit is not None]
    return Tokenization(own.tokenizer, template, min(limits, default=None), own.preparation)


class Teacher:
    """A frozen encoder in evaluation mode. It is no sub-module of a method: neither the optimiser, DDP, checkpoints nor
    ``train()`` reach it.

    Args:
        encoder: with vectors of any width.
        student: how the method's views are tokenised; towers that read text otherwise, or less of it, get views of
            their own.
        name: of these views, before the tower's number.
    """

    def __init__(self, encoder: Encoder, student: Tokenization, name: str = "teacher") -> None:
        self.encoder = encoder.requires_grad_(False).eval()
        self._student = student
        self._names = [f"{name}{i}" for i in range(1, len(encoder.towers) + 1)]
        self._foreign = [not same_tokenizer(student, tower.tokenization) for tower in encoder.towers]

    def views(self, max_length: int | None) -> dict[str, tuple[str, Tokenization]]:
        """Its own views of a sentence, for `Method.views`."""
        student = self._student
        rows = Tokenization(student.tokenizer, student.template, max_length, student.preparation).row_limit
        found = {}
        for name, tower, foreign in zip(self._names, self.encoder.towers, self._foreign, strict=True):
            read = read_to(tower.tokenization, max_length)
            most = read.row_limit
            if foreign or (most is not None and (rows is None or most < rows)):
                found[name] = ("sentence", read)
        return found

    @torch.no_grad()
    def __call__(self, batch: dict[str, dict[str, Tensor]]) -> Tensor:
        """Vectors ``[B, D]`` of a batch's sentences."""
        towers = self.encoder.towers
        own = [foreign or name in batch for name, foreign in zip(self._names, self._foreign, strict=True)]
        views = [batch[name if its else "sentence"] for name, its in zip(self._names, own, strict=True)]
        rows = [(view["input_ids"], view["attention_mask"]) for view in views]
        if not any(own):
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


class CachedTeacher:
    """Vectors of all texts, in half precision on the device, from which a step takes those of its rows.

    As `Teacher`, it is no sub-module of a method. It reads as many tokens of a text as the
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
