"""The work of a captured step on several ranks, without a card: gloo ranks do it piece by piece, in the same order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embedlab.run.callbacks.checkpoints import find_checkpoint
from tests.children import children_of
from tests.distributed.captured_ranks import FAULTS, Spec, check_ended, train_each
from tests.distributed.captured_runs import (
    EPOCHS,
    EXACT,
    ON_A_CARD,
    WORLD,
    check_norms,
    checkpoint,
    column,
    compared,
    gradient_error,
    line,
    ranks,
)
from tests.methods.golden import Inputs

CPU = ("trainer=cpu", "step=auto")
DROPOUT = ("backbone.dropout=0.1", "trainer.max_epochs=99")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one rank (``one/NAME``) and of two (``two/NAME``)."""
    root = tmp_path_factory.mktemp("captured")
    inputs = Inputs(root / "inputs")
    one = compared(inputs, 1, *CPU, precision="64-true")
    train_each({str(root / "one" / name): spec for name, spec in one.items()}, 1, root)
    two = compared(inputs, WORLD, *CPU, precision="64-true")

    def longer(steps: int, *more: str) -> list[str]:
        return line(inputs, "simcse", WORLD, *CPU, *DROPOUT, f"trainer.max_steps={steps}", *more)

    for name in ("diffcse", "infocse", "whitenedcse"):  # which each rank draws for itself
        two[name] = Spec(line(inputs, name, WORLD, *CPU, "trainer.max_steps=3"))
    two["whole"] = Spec(longer(60))
    two["parts"] = Spec(longer(60), stop=3)  # which the ranks agree upon within 20 steps
    two["poisoned"] = Spec(longer(9, "trainer.precision=32-true"), poisoned=2)
    train_each({str(root / "two" / name): spec for name, spec in two.items()}, WORLD, root)
    faulty = {
        str(root / "faulty" / fault / name): replace(two[name], fault=fault)
        for fault in FAULTS
        for name in ("simcse_supervised", "half")
    }
    train_each(faulty, WORLD, root)
    train_each({str(root / "two" / "parts"): Spec(longer(60, "ckpt_path=last"))}, WORLD, root)
    return root


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXACT)
def test_the_gradient_is_that_of_the_whole_batch(name: str, trained: Path) -> None:
    assert gradient_error(trained / "one" / name, trained / "two" / name) < 1e-6


@pytest.mark.parametrize("name", EPOCHS)
def test_a_run_on_two_ranks_is_the_run_on_one(name: str, trained: Path) -> None:
    one, two = (trained / w / name for w in ("one", "two"))
    check_norms(name, column(one, "train/grad_norm"), column(two, "train/grad_norm"), near=1e-3)
    a, b = (checkpoint(f)["state_dict"] for f in (one, two))
    if name.startswith("half"):  # as those of the keys' biases are all rounding
        apart = torch.cat([(b[key] - value).flatten() for key, value in a.items()])
        assert float(apart.abs().mean()) < 2e-4
        return
    for key, value in a.items():
        torch.testing.assert_close(b[key], value, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_sum_is_far_beyond_the_bounds_of_a_card(fault: str, trained: Path) -> None:
    one, faulty = trained / "one", trained / "faulty" / fault
    error = gradient_error(one / "simcse_supervised", faulty / "simcse_supervised")
    assert error > 100 * ON_A_CARD["simcse_supervised"]
    norms = [column(folder / "half", "train/grad_norm") for folder in (one, faulty)]
    assert max(abs(b / a - 1) for a, b in zip(*norms, strict=True)) > 0.15
    with pytest.raises(AssertionError):
        check_norms("half", *norms, near=0.0)


def test_ranks_stay_the_same_and_draw_differently(trained: Path) -> None:
    for folder in (trained / "two").iterdir():
        first, second = ranks(folder)
        assert first["weights"] == second["weights"], folder.name
        assert first["seed"] != second["seed"]


def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(trained: Path) -> None:
    whole, parts = (ranks(trained / "two" / name)[0] for name in ("whole", "parts"))
    assert parts["step"] == whole["step"] == 60
    assert parts["weights"] == whole["weights"]


def test_what_one_rank_cannot_do_no_rank_does(trained: Path) -> None:
    """The third step has no number on the second rank alone: all keep the weights of two steps, and stop."""
    first, second = ranks(trained / "two" / "poisoned")
    assert "not finite" in first["error"]
    assert "on another device" in first["error"]
    assert "rows of the batch: " in second["error"]
    assert first["weights"] == second["weights"]


@pytest.mark.timeout(300)
def test_a_run_that_fails_says_why_and_the_next_is_trained(tmp_path: Path) -> None:
    inputs = Inputs(tmp_path / "inputs")
    good = line(inputs, "simcse", 1, *CPU, "trainer.max_steps=1")
    runs = {"first": good, "bad": [*good, "method.tau=-1"], "last": good}
    train_each({str(tmp_path / name): Spec(spec) for name, spec in runs.items()}, 1, tmp_path)
    with pytest.raises(pytest.fail.Exception, match=r"ended with status 1(.|\n)*method\.tau"):
        check_ended(tmp_path / "bad")
    for name in ("first", "last"):
        assert len(column(tmp_path / name, "train/loss")) == 1


def test_ranks_that_cannot_begin_fail_every_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    runs = {str(tmp_path / name): Spec(()) for name in ("first", "second")}
    train_each(runs, WORLD, tmp_path)
    for run in runs:
        with pytest.raises(pytest.fail.Exception, match="ended with status 1"):
            check_ended(Path(run))


@pytest.mark.timeout(300)
def test_a_killed_rank_ends_the_run_and_leaves_its_checkpoint(tmp_path: Path) -> None:
    kill_one_rank(tmp_path, *CPU)


def kill_one_rank(tmp_path: Path, *more: str) -> None:
    """Kill the second rank of a run that has written a checkpoint: the run ends, and the checkpoint is whole."""
    inputs = Inputs(tmp_path / "inputs")
    steps = ("trainer.max_steps=100000", "trainer.max_epochs=100000", "callbacks.checkpoint.every_steps=5")
    run, folder = line(inputs, "simcse", WORLD, *more, *DROPOUT, *steps), tmp_path / "run"
    code = (
        "import sys, embedlab.run.processes as p; p.GRACE_SECONDS = 3\n"
        "from pathlib import Path; from tests.distributed.captured_ranks import Spec, train_on_ranks\n"
        f"sys.exit(train_on_ranks({{{str(folder)!r}: Spec({run!r})}}, 2, Path({str(tmp_path)!r})))"
    )
    starter = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not (folder / "last.ckpt").exists():
            assert starter.poll() is None
            time.sleep(0.1)
        os.kill(children_of(starter.pid)[1], signal.SIGKILL)
        assert starter.wait(120) != 0
    finally:
        starter.kill()
    assert find_checkpoint("last", folder) is not None
