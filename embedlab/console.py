"""What reaches a terminal: log, bars and tables of one style, and other packages' loggers kept silent.

Results go to standard output; the log, bars and warnings to standard error, so that a pipe holds results only.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from embedlab.errors import printable
from embedlab.locks import locked

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn
    from rich.table import Table


def markdown_text(text: str) -> str:
    """Text for a cell or a paragraph of Markdown, in which it opens no tag, code, link or cell."""
    text = re.sub(r"[\\|<`]", r"\\\g<0>", printable(text))
    return text.replace("](", "]\\(")


LEAF_SPEC = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
"""torch to Lightning, in every run: the pattern for `warnings.filterwarnings`."""


KERNEL_HINTS = "bitsandbytes.backends"
"""The logger by which bitsandbytes, which peft imports and sentence-transformers through it, warns of a kernel that is
not installed: 4-bit weights on a CPU alone would use it, and it is not needed."""


@contextmanager
def quiet(*names: str, level: int = logging.ERROR) -> Iterator[None]:
    """Of the loggers `names` only what is at least of this level, inside."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)


class LogFormat(logging.Formatter):
    """``17:02:11 text``; of what is more than information, its level too: ``17:02:11 warning: text``."""

    def __init__(self) -> None:
        super().__init__(datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{self.formatTime(record, self.datefmt)} {level}{record.message}"


class LogHandler(logging.StreamHandler[Any]):
    """Writes to what is standard error at that moment: a bar that is on the terminal then stays below the log."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(LogFormat())

    @property
    def stream(self) -> Any:
        return sys.stderr


def show_log() -> None:
    """The log on stderr: of the first rank what is worth knowing, of the others their warnings."""
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, handlers=[LogHandler()])


SAID = "EMBEDLAB_SAID"
"""The variable that names the file, in the environment of ranks that one command has started."""


_spelling: list[Callable[[str], str]] = []


@contextmanager
def spelling(change: Callable[[str], str]) -> Iterator[None]:
    """Lines of `say_once` have the keys as a command spells them, inside."""
    _spelling.append(change)
    try:
        yield
    finally:
        _spelling.pop()


def say_once(line: str) -> None:
    """Print a line on stderr, unless another rank has."""
    for change in _spelling:
        line = change(line)
    if is_new(line):
        print(line, file=sys.stderr)


def is_new(line: str) -> bool:
    """Whether no rank of this command has said a line; it then counts as said."""
    path = os.environ.get(SAID)
    if path is not None:
        with locked(Path(path)), open(path, "a+", encoding="utf-8") as said:
            said.seek(0)
            if line in said.read().splitlines():
                return False
            said.write(f"{line}\n")
    return True


def say(line: str) -> None:
    """Print a line with the time on stderr: progress of a run that is watched in a file."""
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


def has_bars() -> bool:
    """Whether standard error is a terminal on which a line can be written again."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.is_terminal and not console.is_dumb_terminal


ROOM = 60
"""Columns of a terminal with room for a bar beside what it counts."""
FIRST, EVERY = 2.0, 30.0
"""Seconds before the first line of progress, and between two, where there is no terminal."""


class Pace:
    """When a line of progress is due: in the first seconds, and then now and then."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = self._began + FIRST

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return max(1e-3, time.monotonic() - self._began)

    def is_due(self) -> bool:
        """Whether a line is due; the next one then is later."""
        now = time.monotonic()
        if now <= self._next:
            return False
        self._next = now + EVERY
        return True


@contextmanager
def progress_bar(
    label: str, unit: str, total: int, show: bool | None = None, begun: int = 0, lines: bool = True
) -> Iterator[Callable[..., None]]:
    """A bar on stderr with the count, units a second and the time left; without a terminal lines, now and then.

    Args:
        label: what is being done.
        unit: of the count, such as ``texts``.
        total: of what `completed` counts; 0: not known.
        show: whether there is a bar; None: on a terminal, and elsewhere lines.
        begun: units that were done before.
        lines: False where the caller has its own.

    Returns:
        ``move(count, completed, note="")``: units done, how much of `total` they are, and what else is shown.
    """
    pace = Pace()

    def counted(count: int, note: str) -> str:
        rate = (count - begun) / pace.seconds
        speed = f"{short(1 / rate)} s each" if 0 < rate < 1 else f"{short(rate)}/s"
        text = f"{count:,} {unit}, {speed}"
        return f"{text}, {note}" if note else text

    if not (has_bars() if show is None else show):

        def tell(count: int, completed: float, note: str = "") -> None:
            if show is None and lines and (completed < total or not total) and pace.is_due():
                line = f"{label}: {counted(count, note)}"
                if total and completed > begun:
                    left = pace.seconds * (total - completed) / (completed - begun)
                    line += f", {timedelta(seconds=round(left))} left"
                say(line)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column

    console = Console(stderr=True)
    name = TextColumn(label, table_column=Column(no_wrap=True, min_width=len(label)))
    share = TaskProgressColumn(table_column=Column(no_wrap=True, min_width=4))
    words = TextColumn("{task.fields[words]}", markup=False)
    columns: list[ProgressColumn] = [name, share, words]
    if console.width >= ROOM:
        left = TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5))
        columns = [name, BarColumn(console.width // 5), share, left, words]
    with Progress(*columns, console=console, transient=show is None) as bar:
        task = bar.add_task(label, total=total or None, completed=begun, words="")

        def move(count: int, completed: float, note: str = "") -> None:
            bar.update(task, completed=completed, words=counted(count, note))

        yield move


def short(value: float) -> str:
    """A number in three digits or with thousands: 0.0123, 4.56, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int = 1,
    numbers: Literal["left", "right"] = "right",
) -> Table:
    """A table in the one style of all commands.

    Args:
        columns: headings.
        rows: of cells.
        left: how many columns are labels; they may be broken into lines, numbers never are.
        numbers: where the others stand.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    cells = [[printable(cell) for cell in row] for row in (columns, *rows)]
    for i, column in enumerate(zip(*cells, strict=True)):
        whole = " ".join(column).split() if i < left else column
        out.add_column(
            Text(column[0]), justify="left" if i < left else numbers, no_wrap=i >= left,
            min_width=max(map(cell_len, whole), default=0),
        )  # fmt: skip
    for row in cells[1:]:
        out.add_row(*map(Text, row))
    return out


def print_table(content: Table, title: str = "", caption: str = "", file: IO[str] | None = None) -> None:
    """Print a table between its title and its caption.

    A terminal that is too narrow breaks lines rather than lose digits. A pipe or a file gets each row in one line,
    without escape codes and blanks at line ends.

    Args:
        content: of `table`.
        title, caption: lines above and below.
        file: where to; None: standard output.
    """
    from rich.console import Console
    from rich.measure import Measurement

    file = sys.stdout if file is None else file
    console = Console(file=file)
    if console.is_terminal:
        unbounded = console.options.update_width(10_000)
        console.width = max(console.width, Measurement.get(console, unbounded, content).minimum)
        _print(console, content, title, caption)
        return
    text = io.StringIO()
    _print(Console(file=text, width=1000, no_color=True), content, title, caption)
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()), file=file)


def _print(console: Console, content: Table, title: str, caption: str) -> None:
    from rich.text import Text

    if title:
        console.print(Text(title, style="bold"))
    console.print(content)
    if caption:
        console.print(Text(caption))
    console.print()
