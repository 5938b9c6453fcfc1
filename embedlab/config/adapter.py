"""How a backbone's weights are trained: all of them, or by an adapter."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from embedlab.config.backbone import DTYPES, BackboneConfig
from embedlab.errors import UserError


@dataclass(frozen=True)
class AdapterConfig:
    """How a backbone's weights are trained."""

    name: str = "none"
    r: int | None = None
    """Rank; None trains all weights."""
    alpha: float = 16.0
    """The update is scaled by alpha / r."""
    dropout: float = 0.05
    """Of the input of the update, in training."""
    targets: tuple[str, ...] = ()
    """The linear layers to adapt, by the last part of their names (``q_proj``); empty: all in the blocks."""
    quantization: Literal["nf4"] | None = None
    """4-bit base weights; needs ``r``."""
    double_quantization: bool = True
    """Quantise the scales of the 4-bit weights too."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the products with 4-bit weights; autocast, where it is on, decides instead."""
    gradient_checkpointing: bool = False
    """Keep one activation a block and compute the others again in the backward pass."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, str):
            object.__setattr__(self, "targets", (self.targets,))
        if self.r is not None and self.r < 1:
            raise UserError("the rank must be at least 1, or null", key="adapter.r", value=self.r)
        if not 0 <= self.dropout < 1:
            raise UserError("must lie in [0, 1)", key="adapter.dropout", value=self.dropout)
        if self.quantization not in (None, "nf4"):
            raise UserError(
                "unknown quantisation", key="adapter.quantization", value=self.quantization, fix="nf4 or null"
            )
        if self.quantization is not None and self.r is None:
            raise UserError(
                "4-bit weights cannot be trained themselves",
                key="adapter.r",
                value=None,
                fix="adapter=qlora, or adapter.quantization=null",
            )
        if self.compute_dtype not in DTYPES:
            raise UserError(
                "unknown dtype", key="adapter.compute_dtype", value=self.compute_dtype, fix=", ".join(DTYPES)
            )

    def check(self, source: str) -> None:
        """Whether adapters make sense on a backbone of this ``source``.

        Raises:
            UserError: they are trained and kept apart from their base, so that has to exist afterwards.
        """
        if self.r is not None and source == "fresh":
            raise UserError(
                "adapters need trained weights beneath them, and these are random",
                key="adapter",
                value=self.name,
                fix="adapter=none, or pretrain first (method=causal_lm) and use backbone=local",
            )


@dataclass(frozen=True)
class Adapter:
    """What a backbone's adapter is, and which weights it belongs to."""

    config: AdapterConfig
    base: BackboneConfig
    digest: str
    """Of the base's weights (``weights_digest``)."""

    @property
    def card(self) -> dict[str, Any]:
        """As plain values, for ``read_adapter``."""
        return {"config": asdict(self.config), "base": asdict(self.base), "digest": self.digest}
