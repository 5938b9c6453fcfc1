"""Frozen encoders beside the one that is trained: vectors of a batch, each of its own tokens, or computed once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embedlab.config.pooling import PoolingConfig
from embedlab.data.table import TokenTable
from embedlab.data.vectors import text_vectors
from embedlab.encoders.base import Encoder
from embedlab.encoders.loading import load
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.twin import TwinEncoder, same_tokenizer
from embedlab.encoders.usage import Usage
from embedlab.engine.module import Batch, Fields, Method
from embedlab.errors import UserError, blamed_on
from embedlab.methods.simcse import stacked
from embedlab.pooling import pooling_config

if TYPE_CHECKING:
    from embedlab.data.module import SentenceDataModule

log = logging.getLogger(__name__)

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


def _tell_unused(usage: Usage) -> None:
    """What `Encoder.encode` would do to a teacher's vectors, and training does not."""
    if prompt := usage.text():
        log.warning(
            "a teacher's default prompt %r is not added: data.prompts says what stands before texts, the student's too",
            prompt,
        )
    if usage.truncate_dim is not None:
        log.warning("a teacher that keeps %d features teaches all that it has", usage.truncate_dim)


class Teacher:
    """A frozen encoder in evaluation mode. It is no sub-module of a method: neither the optimiser, DDP, checkpoints nor
    ``train()`` reach it. It has no prompts of its own, and all its features: training ignores an encoder's usage.

    Args:
        encoder: with vectors of any width.
        student: how the method's views are tokenised; towers that read text otherwise, or less of it, get views of
            their own.
        name: of these views, before the tower's number and the method's view.
    """

    def __init__(self, encoder: Encoder, student: Tokenization, name: str = "teacher") -> None:
        self.encoder = encoder.requires_grad_(False).eval()
        _tell_unused(encoder.usage)
        self.encoder.usage = Usage()
        self._student = student
        self._names = [f"{name}{i}" for i in range(1, len(encoder.towers) + 1)]
        self._foreign = [not same_tokenizer(student, tower.tokenization) for tower in encoder.towers]

    @cached_property
    def identity(self) -> str:
        """Of what it teaches, by `Encoder.fingerprint`; asked for when its tokenization is set."""
        return self.encoder.fingerprint()

    def views(self, roles: Mapping[str, str], max_length: int | None) -> dict[str, tuple[str, Tokenization]]:
        """Its own views of the method's, for `Method.views`.

        Args:
            roles: of the method's views.
            max_length: tokens of a text that the student reads.
        """
        student = self._student
        rows = Tokenization(student.tokenizer, student.template, max_length, student.preparation).row_limit
        found: dict[str, tuple[str, Tokenization]] = {}
        for name, tower, foreign in zip(self._names, self.encoder.towers, self._foreign, strict=True):
            read = read_to(tower.tokenization, max_length)
            most = read.row_limit
            if foreign or (most is not None and (rows is None or most < rows)):
                found |= {f"{name}_{view}": (role, read) for view, role in roles.items()}
        return found

    def owns(self, view: str) -> bool:
        """Whether a view of a batch is one of its own."""
        return view.startswith(tuple(f"{name}_" for name in self._names))

    @torch.no_grad()
    def __call__(self, batch: Batch, views: Sequence[str] = ("sentence",)) -> Tensor:
        """Vectors ``[V * B, D]`` of V views of a batch, one view after the other, in one pass."""
        towers = self.encoder.towers
        own = [
            foreign or f"{name}_{views[0]}" in batch
            for name, foreign in zip(self._names, self._foreign, strict=True)
        ]
        rows = [
            stacked([batch[f"{name}_{view}" if its else view] for view in views], tower.tokenization.pad_id)
            for name, its, tower in zip(self._names, own, towers, strict=True)
        ]
        if not any(own):
            vectors: Tensor = self.encoder(*rows[0])
            return vectors
        weights = self.encoder.weights if isinstance(self.encoder, TwinEncoder) else (1.0,)
        parts = [w * tower(*each) for w, tower, each in zip(weights, towers, rows, strict=True)]
        return torch.stack(parts).sum(0)

    def begin(self, method: TaughtMethod) -> None:
        """Before the first step: to the device, with compiled blocks where the step has them."""
        self.encoder.to(method.device)
        method.runner.compile_beside(self.encoder)


