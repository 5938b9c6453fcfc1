"""What the terminal, a pipe and a narrow window get."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlab import console
from embedlab.console import LogFormat, LogHandler, print_table, progress_bar, short, table

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(code: str, columns: int = 80, **environment: str) -> str:
    """What a program writes on a pseudo-terminal of so many columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {
        k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "CI")
    }
    env = {**kept, "TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=follower, env=env
    )
    os.close(follower)
    out = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux says so at the end of a pseudo-terminal
            break
        if not part:
            break
        out += part
    os.close(leader)
    assert process.wait() == 0, out.decode()
    return out.decode()


BAR = """
import logging, sys
from embedlab.console import progress_bar, show_log
show_log()
with progress_bar("training", "of 400 steps", 400, begun=100) as move:
    for done in range(101, 401):
        move(done, done, "loss 0.0123")
        if done == 200:
            logging.getLogger("x").warning("a line of the log")
"""


def test_a_bar_stays_below_the_log() -> None:
    text = on_terminal(BAR, 120)
    assert "warning: a line of the log" in ESCAPE.sub("", text)
    line = next(line for line in ESCAPE.sub("\r", text).split("\r") if "a line of the log" in line)
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning: a line of the log *", line)  # nothing of the bar beside it


@pytest.mark.parametrize("columns", [24, 40, 80, 200])
def test_a_bar_is_one_line_at_any_width(columns: int) -> None:
    code = (
        "from embedlab.console import progress_bar\n"
        "with progress_bar('training', 'of 400 steps', 400, True) as move:\n    move(400, 400, 'loss 1.23, dev 55.1')"
    )
    text = on_terminal(code, columns)
    *_, last = [part for part in re.split(r"[\r\n]+", ESCAPE.sub("", text)) if part.strip()]
    assert last.startswith("training")
    assert len(last) <= columns


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_no_bar_where_a_line_cannot_be_written_again(environment: dict[str, str]) -> None:
    text = on_terminal(BAR, **environment)
    assert ESCAPE.search(text) is None
    assert "training" not in text


def test_elsewhere_lines_come_in_the_first_seconds_and_then_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(now=0.0, strftime=lambda _: "17:02:11")
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(console, "time", clock)

    def said(**options: Any) -> list[str]:
        with console.progress_bar("mining", "queries", 640, **options) as move:
            for done in range(0, 641, 10):
                move(done, done)
                clock.now += 1
        return capsys.readouterr().err.splitlines()

    assert said() == [
        "17:02:11 mining: 30 queries, 10/s, 0:01:01 left",
        "17:02:11 mining: 340 queries, 10/s, 0:00:30 left",
    ]
    assert said(show=False) == said(lines=False) == []
    with console.progress_bar("mining", "queries", 10) as move:
        clock.now += 60
        move(10, 10)
    assert capsys.readouterr().err == "", "what is done needs no line"


TABLE = """
from embedlab.console import print_table, table
rows = [("Lee human similarity, Spearman", "43.91 [31.83, 55.21]", "+2.82"), ("x", "1", "2")]
print_table(table(("metric", "before (n=1)", "change"), rows), "A title", "A caption. " * 9)
"""


def test_colours_are_left_out_on_request() -> None:
    colour = r"\x1b\[[0-9;]*3[0-7][0-9;]*m"
    assert re.search(colour, on_terminal(TABLE, NO_COLOR="1")) is None


@pytest.mark.parametrize("columns", [20, 40, 45, 60, 100])
def test_a_narrow_terminal_loses_no_digit(columns: int) -> None:
    text = ESCAPE.sub("", on_terminal(TABLE, columns))
    assert "43.91 [31.83, 55.21]" in text
    assert "+2.82" in text
    assert "…" not in text


def test_a_pipe_gets_each_row_in_one_line() -> None:
    out = io.StringIO()
    print_table(table(("a", "b"), [("x" * 300, "1"), ("y", "2.50")]), "title", "one\n\ntwo", out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "title"
    assert lines[-4:] == ["one", "", "two", ""]
    assert lines[1].split() == ["a", "b"]
    assert any(line.split() == ["x" * 300, "1"] for line in lines)
    assert ESCAPE.search(out.getvalue()) is None
    assert all(line == line.rstrip() for line in lines)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=4), st.text())
def test_nothing_in_a_table_commands_the_terminal(rows: list[tuple[str, str]], head: str) -> None:
    out = io.StringIO()
    print_table(table((head, "[b]"), rows), file=out)
    assert not any(c < " " or "\x7f" <= c < "\xa0" for c in out.getvalue().replace("\n", ""))


@pytest.mark.parametrize(
    ("level", "said"),
    [(logging.INFO, "text"), (logging.WARNING, "warning: text"), (logging.ERROR, "error: text")],
)
def test_a_line_of_the_log(level: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    handler = LogHandler()
    handler.handle(logging.LogRecord("embedlab.run.run", level, __file__, 1, "te%s", ("xt",), None))
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"\d\d:\d\d:\d\d {said}\n", err)
    assert isinstance(handler.formatter, LogFormat)


def test_there_is_no_bar_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("encoding", "texts", 10) as move:
        move(5, 5, "x")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (4.5678, "4.57"), (99.96, "100"), (1234.5, "1,234"), (-2e6, "-2,000,000")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text
