"""Files of texts, as the commands read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedlab.console import progress_bar
from embedlab.data.reader import FileReader, Layout
from embedlab.data.readers import open_reader
from embedlab.errors import UserError
from embedlab.files import like

if TYPE_CHECKING:
    from embedlab.cli.encoders import Configured

_USUAL_COLUMNS = ("sentence", "text")


@contextmanager
def metered(reader: FileReader, encoder: Configured) -> Iterator[Configured]:
    """The encoder with a bar on a terminal, which moves through the file of `reader` after every batch."""
    texts = at = 0  # of the windows before this one: texts, and place in the file

    def on_batch(done: int, of: int) -> None:
        nonlocal texts, at
        move(texts + done, at + (reader.position - at) * done / of)
        if done == of:
            texts, at = texts + of, reader.position

    with progress_bar("encoding", "texts", reader.size) as move:
        yield replace(encoder, arguments={**encoder.arguments, "on_batch": on_batch})


def open_texts(source: Path, config: Mapping[str, Any]) -> tuple[FileReader, str]:
    """The reader of a file of texts and its column, by a command's keys: chunk, window, header and column.

    Raises:
        UserError: no such file, a column that is not there or not clear, a chunk or window that is no number from 1 up.
    """
    for key in ("chunk", "window"):
        if type(config[key]) is not int or config[key] < 1:
            raise UserError("must be a positive whole number", key=key, value=config[key], fix=f"{key}=64")
    if not source.is_file():
        raise no_texts(source)
    wanted = None if config["column"] is None else str(config["column"])
    reader = open_reader(source, Layout(config["header"], () if wanted is None else (wanted,)))
    column = text_column(reader, wanted)
    next(iter(reader.rows([column])), None)  # an empty file is told before the encoder is loaded
    return reader, column


def no_texts(source: Path) -> UserError:
    """That there is no such file."""
    fix = like(source) or "give a .txt, .csv, .tsv, .jsonl or .parquet file"
    return UserError("no such file", file=source, fix=fix)


def text_column(reader: FileReader, wanted: str | None) -> str:
    """The column to read: `wanted`, else a usual or the only one; UserError where that is not clear."""
    columns = reader.columns
    if columns is None:
        if wanted not in (None, "0"):
            raise reader.error(
                "there is one column, without a name", key="column", value=wanted, fix="leave column out"
            )
        return "text"
    if wanted is None:
        usual = [name for name in _USUAL_COLUMNS if name in columns]
        found = usual[:1] or (columns if len(columns) == 1 else [])
    else:
        found = [wanted] if wanted in columns else []
    if found:
        return found[0]
    raise reader.error(f"has the columns {', '.join(columns)}", key="column", value=wanted, fix="column=NAME")


@contextmanager
def placing(reader: FileReader, row_of: Callable[[int], int]) -> Iterator[None]:
    """Puts file and row into an error about a text, whose row is known by its place among those that were given."""
    try:
        yield
    except UserError as error:
        if error.index is not None:
            error.file, error.row = reader.name, row_of(error.index)
        raise
