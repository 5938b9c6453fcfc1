"""Where text comes from: local files, a data set of the hub, or an installed package."""

from __future__ import annotations

import glob
import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from embedlab.backbones.hub import quiet_hub
from embedlab.config.data import DataConfig
from embedlab.data.kinds import by_set, check_unread, column_kinds, data_kind
from embedlab.data.reader import Layout, Reader, Values
from embedlab.data.readers import open_reader
from embedlab.errors import UserError
from embedlab.files import like


def open_source(config: DataConfig) -> list[Reader]:
    """The tables that a configuration names, to be read one after the other; headers may be read here, rows are not.

    Raises:
        UserError: nothing matches, an unknown format, a hub that cannot be reached, a package that is
            missing.
    """
    if config.files:
        readers = _open_files(config, config.files)
    elif config.hub:
        readers = _open_hub(config, config.hub)
    else:
        assert config.package is not None
        readers = [PackageReader(config.package)]
    return readers + _open_files(config, config.also or [], "data.also")


@by_set
def check_source(config: DataConfig) -> None:
    """See that what a configuration names is there, before it is read. Nothing is looked for on the hub.

    Raises:
        UserError: as `open_source`.
    """
    if config.files or not config.hub:
        check_unread(data_kind(config.name), open_source(config), config)
    else:
        _open_files(config, config.also or [], "data.also")


def find_files(files: str | Sequence[str], key: str = "data.files") -> list[Path]:
    """Paths and globs to files: each glob's matches sorted, a file that is matched twice taken once.

    Raises:
        UserError: one that is not there, by ``key``.
    """
    found: dict[Path, None] = {}
    for given in [files] if isinstance(files, str) else files:
        path = Path(given).expanduser()
        if path.is_file():
            found[path] = None
        elif path.is_dir():
            raise UserError("this is a folder", key=key, value=given, fix=f"{key}='{given}/*.txt'")
        elif path.exists():
            kind = "a pipe" if path.is_fifo() else "a device"
            raise UserError(
                f"this is {kind}", key=key, value=given, fix="a file: its text is read more than once"
            )
        elif glob.has_magic(str(path)):
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            if not any(match.is_file() for match in matches):
                fix = f"{key}='FOLDER/*.txt', seen from {Path.cwd()}"
                raise UserError("the pattern matches no file", key=key, value=given, fix=fix)
            found |= {match: None for match in matches if match.is_file()}
        else:
            fix = like(path) or f"a file that is there, seen from {Path.cwd()}"
            raise UserError("no such file", key=key, value=given, fix=fix)
    return list(found)


def _open_files(config: DataConfig, files: str | Sequence[str], key: str = "data.files") -> list[Reader]:
    layout = Layout(
        config.header,
        tuple(config.chosen.values()),
        {name: f"data={kind}" for name, kind in column_kinds().items()},
        "data.columns.ROLE=NAME; without a header data.columns.ROLE=0, or another place",
    )
    return [open_reader(path, layout) for path in find_files(files, key)]


class HubReader(Reader):
    """One configuration of a hub data set, memory-mapped; class labels are read as their names."""

    def __init__(self, name: str, dataset: Any) -> None:
        super().__init__(name, len(dataset))
        self.dataset = dataset.flatten()

    def identity(self) -> str:
        return str(self.dataset._fingerprint)

    @property
    def columns(self) -> list[str]:
        return list(self.dataset.column_names)

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        names = {c: getattr(self.dataset.features[c], "names", None) for c in columns}
        row = 0
        for batch in self.dataset.select_columns(list(columns)).with_format(None).iter(batch_size=1024):
            texts = [
                [_label(labels, value) for value in batch[column]] if labels else batch[column]
                for column, labels in names.items()
            ]
            for values in zip(*texts, strict=True):
                row += 1
                yield row, values
            self.position = row
        if row == 0:
            raise self.error("the data set has no rows", fix="another data.split, or data.hub_config")


def _label(names: list[str], value: int | None) -> str | None:
    return None if value is None or value < 0 else names[value]


def _open_hub(config: DataConfig, name: str) -> list[Reader]:
    import datasets  # type: ignore[import-untyped]

    readers: list[Reader] = []
    for part in config.hub_config if isinstance(config.hub_config, list) else [config.hub_config]:
        try:
            with quiet_hub():  # five retries, each with a warning, before the error that is told here
                dataset = datasets.load_dataset(
                    name, part, data_files=config.hub_files, split=config.split, revision=config.revision
                )
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as bad:
            raise _hub_error(config, part, bad) from None
        readers.append(HubReader(" ".join(filter(None, (f"hub:{name}", part))), dataset))
    return readers


def _hub_error(config: DataConfig, part: str | None, bad: Exception) -> UserError:
    asked = " ".join(filter(None, (part, f"split {config.split}")))
    reason = str(bad).strip().splitlines()[0] if str(bad).strip() else ""
    files = config.hub_files
    what = ", ".join([files] if isinstance(files, str) else files or ["a copy"])
    return UserError(
        f"the hub data set cannot be read ({asked}): {type(bad).__name__} {reason[:200]}",
        key="data.hub",
        value=config.hub,
        fix=f"data.files=PATH of {what}, or a connection (HF_HUB_OFFLINE) and the right name",
    )


class PackageReader(Reader):
    """Rows of `embedlab.data.packages.TEXTS`, which a package gives all at once.

    Raises:
        UserError: the package is missing.
    """

    def __init__(self, name: str) -> None:
        from embedlab.data.packages import TEXTS

        super().__init__(f"package:{name}")
        self._columns, self._rows, package, edition = TEXTS[name]
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"the package {package} is not installed",
                key="data.package",
                value=name,
                fix='pip install "embedlab[quickstart]"',
            ) from None
        self._identity = f"{package} {version} edition {edition}"

    def identity(self) -> str:
        return self._identity

    @property
    def columns(self) -> list[str]:
        return self._columns

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        places = [self._columns.index(name) for name in columns]
        for row, values in enumerate(self._rows(), 1):
            yield row, tuple([values[place] for place in places])
