"""Settings of JTCSE (arXiv 2505.02366) and TNCSE (AAAI 2025), with what they may be combined with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from embedlab.config.method import MethodConfig, check_tau
from embedlab.encoders.cross_attention import Route, cross_layers
from embedlab.errors import UserError
from embedlab.objectives.modulus import FLOOR, Clamp

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.pooling import PoolingConfig
    from embedlab.config.template import Template

TERMS = ("nce", "cross", "side", "ictm")


@dataclass(frozen=True)
class JTCSEConfig(MethodConfig):
    name: str = "jtcse"
    tower1: str | None = None
    """Stage-1 checkpoint of a tower: an encoder folder or a run's folder. None: the backbone itself."""
    tower2: str | None = None
    terms: tuple[str, ...] = TERMS
    """``nce``: X(u, u) + X(v, v). ``cross``: X(u, v), of the main streams. ``side``: X(s, t), of the side
    streams. ``ictm``: the modulus constraint. None at all: the towers' sum is scored and exported as it is."""
    tau: float = 0.05
    icnce: Literal["coin", "symmetric", "fixed"] = "coin"
    """Which tower gives the anchors across towers: one coin a step (as released), both (their mean), the first."""
    n_ca: int = 3
    """Cross-attention layers (3: the paper's best; 6: the released default)."""
    wiring: Literal["side", "instream"] = "side"
    """``instream``: the exchange replaces the layers of the main streams while training."""
    route: Route = "query_owner"
    tmc_scale: float = 0.5
    """1/2 as released; 1 in TNCSE's printed formula."""
    tmc_use: Literal["pooler", "last_hidden"] = "pooler"
    """Whose modulus: of the pooler's output (dense + tanh), or of the sentence vector itself."""
    clamp: Clamp = "range"
    floor: float = FLOOR
    pooler: Literal["auto", "new"] = "auto"
    """``auto``: the checkpoint's, a new one where it has none."""
    pooler_seeds: tuple[int, int] = (1000, 2000)
    """Of new poolers, one a tower; added to the run's seed."""
    mask_duplicates: bool = True
    """A candidate with the anchor's text is no negative; False as released."""
    gather_negatives: bool = True

    @property
    def towers(self) -> int:
        return 2

    @property
    def idle(self) -> bool:
        return not self.terms

    @property
    def exchanges(self) -> bool:
        """Whether there are cross-attention layers."""
        return "side" in self.terms or (bool(self.terms) and self.wiring == "instream")

    @property
    def uses_poolers(self) -> bool:
        return "ictm" in self.terms and self.tmc_use == "pooler"

    def check(
        self, info: BackboneInfo, pooling: PoolingConfig, template: Template | None, data: str, in_views: bool
    ) -> list[str]:
        check_tau(self.tau)
        if not 0 < self.floor < 1:
            raise UserError("the least cosine lies between 0 and 1", key="method.floor", value=self.floor)
        self._check_choices()
        if info.kind != "encoder":
            raise UserError(
                "the towers are bidirectional encoders", key="method", value=self.name, fix="method=csesfp"
            )
        if in_views:
            raise UserError("contrastive views are single sentences", key="data.pack", fix="data.pack=null")
        if data != "wikipedia":
            raise UserError("the views are single sentences", key="data", value=data, fix="data=wikipedia")
        if self.tower1 == self.tower2:
            raise UserError(
                "both towers would be the same encoder, which has nothing to exchange with itself",
                key="method.tower2",
                value=self.tower2,
                fix="two stage-1 runs as method.tower1 and method.tower2, or experiment=jtcse_mini, which makes them",
            )
        if len(self.pooler_seeds) != 2:
            raise UserError("a seed for each tower", key="method.pooler_seeds", value=list(self.pooler_seeds))
        if self.exchanges:
            cross_layers(self.n_ca, info.layers)
        warnings = []
        if self.terms and info.dropout == 0.0:
            warnings.append(
                "backbone.dropout=0: the two views of a sentence are equal, so method=jtcse trains on the difference "
                "of its towers alone"
            )
        return warnings

    def _check_choices(self) -> None:
        choices = {
            "icnce": ("coin", "symmetric", "fixed"),
            "wiring": ("side", "instream"),
            "route": ("query_owner", "value_owner"),
            "tmc_use": ("pooler", "last_hidden"),
            "clamp": ("range", "official"),
            "pooler": ("auto", "new"),
        }
        for key, known in choices.items():
            if getattr(self, key) not in known:
                raise UserError(
                    "unknown choice", key=f"method.{key}", value=getattr(self, key), fix=" or ".join(known)
                )
        if odd := [term for term in self.terms if term not in TERMS]:
            raise UserError(
                "unknown term", key="method.terms", value=odd[0], fix=f"some of {', '.join(TERMS)}"
            )


@dataclass(frozen=True)
class TNCSEConfig(JTCSEConfig):
    """No side stream, and anchors across towers always from the first."""

    name: str = "tncse"
    terms: tuple[str, ...] = ("nce", "cross", "ictm")
    icnce: Literal["coin", "symmetric", "fixed"] = "fixed"

    def check(
        self, info: BackboneInfo, pooling: PoolingConfig, template: Template | None, data: str, in_views: bool
    ) -> list[str]:
        if "side" in self.terms or self.wiring == "instream":
            raise UserError("TNCSE has no side stream", key="method.terms", value="side", fix="method=jtcse")
        return super().check(info, pooling, template, data, in_views)
