"""Typed settings of what surrounds a method: trainer, loggers, callbacks, scoring."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from embedlab.errors import UserError
from embedlab.parts import part_names


@dataclass(frozen=True)
class TrainerConfig:
    """What goes to ``lightning.Trainer`` by these names; see there."""

    accelerator: str = "auto"
    devices: int | str | tuple[int, ...] = 1
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str = "auto"
    """``auto``: bf16-mixed on a CUDA device that has it, else 32-true."""
    max_epochs: int = 1
    max_steps: int = -1
    log_every_n_steps: int = 50
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.max_steps != -1 and self.max_steps < 1:
            raise UserError(
                "must be at least 1, or -1 for no limit", key="trainer.max_steps", value=self.max_steps
            )
        if self.max_epochs < 1:
            raise UserError("must be at least 1", key="trainer.max_epochs", value=self.max_epochs)
        if self.log_every_n_steps < 1:
            raise UserError(
                "must be at least 1", key="trainer.log_every_n_steps", value=self.log_every_n_steps
            )
        known = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")
        if self.precision not in known:
            raise UserError(
                "unknown precision", key="trainer.precision", value=self.precision, fix=", ".join(known)
            )
        if self.num_nodes < 1:
            raise UserError("must be at least 1", key="trainer.num_nodes", value=self.num_nodes)
        self._check_devices()
        if self.accelerator not in ("auto", "cpu", "cuda", "gpu", "mps"):
            raise UserError("unknown accelerator", key="trainer.accelerator", value=self.accelerator)

    def _check_devices(self) -> None:
        devices = self.devices
        if isinstance(devices, str) and re.fullmatch(r"-?\d+", devices):
            devices = int(devices)
        listed = isinstance(devices, tuple) and devices
        if devices not in ("auto", -1) and not listed and not (isinstance(devices, int) and devices >= 1):
            raise UserError(
                "neither a number of devices nor a list of them",
                key="trainer.devices",
                value=self.devices,
                fix="1, auto, or [0,1]",
            )


@dataclass(frozen=True)
class LoggerConfig:
    csv: bool = True
    tensorboard: bool = False
    wandb: dict[str, Any] | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    every_minutes: float | None = 5.0
    every_steps: int | None = None
    at_end: bool = True

    def __post_init__(self) -> None:
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise UserError(
                "must be positive, or null",
                key="callbacks.checkpoint.every_minutes",
                value=self.every_minutes,
            )
        if self.every_steps is not None and self.every_steps < 1:
            raise UserError(
                "must be at least 1, or null", key="callbacks.checkpoint.every_steps", value=self.every_steps
            )


@dataclass(frozen=True)
class CallbacksConfig:
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    early_stopping: int | None = None
    """Scorings without a rise before the run ends."""
    requeue: bool = True
    """On SLURM, ask for the job again when its signal has ended the run (which then needs ``ckpt_path=auto``)."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.checkpoint, dict):
            from embedlab.config.build import from_dict

            object.__setattr__(
                self, "checkpoint", from_dict(CheckpointConfig, self.checkpoint, "callbacks.checkpoint")
            )
        if self.progress not in ("auto", "rich", "plain", "none"):
            raise UserError(
                "unknown progress bar", key="callbacks.progress", value=self.progress,
                fix="auto, rich, plain or none",
            )  # fmt: skip
        if self.early_stopping is not None and self.early_stopping < 1:
            raise UserError(
                "must be at least 1, or null", key="callbacks.early_stopping", value=self.early_stopping
            )


@dataclass(frozen=True)
class ScoringConfig:
    """Scoring while training, and the table at the end."""

    sts_dir: str | None = None
    sts_text: Literal["raw", "tok"] = "raw"
    select: Literal["auto", "dev", "loss", "last"] = "auto"
    every: int = 125
    final: tuple[str, ...] = ("lee", "sts")
    before: bool = True
    last: bool = False
    """Whether the last weights are scored beside the selected ones."""

    def __post_init__(self) -> None:
        if self.select not in ("auto", "dev", "loss", "last"):
            raise UserError(
                "unknown rule", key="evaluation.select", value=self.select, fix="auto, dev, loss or last"
            )
        if self.select == "dev" and self.sts_dir is None:
            raise UserError(
                "selection on STS-B dev needs the STS files",
                key="evaluation.sts_dir",
                fix="name their folder, or hub",
            )
        if self.every < 1:
            raise UserError("must be at least 1", key="evaluation.every", value=self.every)
        if isinstance(self.final, tuple):
            for suite in self.final:
                if suite not in part_names("evaluation"):
                    raise UserError(
                        "no such suite",
                        key="evaluation.final",
                        value=suite,
                        fix=f"of {', '.join(part_names('evaluation'))}",
                    )

    @property
    def selection(self) -> str:
        if self.select == "auto":
            return "dev" if self.sts_dir is not None else "last"
        return self.select
