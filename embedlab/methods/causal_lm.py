"""Next-token prediction on packed text (Radford et al. 2018): pretrains a small decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from embedlab.config.method import MethodConfig
from embedlab.engine.module import Batch, Fields, Method, Outcome
from embedlab.errors import UserError
from embedlab.objectives.causal_lm import causal_lm, next_tokens
from embedlab.objectives.masked_lm import IGNORED

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.pooling import PoolingConfig
    from embedlab.config.template import Template


@dataclass(frozen=True)
class CausalLMConfig(MethodConfig):
    name: str = "causal_lm"

    def check(
        self, info: BackboneInfo, pooling: PoolingConfig, template: Template | None, data: str, in_views: bool
    ) -> list[str]:
        if info.kind != "decoder":
            raise UserError(
                "an encoder sees the tokens that it would predict",
                key="method",
                value=self.name,
                fix="method=masked_lm",
            )
        if data != "wikipedia":
            raise UserError("causal_lm reads running text", key="data", value=data, fix="data=wikipedia")
        if template is not None:
            raise UserError("running text has no template", key="template", fix="template=none")
        return []


class CausalLM(Method):
    """Cross-entropy of each token given those before it."""

    config_class = CausalLMConfig
    config: CausalLMConfig
    head_kind = "causal_lm"

    @classmethod
    def fields(cls, config: MethodConfig, data: str, template: Template | None) -> Fields:
        return {"sentence": ("sentence", None)}

    def losses(self, batch: Batch) -> Outcome:
        ids, mask = batch["sentence"]["input_ids"], batch["sentence"]["attention_mask"]
        hidden = self.encoder.backbone(ids, mask)[-1]
        head = self.encoder.backbone.head
        assert head is not None
        logits = head(hidden)
        labels = next_tokens(ids, mask)
        loss = causal_lm(logits, labels)
        with torch.no_grad():
            counted = labels != IGNORED
            hits = (logits.argmax(-1) == labels) & counted
            accuracy = hits.sum() / counted.sum().clamp(min=1)
        return Outcome({"causal_lm": loss}, {"accuracy": accuracy})
