"""PromptEOL, PromptSTH, PromptSUM (Jiang et al. 2023; Zhang et al. 2024) trained on two dropout passes.

The template decides which of them; with one of CSE-SFP's it is the two-pass method at equal prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from embedlab.config.backbone import BackboneInfo
from embedlab.config.run import RunConfig
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError
from embedlab.methods.contrast import ContrastConfig, contrast
from embedlab.methods.simcse import joint_token_budget


@dataclass(frozen=True)
class PromptEOLConfig(ContrastConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    can_unpad: ClassVar[bool] = True
    backbone_kind = "decoder"
    """The prompt is read at its last token, which a bidirectional encoder does not predict."""

    name: str = "prompteol"
    eval_text: Literal["closed", "raw"] = "closed"
    """Text to encode: see CSE-SFP."""

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        warnings = super().check(info, run)
        if run.template is None:
            raise UserError(
                "PromptEOL needs a prompt", key="template", value=None, fix="template=eol, sth or sum"
            )
        if info.dropout == 0.0 and info.adapter_dropout == 0.0:
            raise UserError(
                "the two passes differ by dropout alone, and neither backbone nor adapter has any",
                key="adapter.dropout",
                value=info.adapter_dropout,
                fix="adapter=lora adapter.dropout=0.05, or method=csesfp, whose views differ by themselves",
            )
        if info.dropout == 0.0:
            warnings.append(
                f"{info.model_type} has no dropout of its own: the two passes differ by the adapter's "
                f"({info.adapter_dropout}) alone, and not at all until its B matrices leave zero (at first "
                "the positive cosine is 1). method=csesfp does not depend on dropout."
            )
        return warnings


class PromptEOL(Method):
    """Each sentence against its second dropout pass; both are one call on 2B rows, as in the release."""

    config_class = PromptEOLConfig
    config: PromptEOLConfig
    forward_passes = 2.0

    def losses(self, batch: Batch) -> LossOutput:
        view, config = batch["sentence"], self.config
        twice = torch.cat([view["input_ids"]] * 2), torch.cat([view["attention_mask"]] * 2)
        budget = joint_token_budget([view] * 2)
        hashes = [config.in_batch.text_hashes(view)] * 2
        result = contrast(self.encoder(*twice, budget).chunk(2), hashes, config)
        return LossOutput({"info_nce": result.loss}, result.stats)
