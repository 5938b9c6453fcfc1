"""A backbone with a head: one label a row, or a span of its tokens."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from embedlab.errors import UserError
from embedlab.evaluation.finetune.buckets import Batch
from embedlab.evaluation.finetune.config import Vector

if TYPE_CHECKING:
    from embedlab.backbones import Backbone
    from embedlab.encoders.encoder import SentenceEncoder


def sentence_encoder(encoder: object) -> SentenceEncoder:
    """The encoder behind what a suite gets.

    Raises UserError for an encoder of several towers or one of another package: there is no backbone to train.
    """
    from embedlab.encoders.encoder import SentenceEncoder

    inner = getattr(encoder, "encoder", encoder)
    if not isinstance(inner, SentenceEncoder):
        raise UserError(
            "fine-tuning needs an encoder with one backbone",
            key="ckpt",
            value=type(inner).__name__,
            fix="an encoder folder, a run folder or a .ckpt of a single tower",
        )
    return inner


def trainable_copy(encoder: SentenceEncoder) -> Backbone:
    """A copy of the backbone in float32, all weights trained, without its language-modelling head; an adapter
    is added to the weights first."""
    backbone = copy.deepcopy(encoder.merged().backbone)
    backbone.head = None
    return backbone.float().requires_grad_(True)


class Classifier(nn.Module):
    """The head of Hugging Face's RoBERTa classifiers: dropout, dense + tanh, dropout, linear.

    vector: what the head reads: "first", the first token (of a decoder the last real one), or "mean".
    """

    def __init__(self, backbone: Backbone, classes: int, dropout: float, vector: Vector = "first") -> None:
        super().__init__()
        self.backbone = backbone
        self.vector = vector
        width = backbone.info.width
        self.head = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(width, classes),
        )
        _initialise(self.head)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, classes]."""
        mask = batch["attention_mask"]
        (hidden,) = self.backbone(batch["input_ids"], mask)
        if self.vector == "mean":
            weight = mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * weight).sum(dim=1) / weight.sum(dim=1).clamp_min(1)
        elif self.backbone.info.kind == "decoder":
            pooled = hidden[torch.arange(len(mask), device=mask.device), mask.sum(dim=1) - 1]
        else:
            pooled = hidden[:, 0]
        logits: Tensor = self.head(pooled)
        return logits

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy with batch["label"] [B], in float32."""
        return nn.functional.cross_entropy(self(batch).float(), batch["label"])


class SpanReader(nn.Module):
    """Start and end scores of each token (BERT's SQuAD head)."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.info.width, 2)
        _initialise(self.head)

    def forward(self, batch: Batch) -> Tensor:
        """Scores [B, L, 2] in float32, -inf at padding."""
        (hidden,) = self.backbone(batch["input_ids"], batch["attention_mask"])
        padding = batch["attention_mask"].unsqueeze(-1) == 0
        scores: Tensor = self.head(hidden).float().masked_fill(padding, float("-inf"))
        return scores

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy over tokens with batch["span"] [B, 2], the positions of first and last token."""
        return nn.functional.cross_entropy(self(batch), batch["span"])


def _initialise(head: nn.Module) -> None:
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
