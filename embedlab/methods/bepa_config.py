"""Settings of BEPA (BERT-JEPA, arXiv 2601.00366), with what they may be combined with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from embedlab.config.method import MethodConfig, check_tau
from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.pooling import PoolingConfig
    from embedlab.config.run import RunConfig
    from embedlab.config.template import Template

CHOICES: dict[str, tuple[str, ...]] = {
    "mlm_pack": ("mono", "bi"),
    "align_input": ("separate_clean", "packed_masked", "packed_blockmask"),
    "loss": ("infonce", "mse", "cosine", "vicreg", "sigreg"),
    "predictor": ("identity", "linear", "mlp"),
    "target": ("shared", "stopgrad", "ema"),
    "horizon": ("opt", "micro"),
}
SHUT_OFF = ("bert", "distilbert", "roberta", "xlm-roberta", "camembert", "electra")
"""Architectures that take a mask of query and key, see everything it allows, and take positions."""


@dataclass(frozen=True)
class BEPAConfig(MethodConfig):
    name: str = "bepa"
    lam: float = 1.0
    """lambda, the weight of the alignment beside the masked language modelling. 0: the control of the same data and
    steps without alignment (``mlm_pack=bi`` is then TLM); no alignment vectors are computed."""
    mlm_pack: Literal["mono", "bi"] = "mono"
    """``mono``: each sentence alone, an exact 15 % masked. ``bi``: both in one row, each token masked by chance."""
    mlm_prob: float = 0.15
    align_input: Literal["separate_clean", "packed_masked", "packed_blockmask"] = "separate_clean"
    """What the alignment vectors are of: each sentence alone and unmasked; the packed row with the other side masked
    (the authors' first design, which collapsed); the packed row with the other side out of sight."""
    loss: Literal["infonce", "mse", "cosine", "vicreg", "sigreg"] = "infonce"
    tau: float = 0.07
    mask_self: bool = True
    """An anchor is no candidate of its own; False as released."""
    mask_duplicates: bool = True
    """A candidate with the anchor's or its translation's text is no negative; False as released."""
    within_lang_neg: bool = True
    """Candidates of the anchor's own side are negatives too."""
    predictor: Literal["identity", "linear", "mlp"] = "identity"
    target: Literal["shared", "stopgrad", "ema"] = "shared"
    """What a predicted vector is held against: the other side's vector with its gradient, without, or that of a
    moving average of the encoder."""
    ema: float = 0.999
    """Of its weights, what an update keeps."""
    gather_negatives: bool = True
    """Negatives (and the statistics of vicreg and sigreg) from all devices; False keeps each to its own batch."""
    vicreg_weights: tuple[float, float, float] = (25.0, 25.0, 1.0)
    """Of the squared distance, the variance and the covariance term."""
    sigreg_weight: float = 0.1
    """Of SIGReg beside the squared distance."""
    sigreg_slices: int = 256
    horizon: Literal["opt", "micro"] = "opt"
    """What the learning-rate schedule counts to its end: updates, or, as released, batches while it moves on by
    updates, so that with accumulation it stops far from its end."""

    @property
    def needs_others(self) -> bool:
        return self.loss == "infonce" and self.lam > 0

    def check(
        self, info: BackboneInfo, pooling: PoolingConfig, template: Template | None, data: str, in_views: bool
    ) -> list[str]:
        for key, known in CHOICES.items():
            if getattr(self, key) not in known:
                raise UserError(
                    "unknown choice", key=f"method.{key}", value=getattr(self, key), fix=" or ".join(known)
                )
        self._check_numbers()
        if info.kind != "encoder":
            raise UserError(
                "BEPA fills masks, and a decoder has none", key="method", value=self.name, fix="method=csesfp"
            )
        if not info.has_mask_token:
            raise UserError("the tokenizer has no mask token", key="backbone", value=info.model_type)
        if data != "parallel" or in_views:
            raise UserError(
                "BEPA takes translation pairs", key="data", value=data, fix="data=parallel data.pack=null"
            )
        if template is not None:
            raise UserError("BEPA's sentences have no template", key="template", fix="template=none")
        if self.align_input == "packed_blockmask" and info.model_type not in SHUT_OFF:
            raise UserError(
                "this architecture takes no mask of query and key",
                key="method.align_input",
                value=self.align_input,
                fix="method.align_input=separate_clean, which is the same",
            )
        return self._warnings()

    def _check_numbers(self) -> None:
        check_tau(self.tau)
        if not self.lam >= 0:
            raise UserError("the weight must not be negative", key="method.lam", value=self.lam)
        for key, value in (("mlm_prob", self.mlm_prob), ("ema", self.ema)):
            if not 0 < value < 1:
                raise UserError("must lie between 0 and 1", key=f"method.{key}", value=value)
        weights: Any = self.vicreg_weights
        if not isinstance(weights, tuple) or len(weights) != 3 or not all(w >= 0 for w in weights):
            raise UserError("three weights from 0 on", key="method.vicreg_weights", value=weights)
        if not self.sigreg_weight >= 0:
            raise UserError(
                "the weight must not be negative", key="method.sigreg_weight", value=self.sigreg_weight
            )
        if self.sigreg_slices < 1:
            raise UserError("must be at least 1", key="method.sigreg_slices", value=self.sigreg_slices)

    def _warnings(self) -> list[str]:
        found = []
        if self.lam > 0 and self.loss in ("mse", "cosine") and self.target == "shared":
            found.append(
                f"method.loss={self.loss} has no negatives and method.target=shared no asymmetry: one vector for "
                "every sentence satisfies it, and only the masked language modelling stands against that"
            )
        if self.lam > 0 and self.align_input == "packed_masked":
            found.append("method.align_input=packed_masked collapsed for BEPA's authors (specification A1.5)")
        return found

    def check_run(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        longest = run.data.max_length
        packs = self.mlm_pack == "bi" or (self.lam > 0 and self.align_input != "separate_clean")
        if packs and info.max_positions is not None and (longest is None or 2 * longest > info.max_positions):
            raise UserError(
                f"two sentences of that length do not fit the model's {info.max_positions} positions together",
                key="data.max_length",
                value=longest,
                fix=f"data.max_length={info.max_positions // 2} at most, or method.mlm_pack=mono",
            )
        if self.align_input == "packed_blockmask" and run.backbone.attention == "flash_attention_2":
            raise UserError(
                "this kernel takes no mask of query and key",
                key="backbone.attention",
                value=run.backbone.attention,
                fix="backbone.attention=sdpa",
            )
        if self.lam > 0 and self.target == "ema" and run.trainer.strategy.startswith("fsdp"):
            raise UserError(
                "the moving average is of whole weights, and this strategy shares them out",
                key="trainer.strategy",
                value=run.trainer.strategy,
                fix="trainer=ddp, or method.target=stopgrad",
            )
        return []
