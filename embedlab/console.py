"""What reaches a terminal: a line that all ranks have is said once, and other packages' loggers are kept silent."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from embedlab.errors import printable
from embedlab.files import locked


def markdown_text(text: str) -> str:
    """Text for a cell or a paragraph of Markdown, in which it opens no tag, code, link or cell."""
    text = re.sub(r"[\\|<`]", r"\\\g<0>", printable(text))
    return text.replace("](", "]\\(")


LEAF_SPEC = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
"""torch to Lightning, in every run: the pattern for `warnings.filterwarnings`."""


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


def show_log() -> None:
    """The log on stderr: of the first rank what is worth knowing, of the others their warnings."""
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")


SAID = "EMBEDLAB_SAID"
"""The variable that names the file, in the environment of ranks that one command has started."""


def say_once(line: str) -> None:
    """Print a line on stderr, unless another rank has."""
    path = os.environ.get(SAID)
    if path is not None:
        with locked(Path(path)), open(path, "a+", encoding="utf-8") as said:
            said.seek(0)
            if line in said.read().splitlines():
                return
            said.write(f"{line}\n")
    print(line, file=sys.stderr)


@contextmanager
def progress_bar(
    label: str, unit: str, total: int, show: bool | None = None
) -> Iterator[Callable[..., None]]:
    """A bar on stderr with the count, units a second and the time left.

    Args:
        label: what is being done.
        unit: of the count, such as ``texts``.
        total: of what `completed` counts; 0: not known.
        show: whether there is a bar; None: on a terminal.

    Returns:
        ``move(count, completed, more="")``: units done, how much of `total` they are, and what to say besides.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal if show is None else show):
        yield lambda count, completed, more="": None
        return
    words = TextColumn("{task.fields[count]:,} " + unit + ", {task.fields[rate]:,.0f}/s{task.fields[more]}")
    columns = (TextColumn(label), BarColumn(), TaskProgressColumn(), words, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=show is None) as bar:
        task = bar.add_task(label, total=total or None, count=0, rate=0.0, more="")

        def move(count: int, completed: float, more: str = "") -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, completed=completed, count=count, rate=count / max(elapsed, 1e-3), more=more)

        yield move
