"""PromptEOL, PromptSTH, PromptSUM (Jiang et al. 2023; Zhang et al. 2024) trained on two dropout passes.

The template decides which of them; with one of CSE-SFP's it is the two-pass method at equal prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from embedlab.config.method import MethodConfig, check_eval_text, check_tau
from embedlab.engine.module import Batch, Fields, Method, Outcome
from embedlab.errors import UserError
from embedlab.methods.contrast import contrast_views

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.pooling import PoolingConfig
    from embedlab.config.template import Template


@dataclass(frozen=True)
class PromptEOLConfig(MethodConfig):
    name: str = "prompteol"
    tau: float = 0.05
    mask_duplicates: bool = True
    """A candidate with the anchor's text is no negative; False as released."""
    gather_negatives: bool = True
    """Negatives from all devices; False keeps each device to its own batch."""
    eval_text: Literal["closed", "raw"] = "closed"
    """Text to encode: see CSE-SFP."""

    @property
    def preparation(self) -> str:
        return self.eval_text

    def check(
        self, info: BackboneInfo, pooling: PoolingConfig, template: Template | None, data: str, in_views: bool
    ) -> list[str]:
        check_eval_text(self.eval_text)
        check_tau(self.tau)
        if info.kind != "decoder":
            raise UserError(
                "this prompt is read at its last token, which a bidirectional encoder does not predict",
                key="backbone",
                value=info.model_type,
                fix="a decoder (backbone=smollm2), or method=promptbert",
            )
        if template is None:
            raise UserError(
                "PromptEOL needs a prompt", key="template", value=None, fix="template=eol, sth or sum"
            )
        if data != "wikipedia" or in_views:
            raise UserError(
                "the two views are passes of one sentence",
                key="data",
                value=data,
                fix="data=wikipedia data.pack=null",
            )
        if info.dropout == 0.0 and info.adapter_dropout == 0.0:
            raise UserError(
                "the two passes differ by dropout alone, and neither backbone nor adapter has any",
                key="adapter.dropout",
                value=info.adapter_dropout,
                fix="adapter=lora adapter.dropout=0.05, or method=csesfp, whose views differ by themselves",
            )
        if info.dropout == 0.0:
            return [
                f"{info.model_type} has no dropout of its own: the two passes differ by the adapter's "
                f"({info.adapter_dropout}) alone, and not at all until its B matrices leave zero (at first "
                "the positive cosine is 1). method=csesfp does not depend on dropout."
            ]
        return []


class PromptEOL(Method):
    """Each sentence against its second dropout pass; both are one call on 2B rows, as in the release."""

    config_class = PromptEOLConfig
    config: PromptEOLConfig

    @classmethod
    def fields(cls, config: MethodConfig, data: str, template: Template | None) -> Fields:
        return {"sentence": ("sentence", template)}

    @property
    def passes(self) -> float:
        return 2.0

    def losses(self, batch: Batch) -> Outcome:
        view, config = batch["sentence"], self.config
        twice = torch.cat([view["input_ids"]] * 2), torch.cat([view["attention_mask"]] * 2)
        anchors, positives = self.encoder(*twice).chunk(2)
        ids = view.get("hash") if config.mask_duplicates else None
        found = contrast_views(anchors, positives, config.tau, ids, config.gather_negatives)
        return Outcome({"info_nce": found.loss}, found.stats)
