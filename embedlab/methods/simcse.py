"""SimCSE (Gao, Yao and Chen 2021): dropout as augmentation, or NLI pairs with hard negatives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from embedlab.config.method import MethodConfig
from embedlab.engine.module import Batch, Fields, Method, Outcome
from embedlab.errors import UserError
from embedlab.methods.contrast import contrast, contrast_pairs

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.optimizer import OptimizerConfig
    from embedlab.config.pooling import PoolingConfig
    from embedlab.config.template import Template
    from embedlab.encoders.encoder import SentenceEncoder

VIEWS = {
    "wikipedia": ("sentence",),
    "nli": ("anchor", "positive", "negative"),
    "parallel": ("source", "target"),
}


@dataclass(frozen=True)
class SimCSEConfig(MethodConfig):
    name: str = "simcse"
    tau: float = 0.05
    mlp: Literal["train", "none"] = "train"
    """``train``: a new Linear + tanh on the sentence vector while training, dropped afterwards (the paper's choice
    for unsupervised models). A head that is kept is part of the pooling: ``pooling=cls_mlp mlp=none``."""
    hard_negative_weight: float = 0.0
    """Added to the logit of a sentence's own hard negative; 0 is the paper's alpha = 1."""
    mask_duplicates: bool = True
    """A candidate with the anchor's or its positive's text is no negative; False as released."""
    gather_negatives: bool = True
    """Negatives from all devices; False keeps each device to its own batch."""
    layout: Literal["rows", "pairs"] = "rows"
    """``rows``: a sentence's first view against all second ones. ``pairs``: every view against all others (NT-Xent),
    as in JTCSE's first stage."""

    def check(
        self, info: BackboneInfo, pooling: PoolingConfig, template: Template | None, data: str, in_views: bool
    ) -> list[str]:
        if not self.tau > 0:
            raise UserError("the temperature must be positive", key="method.tau", value=self.tau)
        if self.mlp not in ("train", "none"):
            raise UserError("unknown head", key="method.mlp", value=self.mlp, fix="train or none")
        if self.layout not in ("rows", "pairs"):
            raise UserError("unknown layout", key="method.layout", value=self.layout, fix="rows or pairs")
        if self.layout == "pairs" and data == "nli":
            raise UserError(
                "pairs have no place for hard negatives",
                key="method.layout",
                value=self.layout,
                fix="method.layout=rows, or data=parallel",
            )
        if in_views:
            raise UserError("contrastive views are single sentences", key="data.pack", fix="data.pack=null")
        if data == "wikipedia" and info.dropout == 0.0 and info.adapter_dropout == 0.0:
            raise UserError(
                "unsupervised SimCSE's two views differ by dropout alone, and this backbone has none",
                key="backbone.dropout",
                value=info.dropout,
                fix="backbone.dropout=0.1, or a method whose views differ by themselves",
            )
        warnings = []
        if self.mlp == "train" and pooling.name == "cls_mlp":
            warnings.append(
                "method.mlp=train puts a second head on pooling=cls_mlp; method.mlp=none was probably meant"
            )
        return warnings


class SimCSE(Method):
    """Each sentence against its second dropout view (equation 4), or against its pair and all hard negatives (5)."""

    config_class = SimCSEConfig
    config: SimCSEConfig
    can_unpad = True

    def __init__(
        self, encoder: SentenceEncoder, config: SimCSEConfig, optimizer: OptimizerConfig, step: str = "eager"
    ) -> None:
        super().__init__(encoder, config, optimizer, step)
        self.head = mlp_head(encoder.dim) if config.mlp == "train" else nn.Identity()
        self._views = 2.0

    @classmethod
    def fields(cls, config: MethodConfig, data: str, template: Template | None) -> Fields:
        return {view: (view, template) for view in VIEWS[data]}

    @property
    def passes(self) -> float:
        return self._views

    def losses(self, batch: Batch) -> Outcome:
        views = [v for v in ("sentence", "anchor", "source", "positive", "target", "negative") if v in batch]
        if views == ["sentence"]:
            views = ["sentence", "sentence"]
        self._views = 2.0 if views[0] == "sentence" else 1.0
        z = encode_views(self.encoder, [batch[v] for v in views], self.head)
        config = self.config
        ids = [batch[v].get("hash") if config.mask_duplicates else None for v in views]
        if config.layout == "pairs":
            found = contrast_pairs(z, config.tau, ids, config.gather_negatives)
        else:
            found = contrast(z, config.tau, ids, config.gather_negatives, config.hard_negative_weight)
        return Outcome({"info_nce": found.loss}, found.stats)


def mlp_head(width: int) -> nn.Sequential:
    """Linear + tanh with Hugging Face's initialisation, N(0, 0.02) and zero bias, as SimCSE's new MLP has."""
    linear = nn.Linear(width, width)
    nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(linear, nn.Tanh())


def encode_views(
    encoder: SentenceEncoder, views: list[dict[str, Any]], head: nn.Module | None = None
) -> list[Tensor]:
    """Vectors of several views, through ``head``, in one forward pass over all their rows, padded to the longest.

    One pass has half the launches of two, and two passes of one module break DDP where it has buffers.
    """
    length = max(v["input_ids"].shape[1] for v in views)
    ids = torch.cat([widen(v["input_ids"], length, encoder.tokenization.pad_id) for v in views])
    mask = torch.cat([widen(v["attention_mask"], length, 0) for v in views])
    vectors = encoder(ids, mask, joint_capacity(views))
    return list((vectors if head is None else head(vectors)).chunk(len(views)))


def joint_capacity(views: Iterable[dict[str, Any]]) -> int | None:
    """Tokens to compute for several views together; None: all cells, padding too (`Backbone.forward`)."""
    capacities = [v.get("capacity") for v in views]
    return None if None in capacities else sum(c for c in capacities if c is not None)


def widen(x: Tensor, length: int, value: int) -> Tensor:
    """``[B, L]`` padded on the right to ``[B, length]``."""
    return torch.nn.functional.pad(x, (0, length - x.shape[1]), value=value) if x.shape[1] < length else x
