"""A progress bar over everything that is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from embedlab.data.readers import Reader


@contextmanager
def progress_bar(readers: Sequence[Reader], show: bool) -> Iterator[Callable[[int], None]]:
    """A function that takes the number of rows done and moves a progress bar, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield lambda rows: None
        return
    columns = [
        TextColumn("tokenising"),
        BarColumn(),
        TextColumn("{task.fields[rows]:,} rows"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    size = sum(reader.size for reader in readers)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=size or None, rows=0)

        def advance(rows: int) -> None:
            read = sum(reader.position for reader in readers)
            bar.update(task, completed=read, rows=rows)

        yield advance
