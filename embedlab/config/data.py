"""What data a run reads and how it is batched: one typed, frozen record.

What depends on the kind of data is checked by `embedlab.data.kinds.check_kind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from embedlab.config.build import Record, build, from_dict, section, within
from embedlab.errors import UserError

ALIASES = {"wikipedia": "sentences"}
"""Other names of kinds of data, kept for the recipes that have them."""


def kind_name(name: str) -> str:
    """The kind of data that a name or another name of it means."""
    return ALIASES.get(name, name)


@dataclass(frozen=True)
class DataConfig(Record):
    """One data set: a source, the columns to read, the rows to keep and the shape of the batches.

    Args:
        name: the kind of data: ``sentences`` (one a row; ``wikipedia`` is another name for it), ``pairs`` (anchor,
            positive), ``triplets`` (with n negatives), ``scored`` (two sentences and a score), ``labelled`` (a text and
            its label), ``nli`` (anchor, positive, negative) or ``parallel`` (source and target, in two languages).
        hub: a data set of the Hugging Face hub.
        hub_config: its configuration on the hub, a name or several.
        hub_files: files of a repository that mixes several kinds.
        split: of the hub's data set.
        revision: of the hub's data set.
        files: a path, a glob or a list of them (.txt .csv .tsv .jsonl .parquet; text ones plain, .gz, .xz,
            .bz2). Of `mix`, `files`, `hub` and `package` the first that is given is the source, so that files on a
            command line take the place of whatever an experiment names.
        also: more files, read after the source.
        package: text that comes with an installed package, of those of its kind.
        columns: role or number -> column of the source, for those of the kind (and for ``nli`` also premise,
            hypothesis and label). None, whole or for one role: the usual names of the kind. A number is the place of
            a column, from 0 on, of a .csv or .tsv file without a header.
        ignore_columns: columns called score, label or similarity that may be there and are not read.
        prompts: role -> what stands before each of its texts, such as ``query: ``. The ids of texts, by which those
            that come again are known, are of the bare text.
        negatives: triplets only: negatives of a row (None: 1); rows with fewer are dropped.
        scores: triplets only: read a teacher's scores of the positive and the negatives.
        score_range: scored only: lowest and highest score, which become 0 and 1 (None: scores as they are).
        header: whether the first line of a .csv or .tsv file names its columns. None: it does, but where columns are
            chosen by their place, and where it has one field that is no usual or chosen name.
        limit: rows to keep, from the first on.
        min_chars: shorter texts are dropped (and counted).
        max_chars: longer texts are treated as `overlong` says.
        overlong: a text above `max_chars` is an error, its row is dropped, or it is cut.
        duplicates: ``keep``, or ``drop`` a row whose texts all equal those of an earlier row.
        decontaminate: suites (``sts``, ``retrieval``) whose evaluation texts the rows must not hold
            (`embedlab.data.contamination.overlap`); rows that do are dropped and counted.
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
        no_duplicates: no text stands in two rows of a batch (over all devices), in whatever role; what `drop_last` does
            with rows that make no whole batch without that, it does as well with those at the end.
        per_label: labelled only: rows of each label in a batch, at least 2; it then has batch_size / per_label labels,
            on every device others.
        mix: several data sets in one run: name -> its source keys, and its ``weight`` and ``objective``. Each step has
            rows of one of them.
        sampling: of a mix: ``proportional`` (every batch of every set, in random order), ``round_robin`` (in turn,
            until the smallest is through), ``temperature`` (sets by (weight x rows)^(1 / temperature)).
        temperature: of that, at least 1: larger evens sets out.
        epoch_steps: steps of an epoch of ``sampling=temperature`` (None: as many as ``proportional`` has).
        pad_to_multiple: batches are padded to the longest row, rounded up to this.
        drop_last: leave out the last, smaller batch of an epoch (with `no_duplicates` it can be several).
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
    ignore_columns: list[str] | None = None
    prompts: dict[str, str | None] | None = None
    negatives: int | None = within(None, least=1)
    scores: bool | None = None
    score_range: list[float] | None = None
    header: bool | None = None
    limit: int | None = within(None, least=1)
    min_chars: int = within(0, least=0)
    max_chars: int = within(10_000, least=1)
    overlong: Literal["error", "drop", "truncate"] = "error"
    duplicates: Literal["keep", "drop"] = "keep"
    decontaminate: list[str] | None = None
    languages: list[str] | None = None
    pairs: list[str] | None = None
    pivot: str | None = None
    pair_limit: int | None = within(None, least=1)
    pair_sample: Literal["random", "first"] = "random"
    pair_seed: int = within(42, least=0)
    max_length: int | None = within(32, least=1)
    batch_size: int = within(64, least=1)
    mega_batch: int = within(1, least=1)
    no_duplicates: bool = False
    per_label: int | None = within(None, least=2)
    mix: dict[str, dict[str, Any]] | None = None
    sampling: Literal["proportional", "round_robin", "temperature"] = "proportional"
    temperature: float = within(1.0, least=1)
    epoch_steps: int | None = within(None, least=1)
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
        if self.score_range is not None and not (
            len(self.score_range) == 2 and self.score_range[0] < self.score_range[1]
        ):
            _refuse("score_range", "not a lowest and a highest score", "data.score_range=[0,5]")
        self._check_batches()
        for role, column in (self.columns or {}).items():
            if column == "" or (isinstance(column, int) and column < 0):
                fix = "a name in the header, or without one the place from 0 on"
                _refuse(f"columns.{role}", f"{column!r} is not the name or place of a column", fix)

    def _check_batches(self) -> None:
        planned = (
            "per_label" if self.per_label is not None else "no_duplicates" if self.no_duplicates else None
        )
        if planned and self.mega_batch > 1:
            _refuse("mega_batch", f"data.{planned} says which rows are together", "data.mega_batch=1")
        whole = "per_label" if self.per_label is not None else "mix" if self.mix else None
        if whole and not self.drop_last:
            _refuse("drop_last", f"data.{whole} has whole batches only", "data.drop_last=true")
        if planned and self.pack is not None:
            _refuse("pack", f"packed sequences have no texts for data.{planned}", "data.pack=null")
        if self.per_label is not None and self.no_duplicates:
            _refuse(
                "no_duplicates", "data.per_label says which rows are together", "data.no_duplicates=false"
            )
        if self.epoch_steps is not None and self.sampling != "temperature":
            _refuse(
                "epoch_steps", "other samplers have their own", "data.sampling=temperature, or leave it out"
            )

    @cached_property
    def sets(self) -> dict[str, MixedSet]:
        """The data sets of a mix, by name.

        Raises:
            UserError: a set's key, as ``data.mix.NAME.KEY``.
        """
        return {name: self._set(name, values) for name, values in (self.mix or {}).items()}

    @property
    def by_name(self) -> dict[str, DataConfig]:
        """Configurations of one data set each: those of a mix by their names, or this one by ""."""
        return {name: one.config for name, one in self.sets.items()} or {"": self}

    def _set(self, name: str, values: Mapping[str, Any]) -> MixedSet:
        group = f"data.mix.{name}"
        values = dict(section(values, group))
        own: dict[str, Any] = {key: values.pop(key) for key in ("weight", "objective") if key in values}
        for key in values:
            if key in SHARED:
                raise UserError("one for all sets", key=f"{group}.{key}", fix=f"data.{key}={values[key]}")
        try:
            config = from_dict(DataConfig, {**values, **{key: getattr(self, key) for key in SHARED}}, "data")
            found = build(MixedSet, {"config": config, **own}, "data")
        except UserError as error:
            error.key = (error.key or "data").replace("data", group, 1)
            raise
        if found.weight != 1 and self.sampling != "temperature":
            raise UserError(
                "other samplers heed no weight", key=f"{group}.weight", value=found.weight,
                fix="data.sampling=temperature",
            )  # fmt: skip
        return found

    def _check_source(self) -> None:
        if self.mix:
            object.__setattr__(self, "name", "mix")
            for one in fields(self):
                if one.name not in _OF_MIX and getattr(self, one.name) not in (one.default, {}):
                    value = getattr(self, one.name)
                    _refuse(one.name, "each set of data.mix has its own", f"data.mix.NAME.{one.name}={value}")
            return
        if self.name == "mix":
            _refuse("mix", "there is no set", "data.mix.NAME={name: pairs, files: FILE}")
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
    def names(self) -> tuple[str, ...]:
        """The kinds of data that rows are of, by the names that the configuration has for them."""
        return tuple(one.config.name for one in self.sets.values()) if self.mix else (self.name,)

    @property
    def leaves_rows(self) -> bool:
        """Whether rows may be left out of an epoch for what is in them."""
        own = any(one.config.leaves_rows for one in self.sets.values())
        return own or self.no_duplicates or self.per_label is not None

    @property
    def most_rows(self) -> int | None:
        """The most rows of an epoch, where that is known before any text is read."""
        return self.limit if self.pack is None and not self.mix else None

    @property
    def chosen(self) -> dict[str, str]:
        """`columns` without the roles that are left to the usual names."""
        return {role: str(column) for role, column in (self.columns or {}).items() if column is not None}

    @property
    def source(self) -> str:
        """The source in a few words, for reports and error messages."""
        if self.mix:
            return ", ".join(f"{name}: {one.config.source}" for name, one in self.sets.items())
        given = [[files] if isinstance(files, str) else files or [] for files in (self.files, self.also)]
        if not self.files:
            given[0] = [f"hub:{self.hub}" if self.hub else f"package:{self.package}"]
        first, *more = [*given[0], *given[1]]
        return f"{first} and {len(more)} more" if more else first


@dataclass(frozen=True)
class MixedSet:
    """One data set of a mix.

    Args:
        config: its source, with the batches of the mix.
        weight: of its rows, for ``data.sampling=temperature``.
        objective: its own, where the method has several; None: the method's.
    """

    config: DataConfig
    weight: float = within(1.0, above=0)
    objective: str | None = None


SHARED = (
    "max_length", "batch_size", "mega_batch", "pad_to_multiple", "drop_last", "shuffle", "no_duplicates", "pack",
    "processes", "cache_dir", "report", "decontaminate",
)  # fmt: skip
"""Keys of a mix that all its sets have in common."""
_OF_MIX = (
    *SHARED, "name", "mix", "sampling", "temperature", "epoch_steps",
    "hub", "hub_config", "hub_files", "split", "revision", "files", "package",
)  # fmt: skip
"""Keys that may stand beside the sets of a mix; those of a source, which the mix takes the place of, are not read."""


def _refuse(key: str, message: str, fix: str) -> None:
    raise UserError(message, key=f"data.{key}", fix=fix)
