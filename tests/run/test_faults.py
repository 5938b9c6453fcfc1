"""What a run survives: a full disk, a damaged checkpoint, a scheduler's signal, SIGKILL."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.cli.train import fit
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.errors import UserError
from embedlab.run.callbacks import checkpoints
from embedlab.run.callbacks.checkpoints import LAST, PREVIOUS, find_checkpoint, step_of, unreadable
from embedlab.run.callbacks.interrupt import SIGNALS
from embedlab.run.finish import FinalEvaluation
from embedlab.run.run import train
from embedlab.run.slurm import requeue
from tests.run.test_resume import StopAt, losses, weights
from tests.test_files import safetensors_meets_it, torch_meets_it

STEPS = ("trainer.max_steps=6", "callbacks.checkpoint.every_steps=2")
ROOT = Path(__file__).parents[2]


def full_disk(folder: Path) -> None:
    """What is written to the next checkpoint meets a full disk, once: then the link is gone."""
    folder.mkdir(exist_ok=True)
    (folder / "last.ckpt.new").symlink_to("/dev/full")


def equal(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) and losses(one) == losses(other)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(compose_run, tmp_path, caplog):  # type: ignore[no-untyped-def]
    train(compose_run(*STEPS), tmp_path / "whole")
    full_disk(tmp_path / "full")
    with caplog.at_level(logging.ERROR):
        train(compose_run(*STEPS), tmp_path / "full")
    (line,) = [r.getMessage() for r in caplog.records if "No checkpoint of step" in r.getMessage()]
    assert "step 2" in line
    assert "No space left" in line
    assert step_of(tmp_path / "full" / PREVIOUS) == 4
    assert equal(tmp_path / "whole", tmp_path / "full")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_at_the_end_is_one_line_and_the_last_checkpoint_stays(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    train(compose_run("trainer.max_steps=2"), tmp_path)
    before = (tmp_path / LAST).read_bytes()
    full_disk(tmp_path)
    with pytest.raises(UserError, match=r"step 4 cannot be written.*No space left.*ckpt_path=auto") as caught:
        train(compose_run("trainer.max_steps=4", "ckpt_path=last"), tmp_path)
    assert "\n" not in str(caught.value)
    assert (tmp_path / LAST).read_bytes() == before
    assert not (tmp_path / "last.ckpt.new").is_symlink()


@pytest.mark.parametrize("meet", [torch_meets_it, safetensors_meets_it])
def test_a_full_disk_goes_by_its_own_name(meet, compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(checkpoints.torch, "save", lambda *_: meet())
    with pytest.raises(
        UserError, match=r"step 2 cannot be written \(No space left on device after 0 bytes\); none is kept"
    ):
        train(compose_run("trainer.max_steps=2"), tmp_path)


@pytest.mark.parametrize("best", [True, False], ids=["best", "export"])
def test_an_encoder_that_meets_a_full_disk_names_its_folder(
    best, compose_run, sts_dir, tmp_path, monkeypatch
):  # type: ignore[no-untyped-def]
    """Within a checkpoint and alone: transformers' writer is safetensors'."""
    monkeypatch.setattr(SentenceEncoder, "write", lambda *_, **__: safetensors_meets_it())
    settings = ["trainer.max_steps=2", "callbacks.checkpoint.at_end=false"]
    settings += [f"evaluation.sts_dir={sts_dir}", "evaluation.every=1"] if best else []
    with pytest.raises(OSError, match="No space left on device") as caught:
        train(compose_run(*settings), tmp_path)
    assert caught.value.filename == str(tmp_path / ("best" if best else "export"))


def test_a_best_encoder_that_cannot_be_written_costs_a_checkpoint_too(
    compose_run, sts_dir, tmp_path, monkeypatch, caplog
):  # type: ignore[no-untyped-def]
    original, left = SentenceEncoder.write, [1]

    def once(self, *arguments, **more):  # type: ignore[no-untyped-def]
        if left:
            left.pop()
            safetensors_meets_it()
        original(self, *arguments, **more)

    monkeypatch.setattr(SentenceEncoder, "write", once)
    train(compose_run(*STEPS, f"evaluation.sts_dir={sts_dir}", "evaluation.every=2"), tmp_path)
    problem = f"{tmp_path / 'best'}: No space left on device after 0 bytes"
    assert f"No checkpoint of step 2 ({problem}); none is kept so far" in caplog.text
    assert step_of(tmp_path / LAST) == 6


def test_one_flipped_bit_is_seen_and_the_run_goes_on_from_the_earlier_one(compose_run, tmp_path, caplog):  # type: ignore[no-untyped-def]
    """torch reads it without a word: its reader leaves the checksums aside."""
    train(compose_run(*STEPS), tmp_path / "whole")
    train(compose_run(*STEPS), tmp_path / "parts")
    path = tmp_path / "parts" / LAST
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)
    assert "damaged" in str(unreadable(path))
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint("last", tmp_path / "parts") == tmp_path / "parts" / PREVIOUS
    lines = [r.getMessage() for r in caplog.records]
    assert any("last.ckpt cannot be read" in line for line in lines)
    assert any("previous.ckpt, of step 4" in line for line in lines)
    train(compose_run(*STEPS, "ckpt_path=last"), tmp_path / "parts")
    assert equal(tmp_path / "whole", tmp_path / "parts")


def test_auto_begins_where_there_is_nothing_to_resume(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    assert find_checkpoint("auto", tmp_path) is None
    train(compose_run("trainer.max_steps=2", "ckpt_path=auto"), tmp_path)
    assert step_of(tmp_path / LAST) == 2
    train(compose_run("trainer.max_steps=3", "ckpt_path=auto"), tmp_path)
    assert step_of(tmp_path / LAST) == 3


@pytest.fixture
def scheduler(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    """A SLURM job, and an `scontrol` that writes down what it was asked."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "asked"}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    return tmp_path / "asked"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_schedulers_signal_writes_a_checkpoint_and_queues_the_job_again(
    number, compose_run, tmp_path, scheduler, monkeypatch, capsys
):  # type: ignore[no-untyped-def]
    settings = ("trainer.max_steps=6", "ckpt_path=auto")
    train(compose_run(*settings), tmp_path / "whole")
    with monkeypatch.context() as patch:
        StopAt(3, patch, number)
        assert fit(compose_run(*settings), tmp_path / "parts") == 128 + number
    assert scheduler.read_text() == "requeue 77\n"
    assert "queued again" in capsys.readouterr().err
    assert step_of(tmp_path / "parts" / LAST) == 3
    assert fit(compose_run(*settings), tmp_path / "parts") == 0  # what the job runs when it comes again
    assert equal(tmp_path / "whole", tmp_path / "parts")


