"""CSE-SFP (Zhang, Song and Li 2025, arXiv 2505.00389): two views of a sentence from one pass of a decoder.

A sentence stands in a prompt of two stages, ``prefix x mid suffix``. With H the last hidden states of one forward
pass, Rep1 = H at the last token of ``mid`` and Rep2 = H at the last token of ``suffix``, and

    L = -(1/N) sum_i log exp(cos(Rep2_i, Rep1_i) / tau) / sum_j exp(cos(Rep2_i, Rep1_j) / tau)      (1)

with tau = 0.05. What is encoded afterwards is Rep2. (Numbers are this file's; the procedure is that of the release.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.run import RunConfig
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError
from embedlab.methods.contrast import ContrastConfig, contrast
from embedlab.pooling.base import mark_index
from embedlab.pooling.marked import Marked, up_to


@dataclass(frozen=True)
class CSESFPConfig(ContrastConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    can_unpad: ClassVar[bool] = True
    backbone_kind = "decoder"
    """Rep1 must not have seen the second stage."""

    name: str = "csesfp"
    anchor: Literal["rep2", "rep1", "symmetric"] = "rep2"
    """The stage whose vectors are the rows of the softmax; ``symmetric``: the mean of both directions."""
    eval_text: Literal["closed", "raw"] = "closed"
    """Text to encode: ``closed`` ends each sentence with a full stop and has no double quotes (as released);
    ``raw`` as it is. Training text is always as it is."""

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        template = run.template
        warnings = super().check(info, run)
        if template is None or not {"rep1", "rep2"} <= set(template.marks):
            raise UserError(
                "CSE-SFP needs a template of two stages, with {rep1} and {rep2} at their ends",
                key="template",
                value=template.text if template else None,
                fix="template=eol_sum, sth_sum or sth_sum_also",
            )
        if template.marks.index("rep1") > template.marks.index("rep2"):
            fix = "{rep1} before {rep2}"
            raise UserError("{rep1} ends the first stage", key="template.text", value=template.text, fix=fix)
        return warnings

    def width(self, info: BackboneInfo, run: RunConfig) -> int:
        return info.width  # Rep1 and Rep2 are contrasted, whichever of them a pooling joins


class CSESFP(Method):
    """Each sentence's second stage against the first stages of the batch, as the authors' release does it."""

    config_class = CSESFPConfig
    config: CSESFPConfig

    def losses(self, batch: Batch) -> LossOutput:
        view, config = batch["sentence"], self.config
        stages = partial(self.stages, capacity=view.get("token_budget"))
        rep2, rep1 = self.by_chunks(stages, view["input_ids"], view["attention_mask"])
        hashes = [config.in_batch.text_hashes(view)] * 2
        anchor, other = (rep1, rep2) if config.anchor == "rep1" else (rep2, rep1)
        result = contrast([anchor, other], hashes, config)  # (1)
        loss = result.loss
        if config.anchor == "symmetric":
            loss = (loss + contrast([other, anchor], hashes, config).loss) / 2
        return LossOutput({"info_nce": loss}, result.stats)

    def stages(
        self, input_ids: Tensor, attention_mask: Tensor, capacity: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rep2 and Rep1 ``[B, D]`` of one pass: the pooling over the tokens up to each mark.

        For the poolings that read marks at inference, and for ``last``, that is the marked token. With a `capacity`
        that many tokens are computed instead of B x L (`Backbone.forward`).
        """
        encoder = self.encoder
        pooling, marks = encoder.pooling, encoder.tokenization.marks
        both = ("rep2", "rep1")
        if isinstance(pooling, Marked) and encoder.backbone.reads_one(input_ids.device, capacity is not None):
            at = torch.stack([mark_index(attention_mask, marks, m) for m in both], 1)
            states = encoder.backbone(input_ids, attention_mask, capacity=capacity, position=at)[0]
            return states[:, 0], states[:, 1]
        hidden = encoder.backbone(
            input_ids, attention_mask, all_layers=pooling.needs_all_layers, capacity=capacity
        )
        if isinstance(pooling, Marked):
            rep2, rep1 = (pooling.at(hidden, attention_mask, marks, m) for m in both)
        else:
            rep2, rep1 = (pooling(hidden, up_to(attention_mask, marks, m), {}) for m in both)
        return rep2, rep1
