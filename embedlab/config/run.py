"""A run's configuration as plain data: what every method's record shares, the whole, and how two recipes differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig, BackboneInfo
from embedlab.config.build import check_values, within
from embedlab.config.data import DataConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.pooling import PoolingConfig
from embedlab.config.template import Template
from embedlab.config.trainer import CallbacksConfig, LoggerConfig, ScoringConfig, TrainerConfig
from embedlab.errors import UserError

Step = Literal["auto", "eager", "compile", "graph"]

SAME_RECIPE = frozenset(
    ("ckpt_path", "logger", "callbacks", "stages_dir", "evaluation.before", "evaluation.final", "evaluation.last",
     "evaluation.sts_dir", "evaluation.dev", "data.report", "data.processes", "data.cache_dir",
     "trainer.log_every_n_steps")
)  # fmt: skip
"""Sections and keys that make no other recipe: how a run is watched, and where its files are."""


@dataclass(frozen=True)
class MethodConfig:
    """What every method's record shares: what it takes, and a check of its neighbours before any weight is loaded."""

    kinds: ClassVar[tuple[str, ...]] = ("wikipedia", "nli", "parallel")
    """Kinds of data that the method takes."""
    backbone_kind: ClassVar[Literal["encoder", "decoder"] | None] = None
    """The kind of backbone that it takes; None: both."""
    can_unpad: ClassVar[bool] = False
    """Whether the method hands on the token budget of its views, so that a step can leave out padding."""
    decays_norms_and_biases: ClassVar[bool] = True
    """Whether its release decays every weight, as torch's AdamW does (``optimizer.decay_norms_and_biases``)."""
    towers: ClassVar[int] = 1
    """Encoders that the result is made of."""
    eval_text = "raw"
    """Text normalization when a sentence is encoded after training (`embedlab.encoders.tokenization`); a field of those
    methods that leave the choice."""
    shardable: ClassVar[bool] = True
    """Whether it calls the backbone as a whole, and not its blocks or its tied head by themselves."""

    name: str

    @property
    def pools(self) -> bool:
        """Whether the loss reads sentence vectors, so that weights of the pooling are trained."""
        return True

    @property
    def idle(self) -> bool:
        """Whether there is nothing to train: the encoder is exported and scored as it is."""
        return False

    @property
    def needs_others(self) -> bool:
        """Whether the loss compares a sentence with others of its batch, so that one alone teaches nothing."""
        return False

    def of(self, objective: str | None) -> MethodConfig:
        """The same for a data set of a mix that may have an objective of its own."""
        return self

    def why_not_captured(self, data: DataConfig) -> str | None:
        """Why one CUDA graph cannot compute every step (``a captured step …``); None: it can."""
        return None

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        """Reject a combination that has no meaning.

        Args:
            info: of the backbone.
            run: the whole configuration.

        Returns:
            Warnings: combinations that are known to be poor.

        Raises:
            UserError: naming the key, the value and the fix.
        """
        check_values(type(self), vars(self), "method")
        if self.backbone_kind not in (None, info.kind):
            usual = {"encoder": "mini", "decoder": "smollm2"}[str(self.backbone_kind)]
            raise UserError(
                f"method={self.name} trains {self.backbone_kind}s",
                key="backbone",
                value=info.model_type,
                fix=f"backbone={usual} or another {self.backbone_kind}, or another method",
            )
        return []

    def refuse_unread(self, keys: str, why: str, fix: str) -> None:
        """UserError for one of the keys (by blanks apart) that was set although nothing reads it as others are set."""
        for key in keys.split():
            value, usual = getattr(self, key), type(self).__dataclass_fields__[key].default
            if value != usual:
                left = f"method.{key}={'null' if usual is None else str(usual).lower()}"
                raise UserError(why, key=f"method.{key}", value=value, fix=f"{left}, or {fix}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Backbone x method x pooling on data, and how (`embedlab.run.parse` reads it, `embedlab.run.check` checks it).

    Args:
        step: how an optimiser step runs; ``auto``: as `embedlab.run.check.resolved_step` says.
        unpad: whether a step leaves out padding; ``auto``: where method and backbone can.
        ckpt_path: a checkpoint to go on from: a file, ``last`` or ``auto``.
        plain: the dictionary that it was read from.
    """

    backbone: BackboneConfig
    adapter: AdapterConfig
    method: MethodConfig
    pooling: PoolingConfig
    template: Template | None
    data: DataConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    logger: LoggerConfig
    callbacks: CallbacksConfig
    evaluation: ScoringConfig
    seed: int = within(42, least=0, below=2**32)
    step: Step
    unpad: bool | Literal["auto"]
    ckpt_path: str | None
    plain: dict[str, Any]


def differences(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys at which two nested dictionaries differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted({*a, *b}):
            yield from differences(a.get(name), b.get(name), f"{key}.{name}" if key else name)
    elif a != b:
        yield key, a, b
