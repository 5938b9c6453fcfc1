"""SimCSE (Gao, Yao and Chen 2021): dropout as augmentation, or NLI pairs with hard negatives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from embedlab.config.backbone import BackboneInfo
from embedlab.config.data import kind_name
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.data.kinds import data_kind
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError
from embedlab.methods.contrast import ContrastConfig, check_dropout, contrast, contrast_pairs
from embedlab.methods.heads import Head, new_head


@dataclass(frozen=True)
class SimCSEConfig(ContrastConfig):
    can_unpad: ClassVar[bool] = True

    name: str = "simcse"
    mlp: Head = "train"
    """``train``: a new Linear + tanh on the sentence vector while training, dropped afterwards (the paper's choice
    for unsupervised models); ``bn2``: DiffCSE's projector likewise. A head that is kept is part of the pooling:
    ``pooling=cls_mlp mlp=none``."""
    hard_negative_weight: float = 0.0
    """Added to the logit of a sentence's own hard negative; 0 is the paper's alpha = 1."""
    layout: Literal["rows", "pairs"] = "rows"
    """``rows``: a sentence's first view against all second ones. ``pairs``: every view against all others (NT-Xent),
    as in JTCSE's first stage."""

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        warnings = super().check(info, run)
        if self.layout == "pairs" and data_kind(run.data.name).has_negatives:
            raise UserError(
                "pairs have no place for hard negatives",
                key="method.layout",
                value=self.layout,
                fix="method.layout=rows, or data=parallel",
            )
        if kind_name(run.data.name) == "sentences":
            check_dropout(self.name, info)
        if self.mlp == "train" and run.pooling.has_head:
            warnings.append(
                f"method.mlp=train puts a second head on pooling={run.pooling.name}; method.mlp=none was probably "
                "meant"
            )
        return warnings


class SimCSE(Method):
    """Each sentence against its second dropout view (equation 4), or against its pair and all hard negatives (5)."""

    config_class = SimCSEConfig
    config: SimCSEConfig

    def __init__(self, encoder: SentenceEncoder, config: SimCSEConfig, optimizer: OptimizerConfig) -> None:
        super().__init__(encoder, config, optimizer)
        self.head = new_head(config.mlp, encoder.dim)
        self._views_a_row = 2.0

    @property
    def forward_passes(self) -> float:
        return self._views_a_row

    def losses(self, batch: Batch) -> LossOutput:
        config = self.config
        names = [v for v in ("sentence", "anchor", "source", "positive", "target", "negative") if v in batch]
        self._views_a_row = 2.0 if names == ["sentence"] else 1.0
        views = [batch[v] for v in (names if len(names) > 1 else names * 2)]
        z = encode_views(self.encoder, views, self.head)
        hashes = [config.in_batch.text_hashes(v) for v in views]
        if config.layout == "pairs":
            result = contrast_pairs(z, hashes, config)
        else:
            result = contrast(z, hashes, config, config.hard_negative_weight)
        return LossOutput({"info_nce": result.loss}, result.stats)


def encode_views(
    encoder: SentenceEncoder, views: list[dict[str, Any]], head: nn.Module | None = None
) -> list[Tensor]:
    """Vectors of several views, through ``head``, in one forward pass over all their rows, padded to the longest.

    One pass has half the launches of two, and two passes of one module break DDP where it has buffers.

    Args:
        encoder: of all views.
        views: ``input_ids`` and ``attention_mask`` ``[B, L]`` of each.
        head: after the encoder.

    Returns:
        ``[B, D]`` of each view.
    """
    vectors = encoder(*stacked(views, encoder.tokenization.pad_id), joint_token_budget(views))
    return list((vectors if head is None else head(vectors)).chunk(len(views)))


def stacked(views: Iterable[dict[str, Any]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask ``[V * B, L]`` of several views, the first on top, padded on the right to the longest."""
    return widened([v["input_ids"] for v in views], pad_id), widened([v["attention_mask"] for v in views], 0)


def widened(parts: list[Tensor], value: int) -> Tensor:
    """``[B, L_i]`` each to ``[V * B, L]``, padded on the right to the longest."""
    length = max(x.shape[1] for x in parts)
    pad = torch.nn.functional.pad
    return torch.cat(
        [pad(x, (0, length - x.shape[1]), value=value) if x.shape[1] < length else x for x in parts]
    )


def joint_token_budget(views: Iterable[dict[str, Any]]) -> int | None:
    """Tokens to compute for several views together; None: all of them, padding too (`Backbone.forward`)."""
    budgets = [v.get("token_budget") for v in views]
    return None if None in budgets else sum(b for b in budgets if b is not None)
