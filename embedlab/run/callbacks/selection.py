"""Selection without a development set: the weights of the lowest mean training loss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from embedlab.run.callbacks.scoring import BestEncoder
from embedlab.run.callbacks.train_log import TrainLog

if TYPE_CHECKING:
    from embedlab.engine.module import Method


class LossSelection(Callback):
    """Every ``every`` updates, offers the weights with the negative of the newest logged mean loss.

    It waits for that: the host may be many captured steps ahead of the device.
    The loss of a contrastive method falls while the vectors get worse, so prefer ``select=dev`` or ``last``.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.best = BestEncoder(folder)
        self.every = every

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        method = cast("Method", pl_module)
        if trainer.global_step % self.every or method.runner.accumulating(method):
            return
        logs = [c for c in trainer.callbacks if isinstance(c, TrainLog)]  # type: ignore[attr-defined]
        loss = logs[0].caught_up(trainer, method).get("train/loss") if logs else None
        if loss is not None:
            self.best.offer(-loss, trainer.global_step, pl_module.encoder)  # type: ignore[arg-type]

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.is_global_zero:
            self.best.write(pl_module.encoder)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.best.score, "step": self.best.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["score"] is not None:
            self.best.resume(state_dict["score"], state_dict["step"])
