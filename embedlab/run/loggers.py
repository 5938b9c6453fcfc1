"""Where a run's metrics go: its table, TensorBoard, W&B."""

from __future__ import annotations

import logging
import os
import re
import secrets
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from embedlab.config.run import RunConfig
from embedlab.distributed.devices import global_rank
from embedlab.errors import UserError
from embedlab.files import write_whole
from embedlab.run.callbacks.checkpoints import step_of
from embedlab.run.metrics_file import MetricsFile

log = logging.getLogger(__name__)


def run_loggers(config: RunConfig, folder: Path, checkpoint: Path | None) -> list[Logger]:
    """Those that the configuration asks for; a resumed run goes on in its records after the checkpoint's step."""
    loggers: list[Logger] = []
    step = None if checkpoint is None else step_of(checkpoint)
    if config.logger.csv:
        loggers.append(MetricsFile(folder / "metrics.csv", step))
    if config.logger.tensorboard:
        # Readers drop what a resumed run makes again.
        purge: dict[str, Any] = {} if step is None else {"purge_step": step + 1}
        loggers.append(
            TensorBoardLogger(folder, name="", version="tensorboard", default_hp_metric=False, **purge)
        )
    if config.logger.wandb is not None:
        loggers.append(_wandb(config, folder))
    return loggers


def _wandb(config: RunConfig, folder: Path) -> Logger:
    """Offline where there is no key; the run's id is kept, so that a resumed run goes on in the same record."""
    settings = {k: v for k, v in (config.logger.wandb or {}).items() if v is not None}
    if global_rank() != 0:  # only the first process records
        return WandbLogger(save_dir=folder, offline=True, **settings)
    kept = folder / "wandb_id"
    run_id = kept.read_text(errors="replace").strip() if kept.is_file() else ""
    if not re.fullmatch(r"[\w-]{1,64}", run_id):  # a stranger's file is not sent there
        run_id = secrets.token_hex(4)
    write_whole(kept, run_id)
    offline = "WANDB_MODE" not in os.environ and not (os.environ.get("WANDB_API_KEY") or _has_netrc())
    if offline:
        log.info("No W&B key: recording offline in %s; upload with `wandb sync`.", folder / "wandb")
    try:
        logger = WandbLogger(save_dir=folder, id=run_id, resume="allow", offline=offline, **settings)
        logger._wandb_init.pop("anonymous", None)  # Lightning gives it always, and wandb warns of it
        logger.experiment.config.update(config.plain, allow_val_change=True)
        if not offline and logger.experiment.url:
            log.info("W&B: %s", logger.experiment.url)
    except TypeError as error:
        fix = "keys of wandb.init"
        raise UserError(
            f"W&B refuses a setting: {error}", key="logger.wandb", value=settings, fix=fix
        ) from error
    return logger


def _has_netrc() -> bool:
    path = Path.home() / ".netrc"
    return path.is_file() and "wandb" in path.read_text(errors="ignore")


def finish(loggers: list[Logger]) -> None:
    """Whatever happened: a W&B run that is left open goes on recording the next one of this process."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and global_rank() == 0:
            logger.experiment.finish()


def quiet_loggers() -> None:
    """Lightning announces devices, tips and every stop; what matters of it this project says itself."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
