"""Masked language modelling on packed text (BERT, Devlin et al. 2019): pretraining, and the control of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from embedlab.errors import UserError
from embedlab.methods.base import Batch, Fields, Method, Outcome
from embedlab.methods.config import MethodConfig
from embedlab.objectives.masked_lm import IGNORED, mask_tokens, masked_lm

if TYPE_CHECKING:
    from embedlab.backbones import BackboneInfo
    from embedlab.encoder import SentenceEncoder
    from embedlab.pooling import PoolingConfig
    from embedlab.tokenization import Template
    from embedlab.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class MaskedLMConfig(MethodConfig):
    name: str = "masked_lm"
    probability: float = 0.15
    """Share of tokens to predict; of them 80 % masked, 10 % replaced, 10 % kept."""
    rule: Literal["bernoulli", "exact"] = "bernoulli"

    def check(
        self, info: BackboneInfo, pooling: PoolingConfig, template: Template | None, data: str, in_views: bool
    ) -> list[str]:
        if not 0 < self.probability < 1:
            raise UserError("must lie between 0 and 1", key="method.probability", value=self.probability)
        if self.rule not in ("bernoulli", "exact"):
            raise UserError("unknown rule", key="method.rule", value=self.rule, fix="bernoulli or exact")
        if info.kind != "encoder":
            raise UserError(
                "a decoder has no masks to fill", key="method", value=self.name, fix="method=causal_lm"
            )
        if not info.has_mask_token:
            raise UserError("the tokenizer has no mask token", key="backbone", value=info.model_type)
        if data != "wikipedia":
            raise UserError("masked_lm reads running text", key="data", value=data, fix="data=wikipedia")
        if template is not None:
            raise UserError("running text has no template", key="template", fix="template=none")
        return []


class MaskedLM(Method):
    """Cross-entropy at the selected positions only: the vocabulary projection of the others is not computed."""

    config_class = MaskedLMConfig
    config: MaskedLMConfig
    head_kind = "masked_lm"

    def __init__(
        self,
        encoder: SentenceEncoder,
        config: MaskedLMConfig,
        optimizer: OptimizerConfig,
        step: str = "eager",
    ) -> None:
        super().__init__(encoder, config, optimizer, step)
        tokenizer = encoder.tokenizer
        special = torch.tensor(sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}))
        self.register_buffer("special_ids", special, persistent=False)

    @classmethod
    def fields(cls, config: MethodConfig, data: str, template: Template | None) -> Fields:
        return {"sentence": ("sentence", None)}

    def losses(self, batch: Batch) -> Outcome:
        ids, mask = batch["sentence"]["input_ids"], batch["sentence"]["attention_mask"]
        maskable = mask.bool() & ~torch.isin(ids, self.special_ids)
        tokenizer = self.encoder.tokenizer
        masked = mask_tokens(
            ids, maskable, tokenizer.mask_token_id, len(tokenizer), self.config.probability, self.config.rule
        )
        hidden = self.encoder.backbone(masked.input_ids, mask)[-1]
        head = self.encoder.backbone.head
        assert head is not None
        logits = head(hidden.flatten(0, 1)[masked.positions])
        loss = masked_lm(logits, masked.labels)
        with torch.no_grad():
            counted = masked.labels != IGNORED
            hits = (logits.argmax(-1) == masked.labels) & counted
            accuracy = hits.sum() / counted.sum().clamp(min=1)
        return Outcome({"masked_lm": loss}, {"accuracy": accuracy})
