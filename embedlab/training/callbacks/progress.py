"""Progress bars that show loss and speed without asking the device for them at every step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from embedlab.training.callbacks.train_log import TrainLog

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
    if "dev/spearman" in trainer.callback_metrics:
        out["dev"] = f"{float(trainer.callback_metrics['dev/spearman']):.2f}"
    return out


class Progress(RichProgressBar):
    """For a terminal."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return dict(shown(trainer))


class PlainProgress(TQDMProgressBar):
    """For a log file: one line every so many steps."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return dict(shown(trainer))
