"""How a backbone's weights are trained: all of them, or by an adapter."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from embedlab.config.backbone import BackboneConfig, Dtype
from embedlab.config.build import Record, within
from embedlab.errors import UserError


@dataclass(frozen=True)
class AdapterConfig(Record):
    """How a backbone's weights are trained."""

    section = "adapter"

    name: str = "none"
    r: int | None = within(None, least=1)
    """Rank; None trains all weights."""
    alpha: float = 16.0
    """The update is scaled by alpha / r."""
    dropout: float = within(0.05, least=0, below=1)
    """Of the input of the update, in training."""
    targets: tuple[str, ...] = ()
    """The linear layers to adapt, by the last part of their names (``q_proj``); empty: all in the blocks."""
    quantization: Literal["nf4"] | None = None
    """4-bit base weights; needs ``r``."""
    double_quantization: bool = True
    """Quantise the scales of the 4-bit weights too."""
    compute_dtype: Dtype = "float32"
    """Of the products with 4-bit weights; autocast, where it is on, decides instead."""
    gradient_checkpointing: bool = False
    """Keep one activation a block and compute the others again in the backward pass."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, str):
            object.__setattr__(self, "targets", (self.targets,))
        super().__post_init__()
        if self.quantization is not None and self.r is None:
            raise UserError(
                "4-bit weights cannot be trained themselves",
                key="adapter.r",
                value=None,
                fix="adapter=qlora, or adapter.quantization=null",
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
