"""Hydra's callback for `embedlab train` (``conf/train.yaml``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embedlab.cli.hydra_main import Refusal
from embedlab.errors import UserError
from embedlab.run.folder import check_free


class FreeFolder(Callback):
    """Refuses a taken run folder before Hydra writes its own records there."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Raises `Refusal` where the folder holds another run."""
        try:
            folder = Path(str(OmegaConf.select(config, "hydra.run.dir")))
            check_free(folder, OmegaConf.select(config, "ckpt_path"), "hydra.run.dir")
        except OmegaConfBaseException:  # what does not resolve, Hydra says itself
            return
        except UserError as error:
            raise Refusal(error) from error