class CachedTeacher(Teacher):
    """One whose vectors of all texts are there before the first step, in half precision on the device.

    It reads as much of a text as one in the step does. A step takes the vectors of its rows by their numbers, of a mix
    too, so that one graph can compute the steps of all sets.
    """

    def __init__(self, encoder: Encoder, student: Tokenization, name: str = "teacher") -> None:
        super().__init__(encoder, student, name)
        self._roles: dict[str, str] = {}
        self._starts = torch.zeros(1, dtype=torch.long)
        self._vectors: dict[str, tuple[Tensor, Tensor]] = {}
        """By role: vectors of the rows that have some, and how many rows before those of each set have none."""

    def views(self, roles: Mapping[str, str], max_length: int | None) -> dict[str, tuple[str, Tokenization]]:
        """None of its own; how far it reads is set, which makes it another."""
        self._roles |= roles
        self.__dict__.pop("identity", None)
        for tower in self.encoder.towers:
            tower.tokenization = read_to(tower.tokenization, max_length)
        return {}

    def begin(self, method: TaughtMethod) -> None:
        """Before the first step: the vectors, from the cache or computed on the device.

        Raises:
            UserError: as `text_vectors`.
        """
        data: SentenceDataModule = method.trainer.datamodule  # type: ignore[attr-defined]
        sets = data.config.by_name
        whole: Any = data.table
        tables: dict[str, TokenTable] = whole.parts if data.config.mix else {"": whole}
        self._starts = torch.tensor(whole.starts if data.config.mix else [0], device=method.device)
        for role in dict.fromkeys(self._roles.values()):
            found, without = [], [0]
            for name, table in tables.items():
                there = method.is_taught(name) and role in table.fields
                if there:
                    half = text_vectors(
                        self.encoder, sets[name], table, role, method.device, data.overlap, self.identity
                    )
                    found.append(torch.from_numpy(half))
                without.append(without[-1] + (0 if there else table.n_rows))
            if found:
                vectors = (found[0] if len(found) == 1 else torch.cat(found)).to(method.device)
                self._vectors[role] = vectors, torch.tensor(without[:-1], device=method.device)

    def __call__(self, batch: Batch, views: Sequence[str] = ("sentence",)) -> Tensor:
        """As of a `Teacher`."""
        rows = batch["rows"]
        place = torch.searchsorted(self._starts, rows, right=True) - 1
        found = [self._vectors[self._roles[view]] for view in views]
        return torch.cat([vectors[rows - without[place]].float() for vectors, without in found])


class TaughtMethod(Method):
    """A method with frozen encoders beside the one that it trains: teachers, or a guide."""

    teachers: list[Teacher]
    _identities: list[str] | None = None

    def teach_by(self, encoders: Iterable[Encoder], cached: bool) -> None:
        """Set the teachers; ``cached``: their vectors are computed once."""
        kind = CachedTeacher if cached else Teacher
        student = self.encoder.tokenization
        self.teachers = [kind(encoder, student, f"teacher{i}_") for i, encoder in enumerate(encoders, 1)]

    def is_taught(self, data_set: str) -> bool:
        """Whether the teachers are asked in steps of a set of a mix (without one: the empty name)."""
        return True

    def views(self, fields: Fields, max_length: int | None) -> dict[str, tuple[str, Tokenization]]:
        found = super().views(fields, max_length)
        roles = {view: role for view, (role, _) in found.items()}
        for teacher in self.teachers:
            found |= teacher.views(roles, max_length)
        return found

    def pads(self, view: str) -> bool:
        return any(teacher.owns(view) for teacher in self.teachers)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.setdefault("embedlab", {})["teachers"] = self._identities

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A path that leads to other weights by now is another recipe.

        Raises:
            UserError: the teachers are not those of the checkpoint.
        """
        saved = checkpoint.get("embedlab", {}).get("teachers")
        # (Until they were fingerprints, without a plus sign, they had another form.)
        if (
            saved is not None
            and "+" in "".join(saved)
            and saved != [teacher.identity for teacher in self.teachers]
        ):
            told = (
                "the checkpoint is of another recipe: a teacher has changed since (its weights or its files)"
            )
            fix = "the teacher as it was; or another hydra.run.dir, to begin anew"
            raise UserError(told, key="ckpt_path", fix=fix)

    def on_fit_start(self) -> None:
        # Of the weights as they were read: a step may give them its own type.
        self._identities = [teacher.identity for teacher in self.teachers]
        super().on_fit_start()
        for teacher in self.teachers:
            teacher.begin(self)
