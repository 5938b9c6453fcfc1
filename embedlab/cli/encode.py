"""``embedlab encode IN OUT ckpt=…``: a file of sentences becomes a file of vectors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embedlab.cli.compose import compose
from embedlab.corpus.vector_files import VectorFile, vector_file
from embedlab.data.readers import FileReader, open_reader
from embedlab.errors import UserError

EMPTY = ("error", "zero", "skip")
_USUAL_COLUMNS = ("sentence", "text")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0."""
    config = compose("encode", argv, positional=("input", "output"))
    reader, column, out = _checked(config)

    # torch and the weights are loaded only once the cheap questions are answered.
    from embedlab.cli.encoders import Configured, load_encoder

    encoder = Configured.of(load_encoder(config["ckpt"], config["max_length"], config.get("pooling")), config)
    with vector_file(out) as target:
        empty, cut = _encode(reader, column, encoder, target, config)
        if target.count == 0:
            raise reader.error("no row with text", fix="give a file with sentences")
    told = {"zero": "vectors of zeros", "skip": "left out"}.get(config["empty"], "")
    print(f"{target.count:,} vectors: {out}" + (f" ({empty:,} empty rows: {told})" if empty else ""))
    if cut:
        print(
            f"embedlab: warning: {cut:,} texts were cut, being longer than the encoder reads", file=sys.stderr
        )
    return 0


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
    reader, column = text_input(config)
    if out.exists() and source.samefile(out):
        raise UserError("input and output are the same file", file=out, fix="write to another file")
    return reader, column, out


def text_input(config: Mapping[str, Any]) -> tuple[FileReader, str]:
    """What ``input`` names, and its column to read."""
    source = Path(str(config["input"]))
    if not source.is_file():
        raise UserError("no such file", file=source, fix="give a .txt, .csv, .tsv, .jsonl or .parquet file")
    reader = open_reader(source)
    return reader, text_column(reader, config["column"])


def text_column(reader: FileReader, wanted: str | None) -> str:
    """The column to read: `wanted`, else a usual or the only one; UserError where that is not clear."""
    columns = reader.columns
    if columns is None:
        if wanted is not None:
            raise reader.error(
                "a .txt file has no columns", key="column", value=wanted, fix="leave column out"
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
    reader: FileReader, column: str, encoder: Any, target: VectorFile, config: dict[str, Any]
) -> tuple[int, int]:
    """Encodes all rows into `target`; returns the number of empty rows, and that of texts that were cut."""
    import numpy as np
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    empty = cut = 0
    tokens = encoder.encoder.tokenization
    limit = tokens.max_length or tokens.model_limit
    columns = (
        TextColumn("encoding"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]:,} rows"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("encoding", total=max(1, reader.size), rows=0)
        for chunk in _chunks(reader, column, config["chunk"]):
            full = [(row, text) for row, text in chunk if text.strip()]
            if len(full) < len(chunk) and config["empty"] == "error":
                row = next(row for row, text in chunk if not text.strip())
                raise reader.error(
                    "an empty row", row, key="empty", value="error", fix="empty=zero or empty=skip"
                )
            empty += len(chunk) - len(full)
            vectors = np.zeros((len(chunk), encoder.dim), dtype=np.float32)
            if full:
                kept = [bool(text.strip()) for _, text in chunk]
                texts = [text for _, text in full]
                vectors[kept] = encoder.encode(texts)
                # No tokenizer makes more tokens of a text than it has bytes.
                if limit and (long := [text for text in texts if len(text.encode()) >= limit]):
                    cut += sum(tokens.ids_and_cut(long)[1])
                _check_finite(reader, [row for row, _ in full], vectors[kept])
                if config["empty"] == "skip":
                    vectors = vectors[kept]
            if config["empty"] == "zero":
                target.add([row for row, _ in chunk], vectors)
            elif full:
                target.add([row for row, _ in full], vectors)
            progress.update(task, completed=reader.position, rows=target.count)
    return empty, cut


def _check_finite(reader: FileReader, rows: Sequence[int], vectors: Any) -> None:
    import numpy as np

    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        row = rows[int(np.flatnonzero(~finite)[0])]
        raise reader.error(
            f"{int((~finite).sum())} vectors are not finite", row, fix="dtype=float32, or another checkpoint"
        )


def _chunks(reader: FileReader, column: str, size: int) -> Iterator[list[tuple[int, str]]]:
    def texts() -> Iterator[tuple[int, str]]:
        for row, (value,) in reader.rows([column]):
            if value is not None and not isinstance(value, str):
                raise reader.error(f"{value!r} is not text", row, key="column", value=column)
            yield row, value or ""

    rows = texts()
    while chunk := list(itertools.islice(rows, size)):
        yield chunk
