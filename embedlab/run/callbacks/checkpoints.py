"""`last.ckpt`: everything that an exact resume needs, written so that there is always a whole one."""

from __future__ import annotations

import logging
import os
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn import Parameter

from embedlab.backbones.adapters import check_saved
from embedlab.backbones.weight_files import PACKED, corruption, packed
from embedlab.config.read import record
from embedlab.errors import UserError
from embedlab.files import exchange, full, writing
from embedlab.run.run_folder import LAST as LAST
from embedlab.run.run_folder import PREVIOUS as PREVIOUS
from embedlab.run.run_folder import given_checkpoint

if TYPE_CHECKING:
    from embedlab.engine.module import Method

RANKS_AGREE_EVERY = 20  # steps at most
AGREE_SECONDS = 2.0

log = logging.getLogger(__name__)


class Interrupted(BaseException):
    """A signal ended the run, and its checkpoint is written. ``number`` is the signal's."""

    def __init__(self, number: int, checkpoint: Path) -> None:
        self.number, self.checkpoint = number, checkpoint
        super().__init__(f"interrupted; go on with ckpt_path=last hydra.run.dir={checkpoint.parent}")


class WholeFile(TorchCheckpointIO):
    """Writes a checkpoint where it is asked to: Lightning's own goes through a copy in memory and one in /tmp."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with writing(Path(path)), open(path, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())


class LastCheckpoint(Callback):
    """Keeps the newest two full checkpoints of a run.

    Args:
        folder: of the run.
        every_minutes: between two checkpoints; a BERT-base state is 1.3 GB, so a cadence in steps costs what the
            disk costs. None: only at the end.
        every_steps: additionally every so many updates.
        at_end: also when training ends or is interrupted.
        recipe: the run's configuration, which is kept with the weights.
    """

    begun = False
    """Whether everything has been restored and training has begun."""

    def __init__(
        self,
        folder: Path,
        every_minutes: float | None = 5.0,
        every_steps: int | None = None,
        at_end: bool = True,
        recipe: dict[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.every_minutes = every_minutes
        self.every_steps = every_steps
        self.at_end = at_end
        self.recipe = recipe
        self._written_at = time.monotonic()
        self._written_step = -1
        self._wanted = False
        self.stop_requested: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._written_at = self._agreed_at = time.monotonic()
        self._written_step = self._agreed_step = trainer.global_step
        self._agree_after = 1
        self.begun = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        method = cast("Method", pl_module)
        if method.runner.accumulating(method):
            return
        step = trainer.global_step
        wanted = self.stop_requested is not None or (
            self.every_minutes is not None and time.monotonic() - self._written_at >= 60 * self.every_minutes
        )
        if trainer.world_size > 1:
            wanted = self._agree(trainer, wanted)
        steps_due = self.every_steps is not None and step % self.every_steps == 0
        # At the last step too, before Lightning closes the epoch: more steps can then be added in its middle.
        ends = self.at_end and step == trainer.max_steps
        self._wanted = self._wanted or steps_due or wanted or ends
        if self._wanted and not validation_follows(trainer):
            self.write(trainer, must=ends)

    def _agree(self, trainer: Trainer, wanted: bool) -> bool:
        """Whether any rank wants a checkpoint now: clocks and signals of the ranks differ.

        To agree costs a message and a wait for the device, so not at every step: about every `AGREE_SECONDS`,
        in steps of the slowest rank, which all ranks learn with the answer.
        """
        step = trainer.global_step
        if step - self._agreed_step < self._agree_after:
            return False
        now = time.monotonic()
        a_step = (now - self._agreed_at) / (step - self._agreed_step)
        answer = torch.tensor(
            [float(wanted), float(self.stop_requested or 0), a_step], device=trainer.strategy.root_device
        )
        torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MAX)
        anyone, signal, slowest = answer.tolist()
        self.stop_requested = int(signal) or None
        self._agree_after = max(1, min(RANKS_AGREE_EVERY, int(AGREE_SECONDS / max(slowest, 1e-9))))
        self._agreed_at, self._agreed_step = now, step
        return bool(anyone)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._wanted and not trainer.sanity_checking:
            self.write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.at_end and self._written_step != trainer.global_step:
            self.write(trainer, must=True)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Make the checkpoint whole by itself: the encoder's files beside its weights; numbers, not device tensors."""
        method = cast("Method", pl_module)
        method.runner.check()
        for state in checkpoint.get("optimizer_states", []):
            for group in state.get("param_groups", []):  # a sharded run gathers them in the first process
                group["lr"] = float(group["lr"])
                group["capturable"] = False
        for state in checkpoint.get("lr_schedulers", []):
            state["_last_lr"] = [float(lr) for lr in state["_last_lr"]]
        checkpoint["embedlab"] = {
            "encoder": method.encoder.manifest(),
            "parameters": [name for name, _ in named_parameters(method)],
            "recipe": self.recipe,
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Lightning counts updates in one place for captured steps and in another for all others."""
        check_parameters(cast("Method", pl_module), checkpoint.get("embedlab", {}).get("parameters"))
        if trainer.state.fn == TrainerFn.FITTING and not (
            checkpoint.get("SentenceDataModule") and checkpoint.get("callbacks", {}).get("Randomness")
        ):  # Lightning would go on without a word
            raise UserError(
                "the checkpoint lacks its place in the data or its random states",
                key="ckpt_path",
                fix="another copy of it, or another run's",
            )
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        for progress in (
            loop.get("epoch_loop.automatic_optimization.optim_progress", {}).get("optimizer", {}).get("step"),
            loop.get("epoch_loop.manual_optimization.optim_step_progress"),
        ):
            if progress is not None:
                progress["total"] = dict.fromkeys(("ready", "completed"), checkpoint["global_step"])

    def write(self, trainer: Trainer, must: bool = False) -> None:
        """Write `last.ckpt`; the one before it stays as `previous.ckpt`.

        A checkpoint that cannot be written (a full disk) leaves both as they are; the run goes on and tries again
        when the next one is due.

        Args:
            trainer: at the end of a step.
            must: there is no next one.

        Raises:
            UserError: it cannot be written, and must be, or the run is to stop here.
        """
        last, previous = self.folder / LAST, self.folder / PREVIOUS
        new = self.folder / "last.ckpt.new"
        problem = self._save(trainer, new)
        stop = self.stop_requested
        if trainer.world_size > 1:
            state = torch.tensor(
                [float(problem is not None), float(stop or 0)], device=trainer.strategy.root_device
            )
            torch.distributed.all_reduce(state, torch.distributed.ReduceOp.MAX)
            failed, number = state.tolist()
            stop = int(number) or None
            problem = problem or ("another device could not write it" if failed else None)
        if trainer.is_global_zero:
            if problem is not None:
                new.unlink(missing_ok=True)
            else:
                if last.exists():
                    # Where the two can change places, no kill leaves the run without its `last.ckpt`.
                    os.replace(new if exchange(new, last) else last, previous)
                if new.exists():
                    os.replace(new, last)
        trainer.strategy.barrier("last.ckpt")
        self._wanted = False
        self._written_at = time.monotonic()
        if problem is not None:
            kept = (
                f"step {self._written_step} is the last that is kept"
                if last.exists()
                else "none is kept so far"
            )
            if must or stop is not None:
                raise UserError(f"the checkpoint of step {trainer.global_step} cannot be written ({problem}); {kept}",
                                file=new, fix="make room, and go on with ckpt_path=auto")  # fmt: skip
            log.error(
                "No checkpoint of step %d (%s); %s. Training goes on.", trainer.global_step, problem, kept
            )
            return
        self._written_step = trainer.global_step
        if stop is not None and not trainer.fit_loop.done:
            raise Interrupted(stop, last)

    @staticmethod
    def _save(trainer: Trainer, path: Path) -> str | None:
        """Write a checkpoint; returns why it could not be. All ranks gather, whatever one of them meets."""
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            trainer.strategy.save_checkpoint(checkpoint, path)
            if trainer.is_global_zero:
                verify(cast("Method", trainer.lightning_module), path)
        except Exception as error:
            problem = full(error) or error
            if isinstance(problem, OSError):
                elsewhere = f"{problem.filename}: " if problem.filename not in (None, str(path)) else ""
                return elsewhere + (problem.strerror or str(problem))
            if any(word in str(error) for word in ("PytorchStreamWriter", "inline_container")):
                return "the disk does not take it"
            raise
        return None


def named_parameters(method: Method) -> list[tuple[str, Parameter]]:
    """What is trained, in the order of the optimiser's state."""
    return [(n, p) for n, p in method.named_parameters() if p.requires_grad]


def verify(method: Method, path: Path) -> None:
    """Raise if a checkpoint of adapters, which no base model could stand in for, is not what is trained."""
    if method.encoder.towers[0].backbone.adapter is None:
        return
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    check_saved({n: p.detach() for n, p in named_parameters(method)}, saved, str(path))


def check_parameters(method: Method, saved: list[str] | None) -> None:
    """Optimiser state is kept by position, so refuse a model whose parameters are in another order.

    Raises:
        UserError: the names of a checkpoint are not those of what is trained here.
    """
    here = [n for n, _ in named_parameters(method)]
    if saved is not None and saved != here:
        odd = next(
            (f"{a} / {b}" for a, b in zip(saved, here, strict=False) if a != b), "their number differs"
        )
        raise UserError(
            f"the checkpoint's parameters are not this model's ({odd})",
            key="ckpt_path",
            fix="resume with the configuration that the checkpoint was made with",
        )


def validation_follows(trainer: Trainer) -> bool:
    """Whether scoring comes after the present batch: a checkpoint before it would lose that score on resume."""
    every = trainer.val_check_batch
    if not trainer.enable_validation or every is None or every == float("inf"):
        return False
    return (trainer.fit_loop.epoch_loop.total_batch_idx + 1) % int(every) == 0


def find_checkpoint(ckpt_path: str | None, folder: Path) -> Path | None:
    """The checkpoint to resume from.

    Args:
        ckpt_path: a path; ``last`` for the newest whole one of the run's folder; ``auto`` for the same, or the
            beginning where there is none.
        folder: of the run.

    Raises:
        UserError: no such file, or neither of the two is whole.
    """
    if ckpt_path is None:
        return None
    path = given_checkpoint(ckpt_path)
    if path is not None:
        problem = unreadable(path)
        if problem:
            raise UserError(
                f"the checkpoint cannot be read: {problem}",
                file=path,
                key="ckpt_path",
                fix="another copy of it, or ckpt_path=last for the newest whole one of the run's folder",
            )
        return path
    found = kept_in(folder)
    if not found and ckpt_path == "auto":
        return None
    if not found:
        raise UserError(
            "there is no checkpoint to resume from in the run's folder",
            key="ckpt_path",
            value="last",
            fix=f"ckpt_path=auto to begin, or hydra.run.dir=FOLDER of the run (now {folder})",
        )
    for path in found:
        problem = unreadable(path)
        if problem is None:
            if path.name == PREVIOUS:
                log.warning("Going on from %s, of step %d.", path, step_of(path))
            return path
        log.warning("%s cannot be read (%s).", path, problem)
    raise UserError(
        f"none of {', '.join(p.name for p in found)} can be read",
        file=folder,
        key="ckpt_path",
        fix="another copy of one, or ckpt_path=null and another folder to begin again",
    )


def kept_in(folder: Path) -> list[Path]:
    """The checkpoints of a run's folder, newest first."""
    return [p for p in (folder / LAST, folder / PREVIOUS) if p.is_file()]


def how_to_go_on(folder: Path) -> str:
    """Of a run that has ended before its time: from which checkpoint."""
    kept = next(iter(kept_in(folder)), None)
    if kept is None:
        return f"there is no checkpoint in {folder} yet"
    return (
        f"the checkpoint of step {step_of(kept)} is intact: go on with ckpt_path=last hydra.run.dir={folder}"
    )


def unreadable(path: Path) -> str | None:
    """Why a checkpoint cannot be loaded (`weights_only`, no code from disk), or None.

    Its bytes are compared with the checksums that torch writes and does not look at.
    """
    if packed(path):
        return PACKED
    try:
        with zipfile.ZipFile(path) as archive:
            if (broken := archive.testzip()) is not None:
                return f"{broken} in it is damaged"
        content = torch.load(path, map_location="meta", weights_only=True, mmap=True)
        if not isinstance(content, dict) or not {"global_step", "state_dict"} <= set(content):
            return "weights alone, with no step to go on from"
        record(CheckpointFile, content, path)
    except UserError as error:
        return f"{error.message} ({error.key})"
    except Exception as error:
        return corruption(error) or (str(error).strip().splitlines() or [repr(error)])[0][:200]
    return None


@dataclass(frozen=True)
class Own:
    """What this project adds to a checkpoint, as far as a run that goes on reads it.

    Args:
        parameters: names of what was trained, in the order of the optimiser's state.
        recipe: the run's configuration.
    """

    parameters: list[str] | None = None
    recipe: dict[str, Any] | None = None


@dataclass(frozen=True)
class CheckpointFile:
    """What a checkpoint says beside its weights."""

    global_step: int
    loops: dict[str, Any] = field(default_factory=dict)
    embedlab: Own = Own()

    @property
    def recipe(self) -> dict[str, Any] | None:
        return self.embedlab.recipe

    @property
    def passes(self) -> int:
        """Passes over the data that are behind it; 0 where it does not say."""
        found: Any = self.loops
        for key in ("fit_loop", "epoch_progress", "current", "completed"):
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, int) else 0


def read_checkpoint(path: Path) -> CheckpointFile:
    """A checkpoint of `find_checkpoint`, without its weights."""
    content = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    return record(CheckpointFile, content, path)


def step_of(path: Path) -> int:
    """Updates that a checkpoint has behind it."""
    return read_checkpoint(path).global_step
