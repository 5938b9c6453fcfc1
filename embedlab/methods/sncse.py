"""SNCSE (arXiv 2201.05979): PromptBERT's two templates, and the negation of a sentence as a soft negative.

    L = N(z1, z2) + lambda mean_i (relu(d_i + alpha) + relu(-d_i - beta)),
    d_i = cos(z1_i, z3_i) - cos(z1_i, z2_i)                                                             (1)

z1 is of the sentence in the first template, z2 of it and z3 of its negation in the second: a negation is to be less
similar than the sentence itself by alpha to beta, and no less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.run import MethodConfig, RunConfig
from embedlab.config.template import Template
from embedlab.engine.module import Batch, Fields, LossOutput
from embedlab.errors import UserError
from embedlab.methods.contrast import check_dropout, contrast
from embedlab.methods.promptbert import PromptBERT, PromptBERTConfig
from embedlab.methods.simcse import joint_token_budget
from embedlab.objectives.soft_negative import bidirectional_margin, cosine_difference

_VIEWS = ("first", "second", "negation")


@dataclass(frozen=True)
class SNCSEConfig(PromptBERTConfig):
    kinds: ClassVar[tuple[str, ...]] = ("parallel",)
    """The sentence (source) and its negation (target)."""

    name: str = "sncse"
    lam: float = within(1e-3, least=0)
    """lambda (BERT; the release has 5e-4 for RoBERTa)."""
    alpha: float = 0.1
    beta: float = 0.3
    denoise: Literal["auto"] | bool = False
    eval_text: Literal["raw", "closed", "stopped"] = "raw"

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if run.template is None:
            raise UserError(
                "SNCSE needs a template around the sentence",
                key="template",
                value="none",
                fix="template=promptbert_bert_2 pooling=mask (RoBERTa: template=sncse_roberta and its"
                " method.second_template)",
            )
        if not 0 <= self.alpha <= self.beta:
            raise UserError(
                "a negation is less similar by alpha to beta",
                key="method.alpha",
                value=self.alpha,
                fix=f"0 to method.beta={self.beta}",
            )
        if self.denoise is not False:
            raise UserError(
                "SNCSE subtracts no template's vector",
                key="method.denoise",
                value=self.denoise,
                fix="method.denoise=false, or method=promptbert",
            )
        for key in ("denoise_dev", "hard_negative_weight"):
            if value := getattr(self, key):
                raise UserError("has no place in SNCSE", key=f"method.{key}", value=value, fix="leave it out")
        if self.second_template in (None, run.template):
            check_dropout(self.name, info)
        if self.second_template is not None:
            run.pooling.check(info, self.second_template, self.name)
        return super().check(info, run)


class SNCSE(PromptBERT):
    """(1), by one pass over the three views."""

    config_class = SNCSEConfig
    config: SNCSEConfig

    @classmethod
    def fields(cls, config: MethodConfig, roles: tuple[str, ...], template: Template | None) -> Fields:
        assert isinstance(config, SNCSEConfig)
        second = config.second_template or template
        sentence, negation = roles
        columns = zip(_VIEWS, (sentence, sentence, negation), (template, second, second), strict=True)
        return {view: (column, around) for view, column, around in columns}

    @property
    def forward_passes(self) -> float:
        return 1.0

    def losses(self, batch: Batch) -> LossOutput:
        config, last = self.config, len(self.templates) - 1
        tokens = [batch[v][part] for v in _VIEWS for part in ("input_ids", "attention_mask")]
        budget = joint_token_budget(batch[v] for v in _VIEWS)
        vectors = self.by_chunks(lambda *rows: self.pooled((0, last, last), rows, budget), *tokens)
        z1, z2, z3 = (self.head(v) for v in vectors)
        hashes = [config.in_batch.text_hashes(batch[v]) for v in _VIEWS[:2]]
        result = contrast((z1, z2), hashes, config)
        difference = cosine_difference(z1, z2, z3)
        margin = bidirectional_margin(difference, config.alpha, config.beta)
        stats = result.stats | {"negation": difference.mean()}
        return LossOutput({"info_nce": result.loss, "margin": config.lam * margin}, stats)
