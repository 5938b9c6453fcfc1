"""The keys `finetune.*` of `embedlab evaluate`, and what the suites that read them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from embedlab.config.build import from_dict
from embedlab.errors import UserError
from embedlab.evaluation.core.suite import Settings, Suite

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo

Vector = Literal["first", "mean"]


@dataclass(frozen=True)
class FineTuneConfig:
    """How a head and its backbone are trained. The defaults are GLUE's usual ones; each suite has its own."""

    epochs: float = 3.0
    steps: int | None = None
    """Updates; None: as many as `epochs` has."""
    batch_size: int = 32
    lr: float = 2e-5
    weight_decay: float = 0.01
    warmup: float = 0.06
    """Share of the steps; the rate then falls to 0 linearly."""
    clip: float = 1.0
    dropout: float = 0.1
    """Of the head; the backbone has its own."""
    max_length: int = 128
    """Tokens of a row with its special tokens; less where the model allows less."""
    stride: int = 128
    """Tokens that two windows of a long passage share (question answering)."""
    vector: Vector = "first"
    """What the classification head reads: the first token (a decoder's last one), or the mean over tokens."""
    evaluations: int = 3
    """Looks at the dev set, where a suite has one; the best weights are scored."""
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("epochs", "batch_size", "lr", "clip", "max_length", "evaluations")
        for key in (*positive, *(("steps",) if self.steps is not None else ())):
            if not getattr(self, key) > 0:
                raise UserError("must be positive", key=f"finetune.{key}", value=getattr(self, key))
        for key in ("warmup", "dropout"):
            if not 0 <= getattr(self, key) < 1:
                raise UserError("must be in [0, 1)", key=f"finetune.{key}", value=getattr(self, key))
        if self.weight_decay < 0 or self.stride < 0:
            raise UserError("must not be negative", key="finetune.weight_decay, finetune.stride")

    def with_settings(self, settings: Mapping[str, Any]) -> FineTuneConfig:
        """These defaults with the keys of `settings["finetune"]` that are not None.

        Raises UserError for an unknown key or a value of the wrong kind.
        """
        given = {key: value for key, value in (settings.get("finetune") or {}).items() if value is not None}
        return from_dict(FineTuneConfig, asdict(self) | given, "finetune")

    def plain(self) -> dict[str, Any]:
        """For the protocol block."""
        return asdict(self)


class FineTunedSuite(Suite):
    """A suite that trains a head and a copy of the encoder's backbone."""

    defaults: ClassVar[FineTuneConfig]

    def fits(self, info: BackboneInfo | None, towers: int) -> str | None:
        """An encoder of several towers has no one backbone to train."""
        return "fine-tuning needs an encoder with one backbone" if towers > 1 else None

    def config(self, settings: Settings) -> FineTuneConfig:
        """How to train: the suite's own defaults, and the keys ``finetune.*``."""
        return self.defaults.with_settings(settings)
