"""Kinds of data, found by name: what texts and numbers a row has, and how rows are read from tables. No torch.

A kind is a subclass of `DataKind` with a ``name``, in a file of this folder or of the ``data`` folder of a package that
adds parts (`embedlab.parts`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from embedlab.config.build import from_dict, section
from embedlab.config.data import SHARED, DataConfig, kind_name
from embedlab.errors import UserError, one_of
from embedlab.parts import part_class, part_names

if TYPE_CHECKING:
    from embedlab.data.reader import Reader

RawRow = tuple[int, int, tuple[object, ...], int]
"""Number of the table, number of the row in it, the values (texts, then numbers), number of the group (or 0)."""
_SET_KEYS = re.compile(rf"\bdata\.(?!(?:mix|{'|'.join(SHARED)})\b)(?=\w)")
_RATINGS = frozenset(("score", "label", "similarity"))
_LOOKED_AT = 20  # values that show whether a column holds numbers
_RESERVED = {
    "rows", "row", "hash", "table", "group", "tokens", "padded_tokens", "lengths", "token_budgets", "rows_per_rank",
    "data_set",
}  # fmt: skip


class DataKind:
    """One kind of data.

    Attributes:
        name: as in ``data=NAME``.
        roles: the texts of a row, by the names that methods ask for.
        usual: role or number -> column names that need no ``data.columns``, best first.
        numbers: numeric columns, name -> ``float`` or ``int``; a batch has each as a tensor [B] (float32 or int64).
        packages: texts of installed packages (`embedlab.data.packages`) that are of this kind.
        keys: settings of `DataConfig` that only this kind has, and what they are about.
        has_negatives: whether a row has a hard negative, so that one row alone has something to learn from.
    """

    name: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]
    usual: ClassVar[Mapping[str, tuple[str, ...]]]
    numbers: ClassVar[Mapping[str, type]] = {}
    packages: ClassVar[tuple[str, ...]] = ()
    keys: ClassVar[Mapping[str, str]] = {}
    has_negatives: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        taken = set(cls.numbers) & (_RESERVED | set(cls.roles))
        if taken or not set(cls.numbers.values()) <= {float, int}:
            raise TypeError(
                f"{cls.__name__}.numbers: float or int columns, called none of {sorted(_RESERVED)}"
            )

    def roles_of(self, config: DataConfig) -> tuple[str, ...]:
        """The texts of a row; a kind whose number of texts is a setting overrides this."""
        return self.roles

    def numbers_of(self, config: DataConfig) -> Mapping[str, type]:
        """The numbers of a row, as `numbers`."""
        return self.numbers

    def prompts_of(self, config: DataConfig) -> dict[str, str]:
        """What stands before the texts of each role; a role without a prompt is left out.

        Raises:
            UserError: a prompt of a text that the kind has not.
        """
        given = {role: prompt for role, prompt in (config.prompts or {}).items() if prompt}
        roles = self.roles_of(config)
        for role in given:
            if role not in roles:
                raise UserError(
                    f"data={config.name} has no such text",
                    key=f"data.prompts.{role}",
                    fix=one_of(role, roles),
                )
        return given

    def usual_names(self, role: str) -> tuple[str, ...]:
        """Column names of a role or number that need no ``data.columns``, best first; () for what the kind has not."""
        return tuple(self.usual.get(role, ()))

    def reads(self, reader: Reader, config: DataConfig) -> set[str]:
        """The columns of a table that rows are made of."""
        wanted = (*self.roles_of(config), *self.numbers_of(config))
        return {column for role in wanted if (column := self._column(reader, role, config)) is not None}

    def groups(
        self, readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig
    ) -> dict[str, tuple[str, str]]:
        """Groups that rows are in (language pairs): name -> languages of source and target; {} for none.

        Raises:
            UserError: what the headers show to be missing.
        """
        for reader in readers:
            self.find_columns(reader, (*roles, *self.numbers_of(config)), config)
        return {}

    def rows(
        self, readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig, dropped: Counter[str]
    ) -> Iterator[RawRow]:
        """The texts of ``roles``, then `numbers`, of every row.

        Args:
            readers: tables, one after the other.
            roles: texts that are asked for, in this order.
            config: of the data.
            dropped: reason -> rows left out; to be added to.
        """
        for table, reader in enumerate(readers):
            columns = self.find_columns(reader, (*roles, *self.numbers_of(config)), config)
            for row, values in reader.rows(columns):
                yield table, row, values, 0

    def has_columns(self, reader: Reader, roles: tuple[str, ...], config: DataConfig) -> bool:
        """Whether the table has a column for every role."""
        return all(self._column(reader, role, config) is not None for role in roles)

    def find_columns(self, reader: Reader, roles: tuple[str, ...], config: DataConfig) -> list[str]:
        """The column of each role or number.

        Raises:
            UserError: one without a column; the message lists the columns that there are.
        """
        columns = []
        for role in roles:
            column = self._column(reader, role, config)
            if column is None:
                wanted = config.chosen.get(role) or " or ".join(self.usual_names(role))
                raise reader.error(
                    f"no column {wanted} for the {role}; there are: {reader.listed()}",
                    key=f"data.columns.{role}",
                    value=config.chosen.get(role),
                    fix=f"data.columns.{role}=NAME",
                )
            columns.append(column)
        return columns

    def _column(self, reader: Reader, role: str, config: DataConfig) -> str | None:
        chosen = config.chosen.get(role)
        names = (chosen,) if chosen else self.usual_names(role)
        if reader.columns is None:
            return names[0]
        return next((name for name in names if name in reader.columns), None)


def data_kind(name: str) -> DataKind:
    """The kind of data of this name.

    Raises:
        UserError: there is none.
    """
    kind: DataKind = part_class("data", kind_name(name), DataKind, "data.name")()
    return kind


def has_negatives(config: DataConfig) -> bool:
    """Whether every row has a hard negative."""
    return all(data_kind(name).has_negatives for name in config.names)


@contextmanager
def in_set(name: str, rows: bool = False) -> Iterator[None]:
    """An error inside names this set of a mix, or a key of it: those that all sets have in common stay as they are, but
    one about its ``rows`` names the set whatever its key. Without a name there is no mix."""
    if not name:
        yield
        return
    own = f"data.mix.{name}"
    try:
        yield
    except UserError as error:
        if rows:
            error.key = error.value = None
        error.key = own if error.key in (None, "data") else _SET_KEYS.sub(f"{own}.", error.key)
        error.fix = _SET_KEYS.sub(f"{own}.", error.fix.replace("data=", f"{own}.name="))
        raise


def by_set(check: Callable[[DataConfig], None]) -> Callable[[DataConfig], None]:
    """A check that of a mix is made of each set, in whose name its errors are."""

    @wraps(check)
    def checked(config: DataConfig) -> None:
        if not config.mix:
            check(config)
            return
        for name, one in config.sets.items():
            with in_set(name):
                checked(one.config)

    return checked


def check_unread(kind: DataKind, readers: Sequence[Reader], config: DataConfig) -> None:
    """Refuse a table with a rating that a kind of several texts does not read: its low rows would train as positives.

    Raises:
        UserError: a column called score, label or similarity that holds numbers and is not named in
            ``data.ignore_columns``.
    """
    for reader in readers if len(kind.roles) > 1 else ():
        unread = _RATINGS.intersection(reader.columns or ()) - set(config.ignore_columns or ())
        for column in sorted(unread - kind.reads(reader, config)):
            if _holds_numbers(reader, column):
                raise reader.error(
                    f"data={config.name} does not read the numbers of the column {column}: every row would"
                    " count alike",
                    key="data",
                    value=config.name,
                    fix=f"data=scored data.columns.score={column}, or data.ignore_columns=[{column}]",
                )


def _holds_numbers(reader: Reader, column: str) -> bool:
    values: list[object] = []
    rows = reader.rows([column])
    with closing(rows), suppress(UserError):  # type: ignore[type-var]  # of a row that lacks what is not read
        # Values rather than rows: a column may be empty for long.
        values += islice((value for _, (value,) in rows if value not in (None, "")), _LOOKED_AT)
    return bool(values) and all(map(_is_number, values))


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def column_kinds() -> dict[str, str]:
    """The usual names of columns, and the kind of data that reads a table with them."""
    kinds = [data_kind(name) for name in part_names("data")]
    found: dict[str, str] = {}
    for kind in kinds:
        for name in (name for names in kind.usual.values() for name in names):
            found.setdefault(name, kind.name)
    return found


@by_set
def check_kind(config: DataConfig) -> None:
    """Hold a configuration to its kind of data.

    Raises:
        UserError: an unknown kind, a column, package text or key that it has not; by key.
    """
    kind = data_kind(config.name)
    kinds = [data_kind(name) for name in part_names("data")]
    for role in config.chosen:
        if not kind.usual_names(role):
            raise UserError(
                f"data={config.name} has no such text",
                key=f"data.columns.{role}",
                fix=one_of(role, kind.usual),
            )
    kind.prompts_of(config)
    if config.package and not (config.files or config.hub) and config.package not in kind.packages:
        able = [other.name for other in kinds if config.package in other.packages]
        if not able:
            texts = [text for other in kinds for text in other.packages]
            fix = f"one of {', '.join(texts)}"
            raise UserError("unknown value", key="data.package", value=config.package, fix=fix)
        instead = f"data.package={kind.packages[0]}" if kind.packages else "data.files=..."
        raise UserError(
            f"this package text is not {kind.name} data",
            key="data.package",
            value=config.package,
            fix=f"data={able[0]}, or {instead}",
        )
    for other in kinds:
        for key, what in other.keys.items():
            if getattr(config, key) is not None and key not in kind.keys:
                fix = f"data={other.name}, or leave the key out"
                raise UserError(f"data={kind.name} has no {what}", key=f"data.{key}", fix=fix)
    if config.pack is not None and kind.numbers_of(config):
        raise UserError("rows with numbers cannot be packed", key="data.pack", fix="data.pack=null")


def data_config(settings: Mapping[str, Any]) -> DataConfig:
    """A checked `DataConfig` from plain settings, such as the ``data`` group of a composed configuration.

    Raises:
        UserError: an unknown key (with the nearest known one), or a value that cannot be meant.
    """
    columns = section(settings, "data").get("columns")
    if columns is not None and not isinstance(columns, Mapping):
        role = data_kind(settings.get("name", "sentences")).roles[0]
        fix = f"data.columns.{role}={columns}"
        raise UserError("not a name for each text", key="data.columns", fix=fix)
    config = from_dict(DataConfig, settings, "data")
    check_kind(config)
    return config
