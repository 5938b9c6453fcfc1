"""What ranks tell one another beside batch and gradients: rarely anything, and a signal to one is one to all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from embedlab.run.callbacks.checkpoints import LAST, step_of
from tests.children import children_of
from tests.distributed.captured_ranks import Spec, train_on_ranks
from tests.distributed.captured_runs import WORLD, line, ranks
from tests.distributed.test_captured import CPU
from tests.methods.golden import Inputs

STEPS = 60
THE_STEPS_OWN = ("embedlab.distributed.", "embedlab.engine.gradient_sum")
"""Who may send in every step: the batch's vectors and the gradients."""


def test_ranks_exchange_nothing_else_in_every_step_and_read_nothing(tmp_path: Path) -> None:
    inputs = Inputs(tmp_path / "inputs")
    more = (f"trainer.max_steps={STEPS}", "trainer.max_epochs=99", "trainer.log_every_n_steps=20")
    spec = Spec(line(inputs, "simcse", WORLD, *CPU, *more), counted=True)
    assert train_on_ranks({str(tmp_path / "run"): spec}, WORLD, tmp_path) == 0
    for rank in ranks(tmp_path / "run"):
        counts = rank["counts"]
        others = {name: n for name, n in counts.items() if not name.startswith(THE_STEPS_OWN)}
        assert not {name: n for name, n in others.items() if n > STEPS / 4}
        assert counts["embedlab.engine.gradient_sum: all_reduce"] >= STEPS
        assert counts["embedlab.run.callbacks.checkpoints: all_reduce"] > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", range(WORLD))
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(rank: int, tmp_path: Path) -> None:
    inputs, folder = Inputs(tmp_path / "inputs"), tmp_path / "run"
    endless = ("trainer.max_steps=100000", "trainer.max_epochs=100000", "callbacks.checkpoint.every_steps=5")
    run = line(inputs, "simcse", WORLD, *CPU, *endless, f"hydra.run.dir={folder}")
    command = [sys.executable, "-m", "embedlab", "train", *run]
    starter = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        while not (folder / LAST).exists():
            assert starter.poll() is None
            time.sleep(0.1)
        before = step_of(folder / LAST)
        os.kill(children_of(starter.pid)[rank], signal.SIGTERM)
        said = starter.communicate(timeout=120)[1].decode()
    finally:
        starter.kill()
    assert starter.returncode == 128 + signal.SIGTERM, said
    assert f"interrupted; go on with ckpt_path=last hydra.run.dir={folder}" in said
    assert step_of(folder / LAST) >= before
