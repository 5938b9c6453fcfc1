"""Progress bars that show loss and speed without asking the device for them at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from embedlab.run.callbacks.train_log import TrainLog

if TYPE_CHECKING:
    from embedlab.engine.module import Method

SHOWN = {
    "train/loss": "loss",
    "speed/sentences_per_second": "sent/s",
    "speed/true_tokens_per_second": "tok/s",
    "speed/padding_share": "pad",
}


def shown(trainer: Trainer) -> dict[str, str]:
    """The newest values of the training log and of dev scoring, as short texts."""
    out: dict[str, str] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TrainLog):
            out = {label: f"{callback.latest[k]:.3g}" for k, label in SHOWN.items() if k in callback.latest}
    for metric in ("dev/spearman", "dev/ndcg@10"):
        if metric in trainer.callback_metrics:
            out["dev"] = f"{float(trainer.callback_metrics[metric]):.2f}"
    return out


class _Shown:
    """What a bar shows; it counts to the end of the run, where that comes before the end of the epoch."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return dict(shown(trainer))

    @property
    def total_train_batches(self) -> int | float:
        batches: int | float = super().total_train_batches  # type: ignore[misc]
        trainer: Trainer = self.trainer  # type: ignore[attr-defined]
        if trainer.max_steps < 0:
            return batches
        progress = trainer.fit_loop.epoch_loop.batch_progress
        before = progress.total.ready - progress.current.ready
        accumulate = cast("Method", trainer.lightning_module).optimizer_config.accumulate
        return min(batches, max(1, trainer.max_steps * accumulate - before))


class Progress(_Shown, RichProgressBar):
    """For a terminal."""


class PlainProgress(_Shown, TQDMProgressBar):
    """For a log file: one line every so many steps."""
