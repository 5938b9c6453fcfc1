"""A suite: a set of scores with its protocol. One class a suite says all that is known of it; nothing else lists them.

A suite is found by its name in a file of `embedlab/evaluation/` (or of another distribution: `embedlab.parts`)::

    class Mine(Suite):
        name = "mine"
        folders = ("sts",)
        keys = ("tasks",)

        def load(self, settings): ...
        def score(self, encoder, data, settings): ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from embedlab.errors import UserError, nearest, one_of
from embedlab.evaluation.core.protocol import describe
from embedlab.evaluation.core.settings import require
from embedlab.evaluation.core.table import Metric, Scores, Table, protocol_line, suite_table, task_table
from embedlab.parts import part_class, part_names

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo

Settings = Mapping[str, Any]
Scored = tuple[dict[str, float], dict[str, Any]]
"""Flat scores, "task/metric" to a number, and the protocol block."""

SHARED_KEYS = ("data_dir", "device", "dtype", "kept")
"""Keys that every suite may be given."""

_ROWS = ("lee", "stories", "dev", "sts", "emoji", "bitext")
"""The order in which the table at the end names what was scored; other suites follow."""


class Suite(ABC):
    """One suite of scores, such as the seven STS tasks. It holds no state: all facts are class variables."""

    name: ClassVar[str]
    folders: ClassVar[tuple[str, ...]] = ()
    """Kinds of data that it reads: folders in one that holds several kinds. Of a single kind its folder will do."""
    hub: ClassVar[bool] = True
    """Whether its data are on the hub too, where no ``data_dir`` is given."""
    keys: ClassVar[tuple[str, ...]] = ()
    """Settings that it reads beside `SHARED_KEYS`. One that lacks ``limit`` is scored whole: a part of its fixed sets
    would be another test."""
    packages: ClassVar[Mapping[str, str]] = {}
    """Modules that it needs beside those of every installation, and the packages that hold them."""
    optional: ClassVar[bool] = False
    """Whether a run leaves the suite out, and says so, where `packages` are not installed."""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """Scores that the table at the end of a run shows."""
    quantities: ClassVar[tuple[Metric, ...]] = ()
    """Scores that are not of tasks: `tables` has a row for each of them."""
    pictures: ClassVar[tuple[str, ...]] = ()
    """Those of its keys that name a file to draw."""

    def fits(self, info: BackboneInfo | None, towers: int) -> str | None:
        """Why this suite cannot score an encoder, as far as is known without its weights.

        Args:
            info: of its backbone; None: not known yet.
            towers: encoders that it is made of.

        Returns: the reason, as a clause; None: it can.
        """
        return None

    @abstractmethod
    def load(self, settings: Settings) -> Any:
        """Read and check settings and data, without an encoder.

        Args:
            settings: key to value; None for a key counts as not given.

        Returns: what `score` takes.

        Raises:
            UserError: a wrong setting, a missing or broken file, a package that is not installed.
        """

    @abstractmethod
    def score(self, encoder: Any, data: Any, settings: Settings) -> Scored:
        """Score an encoder.

        Args:
            encoder: anything with ``encode(list[str]) -> [n, D]``.
            data: what `load` gave.
            settings: those that `load` was given.

        Returns: scores "task/metric", and the protocol block, as `result` makes them.
        """

    def result(self, encoder: Any, scores: dict[str, float], *, text: str = "raw", **facts: Any) -> Scored:
        """What `score` returns.

        Args:
            encoder: that was scored.
            scores: "task/metric" to a number.
            text: variant of the texts.
            facts: further ones of the protocol block, as `embedlab.evaluation.core.protocol.describe` takes them.

        Returns: the scores, and the protocol block of this suite.
        """
        return scores, describe(encoder, suite=self.name, text=text, **facts)

    def tables(self, name: str, scores: Scores, protocol: Mapping[str, Any]) -> list[Table]:
        """What `embedlab evaluate` prints.

        Args:
            name: of the encoder.
            scores, protocol: as `score` gave them.

        Returns: tables in their order; the caption is the protocol, short.
        """
        if self.quantities:
            return [suite_table(scores, 1, self.title(name), self.quantities, protocol_line(protocol))]
        return [task_table(scores, 1, self.title(name), protocol_line(protocol))]

    def figures(self, scores: Scores, protocol: Mapping[str, Any], settings: Settings) -> None:  # noqa: B027
        """Draw what the settings ask for.

        Args:
            scores, protocol: as `score` gave them.
            settings: those that `score` was given.

        Raises:
            UserError: a picture of an unknown format.
        """

    def run(self, encoder: Any, settings: Settings | None = None, data: Any = None) -> Scored:
        """Load the data, score, draw what the settings ask for: the whole suite in one call.

        Args:
            encoder: anything with ``encode(list[str]) -> [n, D]``.
            settings: keys of the suite, as on the command line.
            data: what `load` gave for these settings; None: it is loaded here.

        Returns: scores and protocol block, as of `score`.

        Raises:
            UserError: a key that this suite does not take; what `load` and `score` raise.
        """
        settings = settings or {}
        check_keys([self], settings)
        scores, protocol = self.score(encoder, self.load(settings) if data is None else data, settings)
        self.figures(scores, protocol, settings)
        return scores, protocol

    def local(self, settings: Settings) -> Any:
        """What `load` gives where it needs no hub; None: the data are on the hub, and are not looked for here.

        Raises:
            UserError: as `load`.
        """
        for module, package in self.packages.items():
            require(module, package)
        if self.hub and self.folders and settings.get("data_dir") is None:
            return None
        return self.load(settings)

    def folder(self, data_dir: str | Path | None) -> str | None:
        """Where its data are.

        Args:
            data_dir: folder of its own data or of several kinds; None: the hub.

        Returns: `data_dir`, or its own folder in it (``sts/``, ``retrieval/``, ...); None: the hub.
        """
        if data_dir is None:
            return None
        inner = Path(data_dir, *self.folders) if len(self.folders) == 1 else Path(data_dir)
        return str(inner if inner.is_dir() else data_dir)

    def folder_to_give(self, data_dir: str | Path | None) -> str:
        """For a message: what to give in place of `data_dir`, or to put into it, where the data are not in it."""
        if data_dir is not None and all(Path(data_dir, kind).is_dir() for kind in self.folders):
            return f"the files of the suite in {' and '.join(str(Path(data_dir, kind)) for kind in self.folders)}"
        return f"a folder that holds {' and '.join(f'{kind}/' for kind in self.folders)} beside sts/"

    def title(self, encoder: str) -> str:
        """Of a table of this suite's scores."""
        return f"{self.name}: {encoder}"


