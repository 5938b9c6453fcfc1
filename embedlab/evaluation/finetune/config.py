"""The keys `finetune.*` of `embedlab evaluate`, and what the suites that read them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from embedlab.config.build import Record, from_dict, within
from embedlab.evaluation.core.suite import Settings, Suite

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo

Vector = Literal["first", "mean"]


@dataclass(frozen=True)
class FineTuneConfig(Record):
    """How a head and its backbone are trained. The defaults are GLUE's usual ones; each suite has its own."""

    section = "finetune"

    epochs: float = within(3.0, above=0)
    steps: int | None = within(None, least=1)
    """Updates; None: as many as `epochs` has."""
    batch_size: int = within(32, least=1)
    lr: float = within(2e-5, above=0)
    weight_decay: float = within(0.01, least=0)
    warmup: float = within(0.06, least=0, below=1)
    """Share of the steps; the rate then falls to 0 linearly."""
    clip: float = within(1.0, above=0)
    dropout: float = within(0.1, least=0, below=1)
    """Of the head; the backbone has its own."""
    max_length: int = within(128, least=1)
    """Tokens of a row with its special tokens; less where the model allows less."""
    stride: int = within(128, least=0)
    """Tokens that two windows of a long passage share (question answering)."""
    vector: Vector = "first"
    """What the classification head reads: the first token (a decoder's last one), or the mean over tokens."""
    evaluations: int = within(3, least=1)
    """Looks at the dev set, where a suite has one; the best weights are scored."""
    seed: int = 0

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
