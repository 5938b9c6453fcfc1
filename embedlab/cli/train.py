"""`embedlab train [-m] key=value ...`: Hydra composes, the run is one function call in this process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from embedlab.cli.hydra_main import run, run_dir

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Compose and train; a configuration that wants several processes is started again under torchrun."""
    status: list[int] = []
    run(lambda values: status.append(train_one(values, run_dir())), "train", argv)
    return max(status, default=0)


def train_one(values: dict[str, Any], folder: Path) -> int:
    """One run in ``folder``; returns its exit status."""
    from embedlab.training.config import RunConfig

    config = RunConfig.from_dict(values)
    processes = config.trainer.device_count()
    if processes > 1 and "LOCAL_RANK" not in os.environ:
        config.check()
        return _spawn(values, folder, processes)
    return fit(config, folder)


def fit(config: Any, folder: Path) -> int:
    """Train in this process; an interrupted run ends with the shell's status for its signal."""
    from embedlab.training.callbacks.checkpoints import Interrupted
    from embedlab.training.nonfinite import NonFiniteLoss
    from embedlab.training.run import train

    try:
        train(config, folder)
    except Interrupted as stop:
        print(f"embedlab: {stop}", file=sys.stderr)
        return 128 + stop.number
    except NonFiniteLoss as error:
        print(f"embedlab: {error}", file=sys.stderr)
        return 1
    return 0


def _spawn(values: dict[str, Any], folder: Path, processes: int) -> int:
    """Hand the resolved run to ``processes`` fresh processes: every rank reads the same file and the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "embedlab.cli.worker", str(path.resolve()), str(folder.resolve())]
    log.info("Starting %d processes.", processes)
    return subprocess.run(command, check=False).returncode
