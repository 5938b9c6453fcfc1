"""MixCSE (Zhang et al., AAAI 2022): SimCSE with a hard negative a sentence, mixed from its positive and another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError
from embedlab.methods.contrast import ContrastConfig, check_dropout
from embedlab.methods.heads import Head, new_head
from embedlab.methods.simcse import encode_views
from embedlab.objectives.more_negatives import mix_nce, released_mix_nce
from embedlab.objectives.softmax import Contrast


@dataclass(frozen=True)
class MixCSEConfig(ContrastConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    can_unpad: ClassVar[bool] = True

    name: str = "mixcse"
    lam: float = 0.2
    """lambda, the share of a sentence's own view in its mixed negative."""
    form: Literal["paper", "released"] = "paper"
    """``released``: every anchor has the mixtures of all, of vectors that are not of length 1, and a second block of
    mixed anchors; a text that comes again is always a negative; scoring while training is with the head."""
    mlp: Head = "train"

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if not 0 <= self.lam <= 1:
            raise UserError("a share lies between 0 and 1", key="method.lam", value=self.lam, fix="0.2")
        check_dropout(self.name, info)
        return super().check(info, run)


class MixCSE(Method):
    """Two dropout views; negatives are the others of the batch and a mixture of the positive with its neighbour."""

    config_class = MixCSEConfig
    config: MixCSEConfig

    def __init__(self, encoder: SentenceEncoder, config: MixCSEConfig, optimizer: OptimizerConfig) -> None:
        super().__init__(encoder, config, optimizer)
        self.head = new_head(config.mlp, encoder.dim)

    @property
    def forward_passes(self) -> float:
        return 2.0

    def losses(self, batch: Batch) -> LossOutput:
        config, view = self.config, batch["sentence"]
        z1, z2 = encode_views(self.encoder, [view, view], self.head)
        candidates, offset = config.in_batch.candidates, config.in_batch.offset(z1)
        hashes = config.in_batch.text_hashes(view)
        texts, all_positives = candidates(hashes), candidates(z2)
        following = config.in_batch.following(all_positives)

        def paper(a: Tensor, b: Tensor) -> Contrast:
            return mix_nce(
                a, b, following, config.tau, config.lam,
                offset=offset, anchor_hashes=hashes, candidate_hashes=texts,
            )  # fmt: skip

        def released(a: Tensor, b: Tensor, all_anchors: Tensor) -> Contrast:
            return released_mix_nce(a, b, all_anchors, following, config.tau, config.lam, offset=offset)

        if config.form == "released":
            result = config.matryoshka(released, z1, all_positives, candidates(z1))
        else:
            result = config.matryoshka(paper, z1, all_positives)
        return LossOutput({"mix_nce": result.loss}, result.stats)

    def dev_vectors(self, vectors: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        if self.config.form == "paper":
            return vectors
        scored: Tensor = self.head(vectors)
        return scored
