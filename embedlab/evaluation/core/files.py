"""Reading evaluation data: tab-separated files (gzip or plain, one header line, no quoting) and the hub's rows."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedlab.console import quiet
from embedlab.errors import UserError


def find_file(data_dir: str | Path, name: str, kind: str | None = None) -> Path:
    """`name`.tsv.gz or `name`.tsv in `data_dir`, or in its folder `kind`; UserError when neither is there."""
    folder = Path(data_dir)
    if not folder.is_dir():
        raise UserError(
            "no such folder",
            file=folder,
            key="data_dir",
            value=str(data_dir),
            fix=f"give the folder that holds {name}.tsv.gz",
        )
    for place in (folder, *([folder / kind] if kind else [])):
        for suffix in (".tsv.gz", ".tsv"):
            path = place / f"{name}{suffix}"
            if path.is_file():
                return path
    raise UserError(
        f"has no {name}.tsv.gz",
        file=folder,
        key="data_dir",
        value=str(data_dir),
        fix=f"give the folder that holds {name}.tsv.gz",
    )


def is_there(folder: Path, name: str) -> bool:
    """Whether `find_file` finds it."""
    return any((folder / f"{name}.tsv{end}").is_file() for end in ("", ".gz"))


def read_tsv(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> dict[str, list[str]]:
    """The named columns of a .tsv or .tsv.gz as lists of strings; `optional` ones only where the header has
    them.

    Raises UserError for a broken gzip, a wrong encoding, a missing column, a row of another width or no row.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"is not a whole gzip file ({error})", file=path, fix="fetch the file again"
        ) from error
    except UnicodeDecodeError as error:
        row = error.object.count(b"\n", 0, error.start) + 1
        raise UserError("is not UTF-8", file=path, row=row, fix="convert the file to UTF-8") from error
    # Only \n ends a row: str.splitlines() would also cut at U+2028 and friends, which occur inside sentences.
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise UserError("is empty", file=path, fix="fetch the file again")
    header = lines[0].rstrip("\r").split("\t")
    missing = [column for column in columns if column not in header]
    if missing:
        raise UserError(
            f"has no column {missing[0]!r} (its header: {', '.join(header)})",
            file=path,
            fix="name the columns in the first line, separated by tabs",
        )
    wanted = {column: header.index(column) for column in (*columns, *optional) if column in header}
    table: dict[str, list[str]] = {column: [] for column in wanted}
    for number, line in enumerate(lines[1:], start=2):
        cells = line.rstrip("\r").split("\t")
        if len(cells) != len(header):
            raise UserError(
                f"has {len(cells)} columns where the header has {len(header)}",
                file=path,
                row=number,
                fix="separate columns by one tab and keep tabs out of the text",
            )
        for column, index in wanted.items():
            table[column].append(cells[index])
    if len(lines) == 1:
        raise UserError("has no rows", file=path, fix="fetch the file again")
    return table


def numbered(
    labels: Sequence[str], classes: Sequence[str], source: str | Path, key: str = "label"
) -> NDArray[np.int64]:
    """The place of each label in `classes`, [n].

    Raises UserError with the row, in a file with one header line, of a label that is not in `classes`.
    """
    number = {name: i for i, name in enumerate(classes)}
    for row, label in enumerate(labels, start=2):
        if label not in number:
            fix = f"one of {', '.join(classes)}"
            raise UserError("unknown label", file=source, row=row, key=key, value=label, fix=fix)
    return np.array([number[label] for label in labels], dtype=np.int64)


def hub_rows(
    name: str, config: str | None, split: str, columns: list[str], files: str, converted: bool = False
) -> dict[str, list[Any]]:
    """The named columns of one split as lists.

    files: the local files to name in the error's fix. converted: read the hub's own Parquet copy (a branch
    with a folder for each configuration), for data sets that are scripts, which `datasets` 4 no longer runs.

    Raises UserError when the hub cannot be reached or the data set has no such column.
    """
    try:
        from datasets import load_dataset

        with quiet("huggingface_hub"):  # it reports every retry, and the error below says it all
            if converted:
                rows = load_dataset(name, data_dir=config, revision="refs/convert/parquet", split=split)
            else:
                rows = load_dataset(name, config, split=split)
    except ImportError as error:
        raise UserError(
            "the package datasets is missing",
            fix=f"pip install datasets, or give data_dir=FOLDER with {files}",
        ) from error
    except Exception as error:  # the hub client raises a dozen unrelated types when it is offline
        reason = str(error).strip().splitlines()
        raise UserError(
            f"cannot load {name} from the hub ({reason[0] if reason else type(error).__name__})",
            key="data_dir",
            fix=f"give data_dir=FOLDER with {files}",
        ) from error
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise UserError(
            f"has no column {missing[0]!r} (it has {', '.join(rows.column_names)})",
            file=f"hub:{name}",
            fix=f"give data_dir=FOLDER with {files}",
        )
    return {column: list(rows[column]) for column in columns}
