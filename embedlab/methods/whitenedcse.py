"""WhitenedCSE (Zhuo et al., ACL 2023): three dropout views, whitened in groups of features that are drawn anew.

    L = N(z1, z2) + N(z1, z3),  zv = tanh(W SGW_v(hv))                                                  (1)

N is SimCSE's loss; SGW_v decorrelates, over the batch, each of G groups of features, which a permutation of the view's
own makes. Whitening and W are in training only. As the abstract has it: the release does not run. (The number is this
file's.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.data import DataConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError
from embedlab.methods.contrast import ContrastConfig, check_dropout, contrast
from embedlab.methods.heads import Head, new_head
from embedlab.methods.simcse import encode_views
from embedlab.objectives.group_whitening import group_whitening

VIEWS = 3


@dataclass(frozen=True)
class WhitenedCSEConfig(ContrastConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    can_unpad: ClassVar[bool] = True

    name: str = "whitenedcse"
    groups: int = 128
    """G, groups of features (the release's; the paper's is not known); divides the width of the vectors."""
    eps: float = 1e-5
    """Added to the eigenvalues of a group's covariance."""
    mlp: Head = "train"

    def why_not_captured(self, data: DataConfig) -> str | None:
        return "has no eigenvalues, whose success the host asks for, as whitening does"

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if not self.eps >= 0:
            raise UserError("must not be negative", key="method.eps", value=self.eps, fix="1e-5")
        width = self.width(info, run)
        if self.groups < 1 or width % self.groups:
            raise UserError(
                f"{width} features make no such groups of one size",
                key="method.groups", value=self.groups, fix="a number that divides them",
            )  # fmt: skip
        features = width // self.groups
        if run.data.batch_size <= features or not run.data.drop_last:
            raise UserError(
                f"a group's {features} features are whitened over a batch, which must have more rows on each device",
                key="data.batch_size", value=run.data.batch_size,
                fix=f"data.batch_size={features + 1} or more and data.drop_last=true, or more method.groups",
            )  # fmt: skip
        if self.groups in (1, width):  # whose features are the same in any order
            check_dropout(self.name, info)
        return super().check(info, run)


class WhitenedCSE(Method):
    """(1); means and covariances are of each rank's own rows."""

    config_class = WhitenedCSEConfig
    config: WhitenedCSEConfig

    def __init__(
        self, encoder: SentenceEncoder, config: WhitenedCSEConfig, optimizer: OptimizerConfig
    ) -> None:
        super().__init__(encoder, config, optimizer)
        if encoder.dim % config.groups:
            raise UserError(
                f"{encoder.dim} features make no such groups of one size",
                key="method.groups", value=config.groups, fix="a number that divides them",
            )  # fmt: skip
        self.head = new_head(config.mlp, encoder.dim)

    @property
    def forward_passes(self) -> float:
        return float(VIEWS)

    def losses(self, batch: Batch) -> LossOutput:
        config, view = self.config, batch["sentence"]
        orders = torch.rand(VIEWS, self.encoder.dim, device=view["input_ids"].device).argsort(1)
        vectors = encode_views(self.encoder, [view] * VIEWS)
        white = [self.whitened(h, order) for h, order in zip(vectors, orders, strict=True)]
        z1, z2, z3 = self.head(torch.cat(white)).chunk(VIEWS)
        hashes = [config.in_batch.text_hashes(view)] * 2
        second, third = contrast((z1, z2), hashes, config), contrast((z1, z3), hashes, config)
        return LossOutput({"info_nce": second.loss, "third_view": third.loss}, second.stats)

    def whitened(self, vectors: Tensor, order: Tensor) -> Tensor:
        """SGW of ``[B, D]`` by the permutation ``order``."""
        return group_whitening(vectors, order, self.config.groups, self.config.eps)
