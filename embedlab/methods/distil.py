"""One student of a twin encoder or an ensemble (JTCSE-D and JTCSE-UCD).

    L = k1 X + (1 - k1) mean |student - teacher|

with X the contrast over interleaved rows, teacher 0, student 0, teacher 1, ... (`objectives.pair_nce`). JTCSE's own
script is not released; this is the recipe of the same group's CACSE (specification 1.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import l1_loss

from embedlab.config.backbone import BackboneInfo
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.encoders.base import Encoder
from embedlab.encoders.loading import load
from embedlab.encoders.twin import check_addable
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.engine.step import backbones_of
from embedlab.errors import UserError
from embedlab.methods.contrast import ContrastConfig, contrast_pairs
from embedlab.objectives.precision import to_fp32


@dataclass(frozen=True)
class DistilConfig(ContrastConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    shardable: ClassVar[bool] = False

    name: str = "distil"
    teacher: str | None = None
    """What `embedlab.load` takes: a twin encoder, an ensemble, any encoder with the student's tokenizer."""
    k1: float = 0.01
    """Weight of the contrast, 1 - k1 that of the distance: 0.01 from a twin, 0.1 from the mixed ensemble."""

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if not 0 <= self.k1 <= 1:
            raise UserError("a weight lies between 0 and 1", key="method.k1", value=self.k1)
        if not self.teacher:
            raise UserError(
                "there is no teacher",
                key="method.teacher",
                fix="method.teacher=RUN, or experiment=jtcse_distil",
            )
        return super().check(info, run)


class Distil(Method):
    """The student's vectors to the frozen teacher's, by contrast over both and by their distance."""

    config_class = DistilConfig
    config: DistilConfig

    def __init__(
        self,
        encoder: Encoder,
        config: DistilConfig,
        optimizer: OptimizerConfig,
        teacher: Encoder,
    ) -> None:
        super().__init__(encoder, config, optimizer)
        check_addable(encoder, teacher, "the teacher")
        # In a list, it is no sub-module: neither the optimiser, DDP, checkpoints nor train() reach it.
        self._teacher = [teacher.requires_grad_(False).eval()]

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> Distil:
        assert isinstance(run.method, DistilConfig)
        teacher = load(str(run.method.teacher))
        return cls(cls.make_encoder(run, tokenizer), run.method, run.optimizer, teacher)

    @property
    def teacher(self) -> Encoder:
        return self._teacher[0]

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.teacher.to(self.device)
        if self.runner.compiles:
            for backbone in backbones_of(self.teacher):
                backbone.compile_blocks(dynamic=False)

    def losses(self, batch: Batch) -> LossOutput:
        view = batch["sentence"]
        ids, mask = view["input_ids"], view["attention_mask"]
        with torch.no_grad():
            target = self.teacher(ids, mask)
        student = self.by_chunks(self.encoder, ids, mask)
        pair = target.to(student.dtype), student
        result = contrast_pairs(pair, [self.config.in_batch.text_hashes(view)] * 2, self.config)
        distance = l1_loss(to_fp32(pair[0]), to_fp32(pair[1]))
        k1 = self.config.k1
        return LossOutput({"contrast": k1 * result.loss, "l1": (1 - k1) * distance}, result.stats)
