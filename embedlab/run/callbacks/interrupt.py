"""Ctrl-C and a scheduler's notice: finish the step, write the checkpoint, go."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

from lightning.pytorch import Callback, LightningModule, Trainer

from embedlab.run.callbacks.checkpoints import LastCheckpoint

log = logging.getLogger(__name__)
# SLURM announces the end of a job by SIGUSR1 (where asked to), submitit by SIGUSR2, both by SIGTERM.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def _nothing() -> None:
    pass


class GracefulStop(Callback):
    """The first signal asks for a checkpoint after the present step and ends the run; Ctrl-C then ends it at once."""

    def __init__(self, checkpoint: LastCheckpoint) -> None:
        self.checkpoint = checkpoint
        # Not those at the start of training: Lightning has put its own there by then and takes them back before the
        # callbacks' teardown, after which its SIGTERM handler would only make a note.
        self._outside = {s: signal.getsignal(s) for s in SIGNALS}
        self._caught = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            self._caught = True
            for number in SIGNALS:
                signal.signal(number, self._handle)
        # Lightning (2.6) asks all ranks before every step whether one got SIGTERM and waits for the answer, and so for
        # the device, which then idles until the next step is launched. Its handler is not in place now, and of ours
        # the checkpoint's callback lets the ranks agree, from time to time.
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, "_broadcast_sigterm_tensor"):
            loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.checkpoint.stop_requested is not None:
            if number != signal.SIGINT:  # a scheduler sends several
                return
            self._restore()
            raise KeyboardInterrupt
        log.warning(
            "%s: writing a checkpoint after this step; Ctrl-C to stop at once.", signal.Signals(number).name
        )
        self.checkpoint.stop_requested = number

    def _restore(self) -> None:
        if self._caught:
            for number, handler in self._outside.items():
                signal.signal(number, handler)
        self._caught = False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()
