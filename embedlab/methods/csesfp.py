"""CSE-SFP (Zhang, Song and Li 2025, arXiv 2505.00389): two views of a sentence from one pass of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from embedlab.config.method import MethodConfig, check_eval_text, check_tau
from embedlab.engine.module import Batch, Fields, Method, Outcome
from embedlab.errors import UserError
from embedlab.methods.contrast import contrast_views
from embedlab.pooling.marked import Marked, up_to

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.pooling import PoolingConfig
    from embedlab.config.template import Template


@dataclass(frozen=True)
class CSESFPConfig(MethodConfig):
    name: str = "csesfp"
    tau: float = 0.05
    anchor: Literal["rep2", "rep1", "symmetric"] = "rep2"
    """The stage whose vectors are the rows of the softmax; ``symmetric``: the mean of both directions."""
    mask_duplicates: bool = True
    """A candidate with the anchor's text is no negative; False as released."""
    gather_negatives: bool = True
    """Negatives from all devices; False keeps each device to its own batch."""
    eval_text: Literal["closed", "raw"] = "closed"
    """Text to encode: ``closed`` ends each sentence with a full stop and has no double quotes (as released);
    ``raw`` as it is. Training text is always as it is."""

    @property
    def preparation(self) -> str:
        return self.eval_text

    def check(
        self, info: BackboneInfo, pooling: PoolingConfig, template: Template | None, data: str, in_views: bool
    ) -> list[str]:
        check_eval_text(self.eval_text)
        check_tau(self.tau)
        if self.anchor not in ("rep2", "rep1", "symmetric"):
            raise UserError(
                "unknown anchor", key="method.anchor", value=self.anchor, fix="rep2, rep1 or symmetric"
            )
        if info.kind != "decoder":
            raise UserError(
                "CSE-SFP reads Rep1 before the second stage is seen, and this backbone looks both ways",
                key="backbone",
                value=info.model_type,
                fix="a decoder (backbone=smollm2), or method=simcse or promptbert",
            )
        if template is None or not {"rep1", "rep2"} <= set(template.marks):
            raise UserError(
                "CSE-SFP needs a template of two stages, with {rep1} and {rep2} at their ends",
                key="template",
                value=template.text if template else None,
                fix="template=eol_sum, sth_sum or sth_sum_also",
            )
        if template.marks.index("rep1") > template.marks.index("rep2"):
            raise UserError("{rep1} ends the first stage", key="template.text", value=template.text)
        if data != "wikipedia" or in_views:
            raise UserError(
                "CSE-SFP takes single sentences", key="data", value=data, fix="data=wikipedia data.pack=null"
            )
        return []


class CSESFP(Method):
    """Each sentence's second stage against the first stages of the batch, as the authors' release does it."""

    config_class = CSESFPConfig
    config: CSESFPConfig

    @classmethod
    def fields(cls, config: MethodConfig, data: str, template: Template | None) -> Fields:
        return {"sentence": ("sentence", template)}

    def losses(self, batch: Batch) -> Outcome:
        view, config = batch["sentence"], self.config
        rep2, rep1 = self.by_chunks(self.stages, view["input_ids"], view["attention_mask"])
        ids = view.get("hash") if config.mask_duplicates else None
        anchor, other = (rep1, rep2) if config.anchor == "rep1" else (rep2, rep1)
        found = contrast_views(anchor, other, config.tau, ids, config.gather_negatives)
        loss = found.loss
        if config.anchor == "symmetric":
            loss = (loss + contrast_views(other, anchor, config.tau, ids, config.gather_negatives).loss) / 2
        return Outcome({"info_nce": loss}, found.stats)

    def stages(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Rep2 and Rep1 ``[B, D]`` of one pass: the pooling over the tokens up to each mark.

        For the poolings that read marks at inference, and for ``last``, that is the marked token.
        """
        encoder = self.encoder
        pooling, marks = encoder.pooling, encoder.tokenization.marks
        hidden = encoder.backbone(input_ids, attention_mask, all_layers=pooling.needs_all_layers)
        if isinstance(pooling, Marked):
            rep2, rep1 = (pooling.at(hidden, attention_mask, marks, m) for m in ("rep2", "rep1"))
        else:
            rep2, rep1 = (pooling(hidden, up_to(attention_mask, marks, m), {}) for m in ("rep2", "rep1"))
        return rep2, rep1