def suite_names() -> list[str]:
    """All suites there are; nothing is imported for it."""
    return list(part_names("evaluation"))


def check_names(names: Sequence[str], key: str = "suite") -> None:
    """See that there are such suites.

    Args:
        names: of suites.
        key: the configuration key that names them.

    Raises:
        UserError: there is no suite of that name; the fix lists those there are.
    """
    known = suite_names()
    for name in names:
        if name not in known:
            raise UserError("no such suite", key=key, value=name, fix=one_of(name, known))


def suite(name: str, key: str = "suite") -> Suite:
    """A suite by its name; its code is imported then.

    Args:
        name: one of `suite_names`.
        key: the configuration key that names it, for the message.

    Returns: the suite.

    Raises:
        UserError: there is no such suite.
    """
    check_names([name], key)
    made: Suite = part_class("evaluation", name, Suite, key)()
    return made


def check_keys(suites: Sequence[Suite], settings: Settings, also: Sequence[str] = ()) -> None:
    """See that every key is read by one of the suites.

    Args:
        suites: those that the settings are for.
        settings: key to value.
        also: keys that are read elsewhere.

    Raises:
        UserError: a key that nothing reads, with the nearest one that is read.
    """
    read = dict.fromkeys([*SHARED_KEYS, *also, *(key for suite in suites for key in suite.keys)])
    for key, value in settings.items():
        if key not in read:
            near = nearest(key, read)
            names = ", ".join(suite.name for suite in suites)
            fix = f"{near[0]}=…" if near else f"leave {key} out"
            raise UserError(f"suite {names} has no such key", key=key, value=value, fix=fix)


def joined(scores: Mapping[str, float], more: Mapping[str, float], name: str) -> dict[str, float]:
    """Scores of several suites in one.

    Args:
        scores: so far.
        more: of another suite.
        name: of that suite, which goes before what both have: SST-2 is a task of ``transfer`` and of ``glue``.
    """
    return {**scores, **{f"{name}-{key}" if key in scores else key: value for key, value in more.items()}}


@contextmanager
def keys_named(names: Mapping[str, str], from_hub: str | None) -> Iterator[None]:
    """A message about settings names them by the keys of whoever gives them.

    Args:
        names: a suite's key to the caller's.
        from_hub: what the caller writes to have the data from the hub; None: they are not there.

    Raises:
        UserError: as the block raised it.
    """
    try:
        yield
    except UserError as error:
        if from_hub and error.key == "data_dir" and error.value is not None:
            error.fix = f"{error.fix}, or {from_hub}"
        for key, name in names.items():
            error.key = name if error.key == key else error.key
            error.fix = error.fix.replace(f"{key}=", f"{name}=")
        raise


def final_metrics() -> tuple[Metric, ...]:
    """The rows of the table at the end of a run: each suite's own, and those of the dev set."""
    order = sorted([*suite_names(), "dev"], key=lambda name: (*_ROWS, name).index(name))
    dev = (Metric("dev/spearman", "dev", "higher"),)
    return tuple(m for name in order for m in (dev if name == "dev" else suite(name).metrics))
