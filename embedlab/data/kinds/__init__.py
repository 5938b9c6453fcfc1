"""Kinds of data, found by name: what texts and numbers a row has, and how rows are read from tables. No torch.

A kind is a subclass of `DataKind` with a ``name``, in a file of this folder or of the ``data`` folder of a package that
adds parts (`embedlab.parts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from embedlab.config.build import from_dict, section
from embedlab.config.data import DataConfig
from embedlab.errors import UserError
from embedlab.parts import part_class, part_names

if TYPE_CHECKING:
    from embedlab.data.readers import Reader

RawRow = tuple[int, int, tuple[object, ...], int]
"""Number of the table, number of the row in it, the values (texts, then numbers), number of the group (or 0)."""
_RESERVED = {
    "rows", "row", "hash", "table", "group", "tokens", "padded_tokens", "lengths", "token_budgets", "rows_per_rank",
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
    """

    name: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]
    usual: ClassVar[Mapping[str, tuple[str, ...]]]
    numbers: ClassVar[Mapping[str, type]] = {}
    packages: ClassVar[tuple[str, ...]] = ()
    keys: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        taken = set(cls.numbers) & (_RESERVED | set(cls.roles))
        if taken or not set(cls.numbers.values()) <= {float, int}:
            raise TypeError(
                f"{cls.__name__}.numbers: float or int columns, called none of {sorted(_RESERVED)}"
            )

    def groups(
        self, readers: Sequence[Reader], roles: tuple[str, ...], config: DataConfig
    ) -> dict[str, tuple[str, str]]:
        """Groups that rows are in (language pairs): name -> languages of source and target; {} for none.

        Raises:
            UserError: what the headers show to be missing.
        """
        for reader in readers:
            self.find_columns(reader, (*roles, *self.numbers), config)
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
            for row, values in reader.rows(self.find_columns(reader, (*roles, *self.numbers), config)):
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
                wanted = config.chosen.get(role) or " or ".join(self.usual[role])
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
        names = (chosen,) if chosen else self.usual[role]
        if reader.columns is None:
            return names[0]
        return next((name for name in names if name in reader.columns), None)


def data_kind(name: str) -> DataKind:
    """The kind of data of this name.

    Raises:
        UserError: there is none.
    """
    kind: DataKind = part_class("data", name, DataKind, "data.name")()
    return kind


def check_kind(config: DataConfig) -> None:
    """Hold a configuration to its kind of data.

    Raises:
        UserError: an unknown kind, a column, package text or key that it has not; by key.
    """
    kind = data_kind(config.name)
    kinds = [data_kind(name) for name in part_names("data")]
    for role in config.chosen:
        if role not in kind.usual:
            raise UserError(
                f"data={kind.name} has no such text",
                key=f"data.columns.{role}",
                fix=f"one of {', '.join(kind.usual)}",
            )
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
    if config.pack is not None and kind.numbers:
        raise UserError("rows with numbers cannot be packed", key="data.pack", fix="data.pack=null")


def data_config(settings: Mapping[str, Any]) -> DataConfig:
    """A checked `DataConfig` from plain settings, such as the ``data`` group of a composed configuration.

    Raises:
        UserError: an unknown key (with the nearest known one), or a value that cannot be meant.
    """
    columns = section(settings, "data").get("columns")
    if columns is not None and not isinstance(columns, Mapping):
        role = data_kind(settings.get("name", "wikipedia")).roles[0]
        fix = f"data.columns.{role}={columns}"
        raise UserError("not a name for each text", key="data.columns", fix=fix)
    config = from_dict(DataConfig, settings, "data")
    check_kind(config)
    return config
