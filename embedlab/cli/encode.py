"""``embedlab encode IN OUT ckpt=…``: a file of sentences becomes a file of vectors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedlab.cli.compose import compose
from embedlab.console import progress_bar
from embedlab.corpus.vector_files import VectorFile, vector_file
from embedlab.data.reader import FileReader, Layout
from embedlab.data.readers import open_reader
from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.cli.encoders import Configured

EMPTY = ("error", "zero", "skip")
_USUAL_COLUMNS = ("sentence", "text")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0."""
    config = compose("encode", argv, positional=("input", "output"))
    reader, column, out = _checked(config)

    # torch and the weights are loaded only once the cheap questions are answered.
    from embedlab.cli.encoders import Configured, load_encoder

    encoder = Configured.of(
        load_encoder(config["ckpt"], config["max_length"], config.get("pooling"), config["dim"]), config
    )
    with vector_file(out) as target, metered(reader, encoder) as metered_encoder:
        empty, cut = _encode(reader, column, metered_encoder, target, config)
        if target.count == 0:
            raise reader.error("no row with text", fix="give a file with sentences")
    told = {"zero": "vectors of zeros", "skip": "left out"}.get(config["empty"], "")
    print(f"{target.count:,} vectors: {out}" + (f" ({empty:,} empty rows: {told})" if empty else ""))
    if cut:
        print(
            f"embedlab: warning: {cut:,} texts were cut, being longer than the encoder reads", file=sys.stderr
        )
    return 0


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


def _checked(config: dict[str, Any]) -> tuple[FileReader, str, Path]:
    source, out = Path(str(config["input"])), Path(str(config["output"]))
    if config["empty"] not in EMPTY:
        raise UserError(
            "no such treatment of empty rows", key="empty", value=config["empty"], fix="error, zero or skip"
        )
    vector_file(out)
    if out.is_dir():
        raise UserError("is a folder", file=out, key="output", fix="name a file")
    if config["empty"] == "skip" and out.suffix.lower() == ".npy":
        raise UserError(
            "rows of a .npy file have no numbers, so skipping would shift them",
            key="empty",
            value="skip",
            fix="write to a .parquet file, or use empty=zero",
        )
    if source.is_file() and out.exists() and source.samefile(out):
        raise UserError("input and output are the same file", file=out, fix="write to another file")
    return *open_texts(source, config), out


def open_texts(source: Path, config: Mapping[str, Any]) -> tuple[FileReader, str]:
    """The reader of a file of texts and its column, by a command's keys: chunk, window, header and column.

    Raises:
        UserError: no such file, a column that is not there or not clear, a chunk or window that is no number from 1 up.
    """
    for key in ("chunk", "window"):
        if type(config[key]) is not int or config[key] < 1:
            raise UserError("must be a positive whole number", key=key, value=config[key], fix=f"{key}=64")
    if not source.is_file():
        raise UserError("no such file", file=source, fix="give a .txt, .csv, .tsv, .jsonl or .parquet file")
    wanted = None if config["column"] is None else str(config["column"])
    reader = open_reader(source, Layout(config["header"], () if wanted is None else (wanted,)))
    return reader, text_column(reader, wanted)


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


def _encode(
    reader: FileReader, column: str, encoder: Configured, target: VectorFile, config: dict[str, Any]
) -> tuple[int, int]:
    """Encodes all rows into `target`; returns the number of empty rows, and that of texts that were cut."""
    import numpy as np

    from embedlab.encoders.windows import windows

    empty = cut = 0
    tokens = encoder.encoder.tokenization
    limit = tokens.max_length or tokens.model_limit
    for window in windows(reader.texts(column), config["chunk"], config["window"] << 20, itemgetter(1)):
        kept = [bool(text.strip()) for _, text in window]
        if not all(kept) and config["empty"] == "error":
            row = window[kept.index(False)][0]
            fix = "empty=zero or empty=skip"
            raise reader.error("an empty row", row, key="empty", value="error", fix=fix)
        empty += len(kept) - sum(kept)
        full = list(compress(window, kept))
        vectors = np.zeros((len(window), encoder.dim), dtype=np.float32)
        if full:
            texts = [text for _, text in full]
            with placing(reader, [row for row, _ in full].__getitem__):
                vectors[kept] = encoder.encode(texts)
            # No tokenizer makes more tokens of a text than it has bytes.
            if limit and (long := [text for text in texts if 4 * len(text) >= limit]):
                cut += tokens.count_cut(text for text in long if len(text.encode()) >= limit)
            _check_finite(reader, [row for row, _ in full], vectors[kept])
        if config["empty"] == "skip":
            window, vectors = full, vectors[kept]
        if window:
            target.add([row for row, _ in window], vectors)
    return empty, cut


@contextmanager
def placing(reader: FileReader, row_of: Callable[[int], int]) -> Iterator[None]:
    """Puts file and row into an error about a text, whose row is known by its place among those that were given."""
    try:
        yield
    except UserError as error:
        if error.index is not None:
            error.file, error.row = reader.name, row_of(error.index)
        raise


def _check_finite(reader: FileReader, rows: Sequence[int], vectors: Any) -> None:
    import numpy as np

    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        row = rows[int(np.flatnonzero(~finite)[0])]
        raise reader.error(
            f"{int((~finite).sum())} vectors are not finite", row, fix="dtype=float32, or another checkpoint"
        )
