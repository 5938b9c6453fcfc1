"""A student of frozen teachers: JTCSE-D's and JTCSE-UCD's own form, and terms for teachers of any kind.

JTCSE-D, of a twin encoder or an ensemble: ``L = k1 X + (1 - k1) mean |student - teacher|``, with X the contrast over
interleaved rows, teacher 0, student 0, teacher 1, ... (`objectives.pair_nce`). JTCSE's own script is not released; this
is the recipe of the same group's CACSE (specification 1.6).

Of teachers with vectors of any width, S and T being the cosines within the batch, T of several teachers their mean:
``cosine`` (1 - cosine of the projected student and the teacher) + ``similarity`` mean (S - T)^2 + ``kl``
KL(softmax(T / tau) || softmax(S / tau)) of the rows (`objectives.similarity`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss

from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.encoders.base import Encoder
from embedlab.encoders.twin import check_widths
from embedlab.engine.module import Batch, LossOutput
from embedlab.errors import UserError, blamed_on
from embedlab.methods.contrast import ContrastConfig, contrast_pairs
from embedlab.methods.teachers import TaughtMethod, load_teacher
from embedlab.objectives.precision import to_fp32
from embedlab.objectives.regularisers import cosine_distance
from embedlab.objectives.similarity import cosines, row_divergence, squared_difference


@dataclass(frozen=True)
class DistilConfig(ContrastConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    shardable: ClassVar[bool] = False

    name: str = "distil"
    teacher: str | list[str] | None = None
    """What `embedlab.load` takes, or several of it: encoders of any tokenizer and, without `k1`, of any width."""
    cached: bool = False
    """The teachers' vectors are computed once, before the first step, and kept in half precision; False: in each step
    anew."""
    k1: float | None = within(0.01, least=0, most=1)
    """Weight of the contrast, 1 - k1 that of the distance: 0.01 from a twin, 0.1 from the mixed ensemble. None: neither
    of them."""
    cosine: float = within(0.0, least=0)
    """Weight of the mean 1 - cosine to the teachers, through a linear map to each one's width, dropped at the end."""
    similarity: float = within(0.0, least=0)
    """Weight of the squared difference of the cosines within the batch."""
    kl: float = within(0.0, least=0)
    """Weight of the divergence of their rows, softmaxed at `tau`."""

    @property
    def teachers(self) -> list[str]:
        return [self.teacher] if isinstance(self.teacher, str) else self.teacher or []

    @property
    def can_unpad(self) -> bool:  # type: ignore[override]
        """A teacher in the step computes padded rows."""
        return self.cached

    @property
    def nests(self) -> bool:
        return self.k1 is not None

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if self.k1 is None and not self.cosine + self.similarity + self.kl:
            raise UserError("there is no loss", key="method.k1", fix="method.cosine=1, or method.k1=0.01")
        if not all(self.teachers):
            raise UserError(
                "an empty name", key="method.teacher", value=self.teacher, fix="method.teacher=RUN"
            )
        if not self.teachers:
            raise UserError(
                "there is no teacher",
                key="method.teacher",
                fix="method.teacher=RUN, or experiment=jtcse_distil",
            )
        if self.k1 is not None and len(self.teachers) > 1:
            fix = "method.k1=null with method.similarity=5 method.kl=0.2; or method=ensemble first"
            raise UserError(
                "JTCSE-D's form has one teacher", key="method.teacher", value=self.teacher, fix=fix
            )
        if self.k1 is None and not self.kl:
            self.refuse_unread("tau", "no term is a softmax", "method.kl=0.2")
        return super().check(info, run)


class Distil(TaughtMethod):
    """The student's vectors to the frozen teachers', each with each or by what is near to what."""

    config_class = DistilConfig
    config: DistilConfig

    def __init__(
        self, encoder: Encoder, config: DistilConfig, optimizer: OptimizerConfig, *teachers: Encoder
    ) -> None:
        super().__init__(encoder, config, optimizer)
        self.teach_by(teachers, config.cached)
        if config.k1 is not None:
            fix = "method.k1=null with method.similarity=5 method.kl=0.2, or a teacher of the student's width"
            with blamed_on("method.teacher", config.teacher, fix):
                check_widths(encoder, teachers[0], "the teacher")
        self.projections = nn.ModuleList()
        if config.cosine:
            self.projections.extend(nn.Linear(encoder.dim, t.dim, bias=False) for t in teachers)

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> Distil:
        assert isinstance(run.method, DistilConfig)
        teachers = [load_teacher(name, "method.teacher") for name in run.method.teachers]
        return cls(cls.make_encoder(run, tokenizer), run.method, run.optimizer, *teachers)

    def losses(self, batch: Batch) -> LossOutput:
        config, view = self.config, batch["sentence"]
        targets = [teacher(batch) for teacher in self.teachers]
        student = self._student(view)
        losses: dict[str, Tensor] = {}
        stats: dict[str, Tensor] = {}
        if config.k1 is not None:
            pair = targets[0].to(student.dtype), student
            result = contrast_pairs(pair, [config.in_batch.text_hashes(view)] * 2, config)
            distance = l1_loss(to_fp32(pair[0]), to_fp32(pair[1]))
            losses = {"contrast": config.k1 * result.loss, "l1": (1 - config.k1) * distance}
            stats = result.stats
        if config.cosine:
            near = [cosine_distance(p(student), t) for p, t in zip(self.projections, targets, strict=True)]
            losses["cosine"] = config.cosine * torch.stack(near).mean()
        if config.similarity or config.kl:
            losses |= self._relational(student, targets, config.in_batch.text_hashes(view))
        return LossOutput(losses, stats)

    def _student(self, view: dict[str, Any]) -> Tensor:
        ids, mask, budget = view["input_ids"], view["attention_mask"], view.get("token_budget")
        if budget is None:
            return self.by_chunks(self.encoder, ids, mask)
        return self.encoder(ids, mask, budget)  # type: ignore[no-any-return]

    def _relational(self, student: Tensor, targets: list[Tensor], hashes: Tensor | None) -> dict[str, Tensor]:
        """The two terms of the batch's cosines, each against the candidates of all devices."""
        config, batch = self.config, self.config.in_batch
        own = cosines(student, batch.candidates(student))
        theirs = torch.stack([cosines(t, batch.candidates(t)) for t in targets]).mean(0)
        losses = {}
        if config.similarity:
            losses["similarity"] = config.similarity * squared_difference(own, theirs)
        if config.kl:
            place = torch.arange(len(own), device=own.device)[:, None] + batch.offset(student)
            itself = torch.arange(own.shape[1], device=own.device) == place
            if hashes is not None:
                itself = itself | (hashes[:, None] == batch.candidates(hashes))
            losses["kl"] = config.kl * row_divergence(own, theirs, config.tau, itself)
        return losses
