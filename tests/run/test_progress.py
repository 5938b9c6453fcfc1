"""How far a run is: what lines say, and how many there are."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from embedlab.console import short
from embedlab.engine.meter import Meter
from embedlab.run.callbacks.progress import LINES, Progress, duration
from embedlab.run.run import train

LINE = re.compile(r"^\d\d:\d\d:\d\d steps: ([\d,]+) of ([\d,]+), (.*), \d+:\d\d left$", re.MULTILINE)


@pytest.mark.parametrize(
    ("overrides", "total"),
    [
        (("trainer.max_steps=4",), 4),  # of 7 batches
        (("trainer.max_steps=9", "trainer.max_epochs=9"), 9),
        (("trainer.max_steps=2", "optimizer.accumulate=2"), 2),
        (("trainer.max_steps=-1",), 7),
    ],
)
def test_it_counts_to_the_last_step(
    compose_run: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    total: int,
) -> None:
    train(compose_run(*overrides, "callbacks.progress=plain", "trainer.log_every_n_steps=50"), tmp_path)
    out, err = capsys.readouterr()
    lines = LINE.findall(err)
    assert [(int(done), int(of)) for done, of, _ in lines] == [(n, total) for n in range(1, total + 1)]
    assert all("loss" in shown for _, _, shown in lines)
    last = list(csv.DictReader((tmp_path / "metrics.csv").open()))[-1]
    assert f"loss {short(float(last['train/loss']))}," in lines[-1][2] + ","
    assert "steps:" not in out


def test_a_resumed_run_goes_on_counting(
    compose_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("callbacks.progress=plain", "trainer.max_epochs=9")
    train(compose_run("trainer.max_steps=2", *common), tmp_path)
    capsys.readouterr()
    train(compose_run("trainer.max_steps=4", "ckpt_path=last", *common), tmp_path)
    lines = LINE.findall(capsys.readouterr().err)
    assert [int(done) for done, *_ in lines] == [3, 4]
    assert all(shown.startswith("epoch 1 of 9") for _, _, shown in lines)


@pytest.mark.parametrize("total", [1, 7, LINES, LINES + 1, 999, 15_625])
@pytest.mark.parametrize("begun", [0, 5])
def test_a_run_has_few_lines_evenly_apart(
    compose_run: Any, capsys: pytest.CaptureFixture[str], total: int, begun: int
) -> None:
    begun = min(begun, total - 1)

    class Trainer:
        is_global_zero, callbacks, callback_metrics = True, (), {}
        max_epochs, current_epoch = 1, 0

    progress = Progress(compose_run("callbacks.progress=plain"))
    trainer: Any = Trainer()
    progress._begin(trainer, "training", "steps", total, begun)
    for done in range(begun + 1, total + 1):
        progress._show(trainer, done)
        progress._show(trainer, done)  # of two batches of an update
    progress._show(trainer, total, last=True)
    said = [int(n.replace(",", "")) for n in re.findall(r"steps: ([\d,]+) of", capsys.readouterr().err)]
    assert said[0] == begun + 1
    assert said[-1] == total
    assert len(said) == len(set(said)) <= LINES + 2
    assert len(said) >= min(total - begun, LINES // 2)


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.4, 60, 3599.6, 3661)] == [
        "0:00",
        "0:59",
        "1:00",
        "1:00:00",
        "1:01:01",
    ]


def test_values_of_an_earlier_step_say_which(
    compose_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two records the device is asked for nothing, so what is shown stands still."""
    asked: list[int] = []
    inner = Meter.flush
    monkeypatch.setattr(Meter, "flush", lambda self, step: asked.append(step) or inner(self, step))
    train(
        compose_run("trainer.max_steps=7", "callbacks.progress=plain", "trainer.log_every_n_steps=3"),
        tmp_path,
    )
    lines = LINE.findall(capsys.readouterr().err)
    assert asked == [1, 3, 6, 7]
    steps = [re.search(r"loss [\d.]+(?: \(step (\d+)\))?(?:,|$)", shown) for *_, shown in lines]
    of = [
        int(found[1]) if found[1] else int(done)
        for (done, *_), found in zip(lines, steps, strict=True)
        if found
    ]
    assert len(of) == len(lines) == 7
    assert set(of) <= {*asked}
    assert all(step <= int(done) for step, (done, *_) in zip(of, lines, strict=True))
    assert of == sorted(of)
    assert 1 in of[1:], "a value of the first step is shown later, and says so"
