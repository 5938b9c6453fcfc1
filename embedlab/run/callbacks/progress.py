"""How far a run is: a bar on a terminal, else lines. Neither asks the device for anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from embedlab.console import has_bars, progress_bar, say, short
from embedlab.run.callbacks.train_log import TrainLog
from embedlab.run.check import planned_steps

if TYPE_CHECKING:
    from embedlab.config.run import RunConfig

LINES = 50
"""Of a whole run at most, beside its first and its last one."""
SHOWN = {
    "train/loss": "loss",
    "speed/sentences_per_second": "sent/s",
    "speed/true_tokens_per_second": "tok/s",
    "speed/padding_share": "padding",
}


class Progress(Callback):
    """Steps done of the whole run, the newest records and the time left.

    Args:
        config: of the run; ``callbacks.progress`` chooses a bar (rich), lines (plain), or by where standard error goes.
    """

    def __init__(self, config: RunConfig) -> None:
        wanted = config.callbacks.progress
        self.config, self.bar = config, has_bars() if wanted == "auto" else wanted == "rich"
        self._open = ExitStack()
        self._move: Callable[..., None] = lambda *_: None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, "training", "steps", self.total(trainer), trainer.global_step)

    def total(self, trainer: Trainer) -> int:
        """Updates of the whole run."""
        plan = trainer.datamodule.plan(trainer.world_size)  # type: ignore[attr-defined]
        return planned_steps(self.config, len(plan))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._epoch = trainer.current_epoch  # at the end of the run it is one further
        self._show(trainer, trainer.global_step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.bar and trainer.is_global_zero:
            self._move(self._done, self._done, "scoring dev")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, trainer.global_step, last=True)
        self._open.close()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, "encoding", "batches", int(sum(trainer.num_predict_batches)), 0)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._show(trainer, batch_idx + 1)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._open.close()

    def _begin(self, trainer: Trainer, label: str, unit: str, total: int, begun: int) -> None:
        self._unit, self._total, self._begun, self._done = unit, total, begun, begun
        self._said, self._since, self._epoch = begun, time.perf_counter(), trainer.current_epoch
        if self.bar and trainer.is_global_zero:
            bar = progress_bar(label, f"of {total:,} {unit}", total, True, begun)
            self._move = self._open.enter_context(bar)
            self._move(begun, begun)

    def _show(self, trainer: Trainer, done: int, last: bool = False) -> None:
        new, self._done = done != self._done, done
        if not trainer.is_global_zero:
            return
        if self.bar:
            self._move(done, done, ", ".join(self._parts(trainer)))
        elif (new and self._is_due()) or (last and done != self._said):
            self._said = done
            seconds = time.perf_counter() - self._since
            left = seconds * (self._total - done) / max(1, done - self._begun)
            counted = f"{self._unit}: {done:,} of {self._total:,}"
            say(", ".join((counted, *self._parts(trainer), f"{duration(left)} left")))

    def _parts(self, trainer: Trainer) -> list[str]:
        epochs = trainer.max_epochs or 1
        return [*([f"epoch {self._epoch + 1} of {epochs}"] if epochs > 1 else []), *shown(trainer)]

    def _is_due(self) -> bool:
        """The last step has its line when its record is there."""
        apart = (self._done - self._said) * LINES >= self._total - self._begun
        return self._done < self._total and (apart or self._said == self._begun)


def shown(trainer: Trainer) -> list[str]:
    """The newest values of the training log and of dev scoring."""
    parts = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TrainLog):
            newest = callback.latest
            values = [f"{label} {short(newest[key])}" for key, label in SHOWN.items() if key in newest]
            # The device is not asked in between: what is shown stands still, and says of which step it is.
            if values and callback.latest_step < trainer.global_step:
                values[0] += f" (step {callback.latest_step:,})"
            parts += values
    scores = trainer.callback_metrics
    parts += [f"dev {float(scores[key]):.2f}" for key in ("dev/spearman", "dev/ndcg@10") if key in scores]
    return parts


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03, 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
