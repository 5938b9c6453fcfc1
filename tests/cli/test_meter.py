"""What is said of the speed, by a clock that the test sets."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embedlab import console
from embedlab.cli.encoders import Configured
from embedlab.cli.main import main
from embedlab.cli.meter import Meter, metered, told
from embedlab.console import EVERY, FIRST
from embedlab.corpus.inputs import Texts
from embedlab.corpus.parts import Counts
from embedlab.data.readers import open_reader

ROWS, PART = 6400, 100


class Clock:
    now = 1000.0
    strftime = staticmethod(time.strftime)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    return clock


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    path = tmp_path / "a.txt"
    path.write_text("as long as any other\n" * ROWS)
    return Texts([(open_reader(path), "text")])


def parts(whole: dict[int, Counts] | None = None) -> Any:
    return SimpleNamespace(manifest=SimpleNamespace(part_rows=PART), whole=lambda: whole or {})


def read(stream: Iterator[Any], rows: int) -> None:
    for _ in range(rows):
        next(stream)


@pytest.mark.parametrize("workers", [1, 4])
def test_rates_and_the_time_left(workers: int, texts: Texts, clock: Clock) -> None:
    """A process of `workers` passes over what the others read."""
    meter, stream = Meter(texts, parts(), 0, workers), texts.lines()
    read(stream, 1600)
    clock.now += 8
    meter.move(1600 // workers, 1600 // workers, tokens=4000)
    assert meter.count == 1600 // workers
    assert meter.left == pytest.approx(3 * 8, rel=0.05)
    assert re.fullmatch(
        rf"{1600 // workers:,} texts, {200 // workers} texts/s, 500 tokens/s, 0:00:2\d left", str(meter)
    )


def test_what_is_there_already_takes_no_time(texts: Texts, clock: Clock) -> None:
    whole = {number: Counts(rows=PART) for number in (0, 1, 40, 41, 42, 43)}  # the first two are behind
    meter, stream = Meter(texts, parts(whole), 0, 1), texts.lines()
    read(stream, 1600)
    clock.now += 8
    meter.move(1600, 1600, tokens=1)
    assert meter.left == pytest.approx(4400 / 200, rel=0.05)


def test_what_was_read_ahead_is_not_done(texts: Texts, clock: Clock) -> None:
    meter, stream = Meter(texts, parts(), 0, 1), texts.lines()
    read(stream, ROWS)  # one chunk has the whole file
    clock.now += 8
    meter.move(1600, ROWS, tokens=1)
    assert meter.left == pytest.approx((ROWS - 1600) / 200)


def test_a_line_comes_in_the_first_seconds_and_then_now_and_then(
    texts: Texts, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder: Any = SimpleNamespace(tokens_read=7)
    with metered(Configured(encoder, {}), Meter(texts, parts(), 0, 1), " (process 0 of 2)") as telling:
        for _ in range(64):
            clock.now += 1
            encoder.tokens_read += 1000
            telling.arguments["on_batch"](50, 100)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + (64 - int(FIRST) - 1) // (int(EVERY) + 1)
    assert re.match(rf"\d\d:\d\d:\d\d 50 texts, {50 / (FIRST + 1):.0f} texts/s, 1,000 tokens/s, ", lines[0])
    assert all(line.endswith(" left (process 0 of 2)") for line in lines)


def test_other_processes_are_silent(
    texts: Texts, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    encoder: Any = SimpleNamespace(tokens_read=0)
    with metered(Configured(encoder, {}), Meter(texts, parts(), 0, 1)) as telling:
        clock.now += 100
        telling.arguments["on_batch"](1, 2)
    assert capsys.readouterr().err == ""


def test_an_encoder_that_is_used_again_and_again_tells_how_much_it_has_read(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder: Any = SimpleNamespace()
    with told(Configured(encoder, {}), "scoring sts") as telling:
        for _ in range(40):
            clock.now += 1
            telling.arguments["on_batch"](50, 100)
            telling.arguments["on_batch"](100, 100)
    lines = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "scoring sts: 250 texts encoded, 83.3/s", "scoring sts: 3,350 texts encoded, 98.5/s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("encode in.txt out.npy", r"\d+ texts, .* texts/s, .* tokens/s, .* left"),
        ("search index in.txt index", r"encoding: \d+ texts, .*/s, .* left"),
        ("mine in.csv out.csv block=8", r"mining: \d+ queries, .*/s, .* left"),
        ("evaluate suite=lee", r"scoring lee: \d+ texts encoded, .*/s"),
    ],
)
def test_no_long_command_is_silent_in_a_pipe(
    command: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FIRST", "EVERY"):
        monkeypatch.setattr(console, name, -1.0)
    lines = [f"text {i}" for i in range(40)]
    Path("in.txt").write_text("\n".join(lines))
    Path("in.csv").write_text("\n".join(["anchor,positive", *(f"{line},{line} more" for line in lines)]))
    assert main([*command.split(), "ckpt=mini", "batch_size=8"]) == 0
    assert re.search(rf"^\d\d:\d\d:\d\d {told}$", capsys.readouterr().err, re.M)