def test_ctrl_c_and_a_wish_queue_nothing(compose_run, tmp_path, scheduler, monkeypatch):  # type: ignore[no-untyped-def]
    assert not requeue(signal.SIGINT)
    # A command that would not go on is not asked for again.
    for name, more in (("wish", ("ckpt_path=auto", "callbacks.requeue=false")), ("no way on", ())):
        with monkeypatch.context() as patch:
            StopAt(1, patch, signal.SIGTERM)
            status = fit(compose_run("trainer.max_steps=3", *more), tmp_path / name)
        assert status == 128 + signal.SIGTERM
        assert not scheduler.exists()


def test_only_the_first_rank_asks_and_an_array_task_by_its_name(scheduler, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    monkeypatch.setenv("RANK", "1")
    assert not requeue(signal.SIGTERM)
    monkeypatch.setenv("RANK", "0")
    assert requeue(signal.SIGTERM)
    assert scheduler.read_text() == "requeue 70_4\n"


def test_a_scheduler_that_says_no_is_reported(scheduler, monkeypatch, caplog):  # type: ignore[no-untyped-def]
    (scheduler.parent / "bin" / "scontrol").write_text("#!/bin/sh\necho 'Job is held' >&2\nexit 1\n")
    assert not requeue(signal.SIGTERM)
    assert "Job 77 is not queued again: Job is held" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_submitits_own_handler_gets_its_signal(number, monkeypatch):  # type: ignore[no-untyped-def]
    """submitit submits the job again by its handler, which training puts aside and then puts back."""
    got = []
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    before = signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
    try:
        assert requeue(number)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert got == [signal.SIGUSR2]


def test_a_scheduler_may_send_several_signals_and_ctrl_c_ends_at_once() -> None:
    from types import SimpleNamespace

    from embedlab.run.callbacks.interrupt import GracefulStop

    keeper: Any = SimpleNamespace(stop_requested=None)
    stop = GracefulStop(keeper)
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
        stop._handle(number, None)
    assert keeper.stop_requested == signal.SIGUSR2
    with pytest.raises(KeyboardInterrupt):
        stop._handle(signal.SIGINT, None)


def test_scoring_after_training_can_be_ended(compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    """SIGTERM found Lightning's handler there, which notes it and goes on."""
    outside = {s: signal.getsignal(s) for s in SIGNALS}
    within, score = [], FinalEvaluation.score

    def scored(self: FinalEvaluation) -> Any:
        within.append({s: signal.getsignal(s) for s in SIGNALS})
        return score(self)

    monkeypatch.setattr(FinalEvaluation, "score", scored)
    train(compose_run("trainer.max_steps=2"), tmp_path)
    assert within == [outside]
    assert {s: signal.getsignal(s) for s in SIGNALS} == outside


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_at_random_steps(tmp_path):  # type: ignore[no-untyped-def]
    """One kill of each way; 20 of them are in docs/scale.md."""
    command = [sys.executable, "tools/faults.py", "--kills", "4", "--steps", "40", "--only", "training"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal bit for bit") == 4


@pytest.mark.parametrize(
    ("kinds", "kills"),
    [
        ("overwrite", 6),
        pytest.param("cache,encode,search,export,evaluate,report,Sentence", 108, marks=pytest.mark.whole),
    ],
)
@pytest.mark.timeout(1800)
def test_a_killed_writer_leaves_the_old_or_the_new(kinds: str, kills: int) -> None:
    """At random moments; tests/test_files.py kills what places every output at each of its lines."""
    command = [sys.executable, "tools/faults.py", "--kills", str(kills), "--only", kinds]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| all | {kills} | {kills} |" in done.stdout
