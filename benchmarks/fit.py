"""Training steps under the clock: by the `embedlab` that is imported, or by an older checkout's in another process.

Older ones have other modules for the same parts, down to the commit 3e130d8 (2026-11-29).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def fit(settings: list[str], folder: Path, batches: int) -> tuple[Any, Any, dict[str, Any]]:
    """Train, and time the second half of so many batches.

    Args:
        settings: of `embedlab train`, whose evaluation and files are off.
        folder: of the run.
        batches: that it consists of.

    Returns:
        The method, its data, and ``seconds`` of a batch, ``start`` (seconds until the clock starts), ``memory_gib``.
    """
    from lightning.pytorch import Callback

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    method, data, trainer = _parts(settings, folder)
    clock = [time.perf_counter()]

    class Clock(Callback):
        done = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.done += 1
            if self.done in (batches // 2, batches):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                clock.append(time.perf_counter())

    trainer.callbacks.append(Clock())
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.fit(method, datamodule=data)
    entered, began, ended = clock
    return method, data, {
        "seconds": (ended - began) / (batches - batches // 2),
        "start": began - entered,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
    }  # fmt: skip


def _parts(settings: list[str], folder: Path) -> tuple[Any, Any, Any]:
    from embedlab.cli.compose import compose

    plain = compose("train", settings)
    run: Any
    try:
        from embedlab.run import run
        from embedlab.run.dev import load_dev
        from embedlab.run.finish import FinalEvaluation
        from embedlab.run.parse import parse_run
    except ModuleNotFoundError:
        from embedlab.training import run  # type: ignore[import-not-found,no-redef]
        from embedlab.training.config import RunConfig  # type: ignore[import-not-found]
        from embedlab.training.final import Finale as FinalEvaluation  # type: ignore[import-not-found]
        from embedlab.training.final import load_dev

        parse_run = RunConfig.from_dict
    config = parse_run(plain)
    method, data = run.build(config, folder)
    finale = FinalEvaluation(config, folder, method.encoder, data, load_dev(config.evaluation))
    trainer, _ = run.build_trainer(config, folder, [], finale)
    return method, data, trainer


def paths_of(checkout: Path) -> str:
    """PYTHONPATH of a process that runs a checkout's code, with the packages of this one."""
    return os.pathsep.join(filter(None, (str(checkout.resolve()), os.environ.get("PYTHONPATH"))))


class Older:
    """`fit` by an older checkout and its own kernels, in a process that goes on from call to call."""

    def __init__(self, checkout: Path) -> None:
        own = {name: value for name, value in os.environ.items() if name != "EMBEDLAB_KERNELS"}
        environment = {**own, "PYTHONPATH": paths_of(checkout)}
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).resolve()], cwd=checkout, env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def fit(self, settings: list[str], batches: int) -> dict[str, Any]:
        """What `fit` measures.

        Raises:
            RuntimeError: what went wrong there, such as a key that it does not know.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([settings, batches]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # others may print there
            if line.startswith(_MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                if "failed" in found:
                    raise RuntimeError(found["failed"])
                return found
        raise RuntimeError(f"the older checkout ended with status {self._process.wait()}")

    def close(self) -> None:
        self._process.communicate()


_MARK = "fitted: "


def _serve() -> None:
    for line in sys.stdin:
        settings, batches = json.loads(line)
        try:
            with tempfile.TemporaryDirectory() as folder:
                *_, found = fit(settings, Path(folder), batches)
        except Exception as error:  # the next may do
            found = {"failed": f"{type(error).__name__}: {error}"}
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(_MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    _serve()
