"""What data a run reads and how it is batched: one typed, frozen record.

What depends on the kind of data is checked by `embedlab.data.kinds.check_kind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embedlab.config.build import Record, within
from embedlab.errors import UserError


@dataclass(frozen=True)
class DataConfig(Record):
    """One data set: a source, the columns to read, the rows to keep and the shape of the batches.

    Args:
        name: the kind of data: ``wikipedia`` (one sentence a row), ``nli`` (anchor, positive, negative) or
            ``parallel`` (source and target, in two languages).
        hub: a data set of the Hugging Face hub.
        hub_config: its configuration on the hub, a name or several.
        hub_files: files of a repository that mixes several kinds.
        split: of the hub's data set.
        revision: of the hub's data set.
        files: a path, a glob or a list of them (.txt .csv .tsv .jsonl .parquet; text ones plain, .gz, .xz,
            .bz2). Of `files`, `hub` and `package` the first that is given is the source, so that files on a
            command line take the place of whatever an experiment names.
        also: more files, read after the source.
        package: text that comes with an installed package, of those of its kind.
        columns: role or number -> column of the source, for those of the kind (and for ``nli`` also premise,
            hypothesis and label). None, whole or for one role: the usual names of the kind. A number is the place of
            a column, from 0 on, of a .csv or .tsv file without a header.
        header: whether the first line of a .csv or .tsv file names its columns. None: it does, but where columns are
            chosen by their place, and where it has one field that is no usual or chosen name.
        limit: rows to keep, from the first on.
        min_chars: shorter texts are dropped (and counted).
        max_chars: longer texts are treated as `overlong` says.
        overlong: a text above `max_chars` is an error, its row is dropped, or it is cut.
        duplicates: ``keep``, or ``drop`` a row whose texts all equal those of an earlier row.
        languages: parallel only: the language columns to use (None: all of them).
        pairs: parallel only: the pairs to use, as ``en-de`` (None: `pivot` with every other language).
        pivot: parallel only: the language on the source side (None: the one that every file has).
        pair_limit: parallel only: the most rows of one pair.
        pair_sample: parallel only: which rows of a pair stay under `pair_limit`: a seeded ``random`` sample,
            or the ``first``.
        pair_seed: parallel only: of that sample.
        max_length: tokens; how it counts with a template is `embedlab.encoders.tokenization.Tokenization`'s business.
        batch_size: sentences (rows) of one optimiser step on one device.
        mega_batch: batches whose rows are sorted by length together before they are cut (1: purely random).
        pad_to_multiple: batches are padded to the longest row, rounded up to this.
        drop_last: leave out the last, smaller batch of an epoch.
        shuffle: rows in a new random order in each epoch.
        pack: packed sequences of this many tokens instead of one sentence a row, for masked_lm and causal_lm.
        processes: tokenising processes (None: as many as pay; 1: none beside this one, but the tokenizer's threads).
        cache_dir: of the token caches; None: $EMBEDLAB_CACHE/tokens, by default ~/.cache/embedlab/tokens.
        report: print the data report.

    Raises:
        UserError: a value that cannot be meant, by key.
    """

    section = "data"

    name: str = "wikipedia"
    hub: str | None = None
    hub_config: str | list[str] | None = None
    hub_files: str | list[str] | None = None
    split: str = "train"
    revision: str | None = None
    files: str | list[str] | None = None
    also: str | list[str] | None = None
    package: str | None = None
    columns: dict[str, str | int | None] | None = None
    header: bool | None = None
    limit: int | None = within(None, least=1)
    min_chars: int = within(0, least=0)
    max_chars: int = within(10_000, least=1)
    overlong: Literal["error", "drop", "truncate"] = "error"
    duplicates: Literal["keep", "drop"] = "keep"
    languages: list[str] | None = None
    pairs: list[str] | None = None
    pivot: str | None = None
    pair_limit: int | None = within(None, least=1)
    pair_sample: Literal["random", "first"] = "random"
    pair_seed: int = within(42, least=0)
    max_length: int | None = within(32, least=1)
    batch_size: int = within(64, least=1)
    mega_batch: int = within(1, least=1)
    pad_to_multiple: int = within(8, least=1)
    drop_last: bool = True
    pack: int | None = within(None, least=8)
    shuffle: bool = True
    processes: int | None = within(None, least=1)
    cache_dir: str | None = None
    report: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_source()
        for role, column in (self.columns or {}).items():
            if column == "" or (isinstance(column, int) and column < 0):
                fix = "a name in the header, or without one the place from 0 on"
                _refuse(f"columns.{role}", f"{column!r} is not the name or place of a column", fix)

    def _check_source(self) -> None:
        if self.files is not None and not self.files:
            _refuse("files", "names no file", "data.files=PATH, or data.files=null for the hub or a package")
        if self.also is not None and not self.also:
            _refuse("also", "names no file", "data.also=PATH, or data.also=null")
        if not (self.files or self.hub or self.package):
            raise UserError(
                f"data={self.name} has no source",
                key="data.files",
                fix="data.files=PATH, or data.hub=NAME, or data.package=NAME",
            )
        for key in ("hub_config", "hub_files", "revision"):
            if getattr(self, key) and not self.hub:
                _refuse(key, "only a data set of the hub has this", "set data.hub, or leave the key out")

    @property
    def most_rows(self) -> int | None:
        """The most rows of an epoch, where that is known before any text is read."""
        return self.limit if self.pack is None else None

    @property
    def chosen(self) -> dict[str, str]:
        """`columns` without the roles that are left to the usual names."""
        return {role: str(column) for role, column in (self.columns or {}).items() if column is not None}

    @property
    def source(self) -> str:
        """The source in a few words, for reports and error messages."""
        given = [[files] if isinstance(files, str) else files or [] for files in (self.files, self.also)]
        if not self.files:
            given[0] = [f"hub:{self.hub}" if self.hub else f"package:{self.package}"]
        first, *more = [*given[0], *given[1]]
        return f"{first} and {len(more)} more" if more else first


def _refuse(key: str, message: str, fix: str) -> None:
    raise UserError(message, key=f"data.{key}", fix=fix)
