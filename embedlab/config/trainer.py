"""Typed settings of what surrounds a method: trainer, loggers, callbacks, scoring."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from embedlab.config.build import Record, within
from embedlab.errors import UserError, one_of
from embedlab.parts import part_names


@dataclass(frozen=True)
class TrainerConfig(Record):
    """What goes to ``lightning.Trainer`` by these names; see there."""

    section = "trainer"

    accelerator: Literal["auto", "cpu", "cuda", "gpu", "mps"] = "auto"
    """``auto``: the best that the machine has."""
    devices: int | str | tuple[int, ...] = 1
    """How many, ``auto`` for all, or their numbers in a list."""
    num_nodes: int = within(1, least=1)
    """Machines."""
    strategy: str = "auto"
    """Lightning's name of how several devices work together: ``ddp``, or FSDP2 by ``trainer=fsdp``."""
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"] = "auto"
    """``auto``: bf16-mixed on a CUDA device that has it, else 32-true."""
    max_epochs: int = within(1, least=1)
    """Passes over the data at most."""
    max_steps: int = -1
    """Updates at most; -1: as many as the epochs give."""
    log_every_n_steps: int = within(50, least=1)
    """Steps between two rows of metrics.csv."""
    deterministic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_steps != -1 and self.max_steps < 1:
            raise UserError(
                "must be at least 1, or -1 for no limit", key="trainer.max_steps", value=self.max_steps,
                fix="trainer.max_steps=-1",
            )  # fmt: skip
        self._check_devices()

    def _check_devices(self) -> None:
        devices = self.devices
        if isinstance(devices, str) and re.fullmatch(r"-?\d+", devices):
            devices = int(devices)
        listed = list(devices) if isinstance(devices, tuple) else []
        if len(set(listed)) < len(listed):
            raise UserError("names a device twice", key="trainer.devices", value=listed, fix="each once")
        if listed and self.accelerator == "cpu":
            fix = f"trainer.devices={len(listed)}"
            raise UserError("a CPU has no numbers", key="trainer.devices", value=listed, fix=fix)
        if devices not in ("auto", -1) and not listed and not (isinstance(devices, int) and devices >= 1):
            raise UserError(
                "neither a number of devices nor a list of them",
                key="trainer.devices",
                value=self.devices,
                fix="1, auto, or [0,1]",
            )


@dataclass(frozen=True)
class LoggerConfig(Record):
    section = "logger"

    csv: bool = True
    """metrics.csv in the run's folder."""
    tensorboard: bool = False
    """Event files for TensorBoard in the run's folder."""
    wandb: dict[str, Any] | None = None
    """Arguments of `wandb.init` (logger=wandb has them); null: not used."""


@dataclass(frozen=True)
class CheckpointConfig(Record):
    section = "callbacks.checkpoint"

    every_minutes: float | None = within(5.0, above=0)
    """Minutes between two checkpoints; null: not by the clock."""
    every_steps: int | None = within(None, least=1)
    """Updates between two checkpoints; null: not by count."""
    at_end: bool = True
    """Whether a run that ends writes last.ckpt, so that more steps can follow."""


@dataclass(frozen=True)
class CallbacksConfig(Record):
    section = "callbacks"

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    early_stopping: int | None = within(None, least=1)
    """Scorings without a rise before the run ends."""
    requeue: bool = True
    """On SLURM, ask for the job again when its signal has ended the run (which then needs ``ckpt_path=auto``)."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"


@dataclass(frozen=True)
class ScoringConfig(Record):
    """Scoring while training, and the table at the end."""

    section = "evaluation"

    sts_dir: str | None = None
    dev: str | None = None
    """One's own development set in place of STS-B dev: a file of scored pairs, or a folder in BEIR's layout."""
    sts_text: Literal["raw", "tok"] = "raw"
    select: Literal["auto", "dev", "loss", "last"] = "auto"
    every: int = within(125, least=1)
    final: tuple[str, ...] = ("lee", "sts")
    before: bool = True
    """Whether the encoder is scored before training too, for the table of before and after."""
    last: bool = False
    """Whether the last weights are scored beside the selected ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.select == "dev" and not self.has_dev:
            raise UserError(
                "selection on STS-B dev needs the STS files",
                key="evaluation.sts_dir",
                fix="name their folder, or hub; or evaluation.dev=FILE of scored pairs",
            )
        for suite in self.final:
            if suite not in part_names("evaluation"):
                fix = one_of(suite, part_names("evaluation"))
                raise UserError("no such suite", key="evaluation.final", value=suite, fix=fix)

    @property
    def has_dev(self) -> bool:
        """Whether something is scored while training."""
        return self.dev is not None or self.sts_dir is not None

    @property
    def selection(self) -> str:
        if self.select == "auto":
            return "dev" if self.has_dev else "last"
        return self.select
