"""One student of a twin encoder or an ensemble (JTCSE-D and JTCSE-UCD; the recipe is that of CACSE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from embedlab.backbones.backbone import Backbone
from embedlab.config.method import MethodConfig, check_tau
from embedlab.distributed.gather import first_row, gather, gather_ids
from embedlab.encoders.twin import check_addable
from embedlab.engine.module import Batch, Fields, Method, Outcome
from embedlab.errors import UserError
from embedlab.objectives.distillation import distillation
from embedlab.objectives.pair_nce import interleave

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.optimizer import OptimizerConfig
    from embedlab.config.pooling import PoolingConfig
    from embedlab.config.run import RunConfig
    from embedlab.config.template import Template
    from embedlab.encoders.encoder import SentenceEncoder


@dataclass(frozen=True)
class DistilConfig(MethodConfig):
    name: str = "distil"
    teacher: str | None = None
    """What `embedlab.load` takes: a twin encoder, an ensemble, any encoder with the student's tokenizer."""
    k1: float = 0.01
    """Weight of the contrast, 1 - k1 that of the distance: 0.01 from a twin, 0.1 from the mixed ensemble."""
    tau: float = 0.05
    mask_duplicates: bool = True
    gather_negatives: bool = True

    def check(
        self, info: BackboneInfo, pooling: PoolingConfig, template: Template | None, data: str, in_views: bool
    ) -> list[str]:
        check_tau(self.tau)
        if not 0 <= self.k1 <= 1:
            raise UserError("a weight lies between 0 and 1", key="method.k1", value=self.k1)
        if not self.teacher:
            raise UserError(
                "there is no teacher",
                key="method.teacher",
                fix="method.teacher=RUN, or experiment=jtcse_distil",
            )
        if in_views:
            raise UserError("the texts are single sentences", key="data.pack", fix="data.pack=null")
        if data != "wikipedia":
            raise UserError("the texts are single sentences", key="data", value=data, fix="data=wikipedia")
        return []


class Distil(Method):
    """The student's vectors to the frozen teacher's, by contrast over both and by their distance."""

    config_class = DistilConfig
    config: DistilConfig

    def __init__(
        self,
        encoder: SentenceEncoder,
        config: DistilConfig,
        optimizer: OptimizerConfig,
        step: str = "eager",
        teacher: SentenceEncoder | None = None,
    ) -> None:
        super().__init__(encoder, config, optimizer, step)
        if teacher is None:
            raise ValueError("distillation needs its teacher")
        check_addable(encoder, teacher, "the teacher")
        # In a list, it is no sub-module: neither the optimiser, DDP, checkpoints nor train() reach it.
        self._teacher = [teacher.requires_grad_(False).eval()]

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> Distil:
        import embedlab

        assert isinstance(run.method, DistilConfig)
        teacher = embedlab.load(str(run.method.teacher))
        student = cls.make_encoder(run, tokenizer)
        return cls(student, run.method, run.optimizer, run.resolved_step(), teacher)

    @property
    def teacher(self) -> SentenceEncoder:
        return self._teacher[0]

    @classmethod
    def fields(cls, config: MethodConfig, data: str, template: Template | None) -> Fields:
        return {"sentence": ("sentence", template)}

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.teacher.to(self.device)
        if self.step_mode in ("compile", "graph"):
            for module in self.teacher.modules():
                if isinstance(module, Backbone):
                    module.compile_blocks(dynamic=False)

    def losses(self, batch: Batch) -> Outcome:
        view = batch["sentence"]
        ids, mask = view["input_ids"], view["attention_mask"]
        with torch.no_grad():
            target = self.teacher(ids, mask)
        student = self.by_chunks(self.encoder, ids, mask)
        rows = interleave(target.to(student.dtype), student)
        spread, spread_ids, offset = (gather, gather_ids, first_row(len(rows)))
        if not self.config.gather_negatives:
            spread = spread_ids = lambda x: x
            offset = 0
        texts = view.get("hash") if self.config.mask_duplicates else None
        texts = None if texts is None else interleave(texts, texts)
        terms = distillation(
            rows,
            spread(rows),
            self.config.tau,
            self.config.k1,
            offset=offset,
            row_ids=texts,
            candidate_ids=None if texts is None else spread_ids(texts),
        )
        contrast = terms.diagnostics
        stats = {
            "positive_cosine": contrast.positive_cosine,
            "negative_cosine": contrast.negative_cosine,
            "accuracy": contrast.accuracy,
        }
        return Outcome({"contrast": terms.contrast, "l1": terms.l1}, stats)
