"""Where text comes from: local files, a data set of the hub, or an installed package."""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedlab.backbones.hub import quiet_hub
from embedlab.config.data import DataConfig
from embedlab.data.readers import Reader, Values, open_reader
from embedlab.errors import UserError


@dataclass(frozen=True)
class Source:
    """Tables to read one after the other, and what tells this text from any other (for the cache key)."""

    readers: list[Reader]
    identity: list[str]


def open_source(config: DataConfig) -> Source:
    """The tables that a configuration names; headers may be read here, rows are not.

    Raises:
        UserError: nothing matches, an unknown format, a hub that cannot be reached, a package that is
            missing.
    """
    if config.files:
        paths = find_files(config.files)
        readers: list[Reader] = [open_reader(path) for path in paths]
        return Source(readers, ["".join([_sha256(path), *path.suffixes[-2:]]) for path in paths])
    if config.hub:
        return _open_hub(config)
    assert config.package is not None
    return _open_package(config.package)


def check_source(config: DataConfig) -> None:
    """See that what a configuration names is there, before it is read. Nothing is looked for on the hub.

    Raises:
        UserError: as `open_source`.
    """
    if config.files:
        for path in find_files(config.files):
            open_reader(path)
    elif config.package is not None and not config.hub:
        _open_package(config.package)


def find_files(files: str | Sequence[str]) -> list[Path]:
    """Paths and globs to files: each glob's matches sorted, a file that is matched twice taken once."""
    found: dict[Path, None] = {}
    for given in [files] if isinstance(files, str) else files:
        path = Path(given).expanduser()
        if path.is_file():
            found[path] = None
        elif path.is_dir():
            raise UserError(
                "this is a folder", key="data.files", value=given, fix=f"data.files='{given}/*.txt'"
            )
        elif glob.has_magic(str(path)):
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            if not any(match.is_file() for match in matches):
                raise UserError("the pattern matches no file", key="data.files", value=given)
            found |= {match: None for match in matches if match.is_file()}
        else:
            raise UserError("no such file", key="data.files", value=given)
    return list(found)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as bad:
        raise UserError(f"cannot be read: {bad.strerror or bad}", file=path) from None


class HubReader(Reader):
    """One configuration of a hub data set, memory-mapped; class labels are read as their names."""

    def __init__(self, name: str, dataset: Any) -> None:
        super().__init__(name, len(dataset))
        self.dataset = dataset.flatten()

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
            raise self.error("the data set has no rows")


def _label(names: list[str], value: int | None) -> str | None:
    return None if value is None or value < 0 else names[value]


def _open_hub(config: DataConfig) -> Source:
    import datasets  # type: ignore[import-untyped]

    assert config.hub is not None
    configs = config.hub_config if isinstance(config.hub_config, list) else [config.hub_config]
    readers: list[Reader] = []
    identity = []
    for part in configs:
        try:
            with quiet_hub():  # five retries, each with a warning, before the error that is told here
                dataset = datasets.load_dataset(
                    config.hub,
                    part,
                    data_files=config.hub_files,
                    split=config.split,
                    revision=config.revision,
                )
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as bad:
            raise _hub_error(config, part, bad) from None
        readers.append(HubReader(" ".join(filter(None, (f"hub:{config.hub}", part))), dataset))
        identity.append(dataset._fingerprint)
    return Source(readers, identity)


def _hub_error(config: DataConfig, part: str | None, bad: Exception) -> UserError:
    asked = " ".join(filter(None, (part, f"split {config.split}")))
    reason = str(bad).strip().splitlines()[0] if str(bad).strip() else ""
    return UserError(
        f"the hub data set cannot be read ({asked}): {type(bad).__name__} {reason[:200]}",
        key="data.hub",
        value=config.hub,
        fix="check the name and the connection (HF_HUB_OFFLINE), or set data.files=PATH",
    )


class PackageReader(Reader):
    """Rows that a package gives, all at once."""

    def __init__(self, name: str, columns: list[str], rows: Any) -> None:
        super().__init__(name)
        self._columns = columns
        self._rows = rows

    @property
    def columns(self) -> list[str]:
        return self._columns

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
        places = [self._columns.index(name) for name in columns]
        for row, values in enumerate(self._rows(), 1):
            yield row, tuple([values[place] for place in places])


def _open_package(name: str) -> Source:
    from embedlab.data import packages

    columns, rows, package, edition = packages.TEXTS[name]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"the package {package} is not installed",
            key="data.package",
            value=name,
            fix='pip install "embedlab[quickstart]"',
        ) from None
    return Source(
        [PackageReader(f"package:{name}", columns, rows)], [f"{package} {version} edition {edition}"]
    )
