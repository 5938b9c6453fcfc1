"""Reading evaluation data: files by the package's own readers, the hub's rows, and rows with one label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedlab.backbones.hub import quiet_hub
from embedlab.data.readers import open_reader
from embedlab.errors import UserError, one_of
from embedlab.files import existing_folder

_SHARED = 1 << 16
"""Distinct values of which one copy is kept, however often they come."""


def find_file(data_dir: str | Path, name: str, kind: str | None = None) -> Path:
    """`name`.tsv.gz or `name`.tsv in `data_dir`, or in its folder `kind`; UserError when neither is there."""
    folder = Path(data_dir)
    for place in (folder, folder / kind) if kind else (folder,):
        for path in (place / f"{name}.tsv.gz", place / f"{name}.tsv"):
            if path.is_file():
                return path
    fix = f"give the folder that holds {name}.tsv.gz"
    existing_folder(data_dir, fix, "data_dir")
    raise UserError(f"has no {name}.tsv.gz", file=folder, key="data_dir", value=str(data_dir), fix=fix)


def is_there(folder: Path, name: str) -> bool:
    """Whether `find_file` finds it."""
    return any((folder / f"{name}.tsv{end}").is_file() for end in ("", ".gz"))


def inner(folder: str | Path, kind: str) -> Path:
    """The folder `kind` in `folder`, or `folder` itself where it has none."""
    inside = Path(folder, kind)
    return inside if inside.is_dir() else Path(folder)


def names_in(folder: Path, pattern: str) -> list[str]:
    """What stands for the star of `pattern` in the names of the .tsv and .tsv.gz files, sorted.

    Raises UserError where there is no such file.
    """
    before, after = pattern.split("*")
    stems = {path.name.split(".")[0] for path in folder.glob(f"{pattern}.tsv*")}
    if not stems:
        fix = f"give the folder of {pattern}.tsv.gz"
        raise UserError(f"has no {pattern}.tsv.gz", file=folder, key="data_dir", fix=fix)
    return sorted(stem.removeprefix(before).removesuffix(after) for stem in stems)


def read_tsv(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> dict[str, list[str]]:
    """The named columns as lists of strings; `optional` ones only where the header has them.

    Raises UserError for a missing column, and for all that `embedlab.data.readers` refuses.
    """
    reader = open_reader(path)
    header = reader.columns or []
    missing = [column for column in columns if column not in header]
    if missing:
        fix = "name the columns in the first line, separated by tabs"
        raise reader.error(f"has no column {missing[0]!r} (its header: {reader.listed()})", fix=fix)
    names = [*columns, *(column for column in optional if column in header)]
    found: list[list[str]] = [[] for _ in names]
    shared: dict[str, str] = {}  # what a small archive can hold much of: repeats
    try:
        for _, values in reader.rows(names):
            for column, value in zip(found, values, strict=True):
                column.append(
                    shared.get(value, value) if len(shared) >= _SHARED else shared.setdefault(value, value)
                )
    except MemoryError:
        raise reader.error("its rows do not fit into memory", fix="fewer rows, or a larger machine") from None
    return dict(zip(names, found, strict=True))


@dataclass(frozen=True)
class Hub:
    """One split of a data set on the hub.

    files: the local files to name in an error's fix. columns: what the columns of the local files are called
    there, in the same order; (): the same. converted: read the hub's own Parquet copy (a branch with a folder for
    each configuration), for data sets that are scripts, which `datasets` 4 no longer runs.
    """

    name: str
    config: str | None
    split: str
    files: str
    columns: tuple[str, ...] = ()
    converted: bool = False

    def rows(self, columns: Sequence[str] = ()) -> dict[str, list[Any]]:
        """The columns as lists: those of `Hub.columns`, else `columns`.

        Raises UserError when the hub cannot be reached or the data set has no such column or no rows.
        """
        fix = f"give data_dir=FOLDER with {self.files}"
        try:
            from datasets import load_dataset

            with quiet_hub():  # it reports every retry, and the error below says it all
                if self.converted:
                    branch = {"data_dir": self.config, "revision": "refs/convert/parquet"}
                    rows = load_dataset(self.name, **branch, split=self.split)
                else:
                    rows = load_dataset(self.name, self.config, split=self.split)
        except Exception as error:  # the hub client raises a dozen unrelated types when it is offline
            reason = str(error).strip().splitlines() or [type(error).__name__]
            what = f"cannot load {self.name} from the hub ({reason[0]})"
            raise UserError(what, key="data_dir", fix=fix) from error
        wanted = self.columns or columns
        if missing := [column for column in wanted if column not in rows.column_names]:
            what = f"has no column {missing[0]!r} (it has {', '.join(rows.column_names)})"
            raise UserError(what, file=f"hub:{self.name}", fix=fix)
        found = {column: list(rows[column]) for column in wanted}
        if not all(found.values()):
            raise UserError("has no rows", file=f"hub:{self.name}", fix=fix)
        return found


def read_columns(path: Path | None, columns: Sequence[str], hub: Hub) -> tuple[list[list[Any]], str]:
    """The columns of a file, or of the hub where `path` is None, in the order asked for; and their source."""
    if path is None:
        return list(hub.rows(columns).values()), f"hub:{hub.name}"
    return list(read_tsv(path, columns).values()), str(path)


@dataclass(frozen=True)
class Labelled:
    """Texts or pairs of texts with labels 0, 1, ... (int64 [n])."""

    first: list[str]
    second: list[str] | None
    labels: NDArray[np.int64]
    source: str = ""

    def __len__(self) -> int:
        return len(self.first)

    def head(self, limit: int | None) -> Labelled:
        """The first `limit` rows."""
        second = self.second and self.second[:limit]
        return replace(self, first=self.first[:limit], second=second, labels=self.labels[:limit])

    def texts(self) -> list[str]:
        """All texts, the first sides before the second ones."""
        return self.first + (self.second or [])


def read_labelled(
    path: Path | None, texts: Sequence[str], classes: Sequence[str], hub: Hub, label: str = "label"
) -> Labelled:
    """Rows of one file, or of the hub where `path` is None.

    texts: one or two columns; classes: labels in the order of their numbers; label: its column.

    Raises UserError, with the row in a file with one header line, for a label that is neither a class nor the
    number of one.
    """
    (labels, *sides), source = read_columns(path, [label, *texts], hub)
    number: dict[Any, int] = {name: i for i, name in enumerate(classes)} | {i: i for i in range(len(classes))}
    for row, name in enumerate(labels, start=2):
        if name not in number:
            fix = one_of(name, classes)
            raise UserError("unknown label", file=source, row=row, key=label, value=name, fix=fix)
    numbers = np.array([number[name] for name in labels], dtype=np.int64)
    return Labelled(sides[0], sides[1] if len(sides) > 1 else None, numbers, source)
