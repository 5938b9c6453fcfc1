"""`last.ckpt`: everything that an exact resume needs, written so that there is always a whole one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from embedlab.errors import UserError

LAST = "last.ckpt"
RANKS_AGREE_EVERY = 20
PREVIOUS = "previous.ckpt"


class Interrupted(BaseException):
    """A signal ended the run, and its checkpoint is written. ``number`` is the signal's."""

    def __init__(self, number: int, checkpoint: Path) -> None:
        self.number, self.checkpoint = number, checkpoint
        super().__init__(f"interrupted; go on with ckpt_path=last hydra.run.dir={checkpoint.parent}")


class LastCheckpoint(Callback):
    """Keeps the newest two full checkpoints of a run.

    Args:
        folder: of the run.
        every_minutes: between two checkpoints; a BERT-base state is 1.3 GB, so a cadence in steps costs what the
            disk costs. None: only at the end.
        every_steps: additionally every so many updates.
        at_end: also when training ends or is interrupted.
    """

    def __init__(
        self,
        folder: Path,
        every_minutes: float | None = 5.0,
        every_steps: int | None = None,
        at_end: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self.every_minutes = every_minutes
        self.every_steps = every_steps
        self.at_end = at_end
        self._written_at = time.monotonic()
        self._written_step = -1
        self._wanted = False
        self.stop_requested: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._written_at = time.monotonic()
        self._written_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        step = trainer.global_step
        wanted = self.stop_requested is not None or (
            self.every_minutes is not None and time.monotonic() - self._written_at >= 60 * self.every_minutes
        )
        if trainer.world_size > 1:
            # Clocks and signals of the ranks differ; to agree costs a message, so not at every step.
            wanted = step % RANKS_AGREE_EVERY == 0 and trainer.strategy.reduce_boolean_decision(
                wanted, all=False
            )
        steps_due = self.every_steps is not None and step % self.every_steps == 0
        # At the last step too, before Lightning closes the epoch: more steps can then be added in its middle.
        ends = self.at_end and step == trainer.max_steps
        self._wanted = self._wanted or steps_due or wanted or ends
        if self._wanted and not validation_follows(trainer):
            self.write(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._wanted and not trainer.sanity_checking:
            self.write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.at_end and self._written_step != trainer.global_step:
            self.write(trainer)

    def write(self, trainer: Trainer) -> None:
        """Write `last.ckpt`; the one before it stays as `previous.ckpt`."""
        last, previous = self.folder / LAST, self.folder / PREVIOUS
        new = self.folder / "last.ckpt.new"
        trainer.save_checkpoint(new)
        if trainer.is_global_zero:
            verify = getattr(trainer.lightning_module, "verify_checkpoint", None)
            if verify is not None:
                verify(new)
            if last.exists():
                os.replace(last, previous)
            os.replace(new, last)
        trainer.strategy.barrier("last.ckpt")
        self._wanted = False
        self._written_at = time.monotonic()
        self._written_step = trainer.global_step
        stop = self.stop_requested is not None
        if trainer.world_size > 1:
            stop = trainer.strategy.reduce_boolean_decision(stop, all=False)
        if stop and not trainer.fit_loop.done:
            raise Interrupted(self.stop_requested or 0, last)


def validation_follows(trainer: Trainer) -> bool:
    """Whether scoring comes after the present batch: a checkpoint before it would lose that score on resume."""
    every = trainer.val_check_batch
    if not trainer.enable_validation or every is None or every == float("inf"):
        return False
    return (trainer.fit_loop.epoch_loop.total_batch_idx + 1) % int(every) == 0


def find_checkpoint(ckpt_path: str | None, folder: Path) -> Path | None:
    """The checkpoint to resume from: a path, or `last` for the newest readable one of the run's folder.

    Raises:
        UserError: no such file, or neither of the two is readable.
    """
    if ckpt_path is None:
        return None
    if ckpt_path != "last":
        path = Path(ckpt_path)
        if not path.is_file():
            raise UserError(
                "no such checkpoint", key="ckpt_path", value=ckpt_path, fix="give a .ckpt file, or last"
            )
        problem = unreadable(path)
        if problem:
            raise UserError(f"the checkpoint cannot be read: {problem}", file=path, key="ckpt_path")
        return path
    found = [p for p in (folder / LAST, folder / PREVIOUS) if p.is_file()]
    if not found:
        raise UserError(
            "there is no checkpoint to resume from in the run's folder",
            key="ckpt_path",
            value="last",
            fix=f"set hydra.run.dir to the folder of the run (now {folder})",
        )
    for path in found:
        if unreadable(path) is None:
            return path
    raise UserError(f"none of {', '.join(p.name for p in found)} can be read", file=folder, key="ckpt_path")


def unreadable(path: Path) -> str | None:
    """Why a checkpoint cannot be loaded (`weights_only`, no code from disk), or None."""
    try:
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:
        return str(error).strip().splitlines()[0][:200]
    return None
