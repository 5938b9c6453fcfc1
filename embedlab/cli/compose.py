"""``key=value`` arguments into a plain dictionary, through Hydra's compose API."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embedlab import files as _paths
from embedlab.cli.config_errors import explain, no_flag, unknown_key, unreadable
from embedlab.errors import UserError, nearest

# What Hydra reads as an override; anything else, such as ./a=b.txt, is a positional argument.
_OVERRIDE = re.compile(r"(~[A-Za-z_][\w.@/]*$)|((\+{0,2}|~)[A-Za-z_][\w.@/-]*=)")


_CLOSED = (
    "benchmark", "contamination", "encode", "export", "mine", "quantize", "search_export", "search_index",
    "search_query", "search_serve",
)  # fmt: skip
"""Commands whose keys are all in their files: those of `evaluate` are its suites', those of `train` an experiment's."""
_OPEN = (
    "data.mix.", "data.prompts.", "data.ignore_columns=", "data.columns.negative_", "data.columns.score_",
    "method.matryoshka.",
)  # fmt: skip
"""What keys begin with that are names of one's own, or that the kind of data or the method checks."""
_COUNTS = ("batch_size", "block", "chunk", "dim", "k", "max_length", "part_rows")
_SWITCHES = ("header",)
"""Null by default."""
_TEXTS = (
    "calibration", "ckpt", "column", "compare", "corpus", "data_dir", "device", "dtype", "factory", "format", "index",
    "input", "kind", "licence", "out", "output", "prompt", "prompt_name", "push", "push_revision", "queries",
    "sampling", "search", "store", "teacher", "texts", "to", "work",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Says in one line what cannot be parsed."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message, fix=f"{self.prog} --help")


def compose(
    config_name: str, argv: Sequence[str], positional: Sequence[str] = (), several: str | None = None
) -> dict[str, Any]:
    """Compose ``conf/{config_name}.yaml`` with the arguments of one command.

    Args:
        config_name: the configuration, which is named as its command is.
        argv: ``key=value`` overrides (also ``group=choice``, ``+key=``, ``~key``) and positional arguments.
        positional: the keys that positional arguments fill, in their order; all are then required.
        several: that one of them which takes what there is more, as a list.

    Returns: the resolved configuration, without any OmegaConf type.

    Raises:
        UserError: an unknown key or choice, a value that cannot be read, a key without its value (``???``).
        SystemExit: status 0, after ``--help`` or ``--cfg`` has printed.
    """
    names = " ".join(name.rpartition(".")[2].upper() for name in positional)
    parser = Parser(prog=f"embedlab {config_name.replace('_', ' ')}", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", nargs="?", const="job", choices=["job"])
    parser.add_argument("arguments", nargs="*")
    options, unknown = parser.parse_known_intermixed_args(list(argv))
    if flags := [a for a in unknown if a != "--"]:
        raise no_flag(argv[list(argv).index(flags[0]) :], known_keys(config_name), parser.prog)
    free = [key for key in positional if not any(a.startswith(f"{key}=") for a in options.arguments)]
    given, overrides = _parted(options.arguments, config_name, len(free))
    filled = [re.sub(r"(\\*)\$\{", r"\1\1\\${", text) for text in given]  # `${` is no interpolation
    values: list[Any] = list(filled)
    if len(given) > len(free):
        if several not in free and positional:
            usage = f"{parser.prog} {names} key=value …; a text of several words stands in quotes"
            raise UserError(f"an argument too many: {given[len(free)]!r}", fix=usage)
        if several not in free:
            raise unreadable(given[0])
        at, end = free.index(several), free.index(several) + len(given) - len(free) + 1
        values[at:end] = [filled[at:end]]

    config = _compose(config_name, overrides)
    for key, value in zip(free, values, strict=False):
        OmegaConf.update(config, key, value, force_add=True)
    if options.help:
        _print_help(config_name, f"usage: {parser.prog} {f'{names} ' if names else ''}key=value …", config)
        raise SystemExit(0)
    if options.cfg:
        print(OmegaConf.to_yaml(config), end="")
        raise SystemExit(0)
    if missing := [key for key in positional if OmegaConf.is_missing(config, key)]:
        raise UserError(f"{missing[0]} is missing", fix=f"{parser.prog} {names} key=value …")
    composed = plain(config)
    _check_scalars(config_name, composed, several)
    if config_name in _CLOSED:
        check_added(
            overrides, composed, [*(_defaults(config_name).keys() - {"defaults", "hydra"}), "pooling"]
        )
    return composed


def check_added(overrides: Sequence[str], values: Mapping[str, Any], read: Iterable[str]) -> None:
    """Raises UserError for a ``+key=value`` that added a key which nothing reads.

    Args:
        overrides: of the command line.
        values: as composed.
        read: the outermost keys that are read.
    """
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        outer = key.partition(".")[0]
        if override.startswith("+") and outer in values and outer not in read:
            raise unknown_key(key, read, overrides)


def _parted(arguments: Sequence[str], config_name: str, places: int) -> tuple[list[str], list[str]]:
    """Arguments for the ``places`` of positional ones, and overrides.

    A text or a file may look like an override (``e=mc2``, ``a=b.txt``). It is one of the former where its key resembles
    none of the command's and a place is free for it; a mistyped key stays a key.
    """
    names = [a for a in arguments if not _OVERRIDE.match(a)]
    if len(names) < places:
        own = {key.partition(".")[0] for key in known_keys(config_name)}
        also = [a for a in arguments if a in names or _is_strange(a, own)]
        names = also if len(also) <= places else names
    return names, [readable(a) for a in arguments if a not in names]


def _is_strange(override: str, known: Iterable[str]) -> bool:
    key = re.split(r"[.@/=]", override.lstrip("+~"), maxsplit=1)[0]
    return not nearest(key, [*known, "hydra", "pooling"])


def _defaults(config_name: str) -> dict[str, Any]:
    text = (_paths.conf_dir() / f"{config_name}.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def _check_scalars(config_name: str, values: dict[str, Any], several: str | None) -> None:
    """A switch is true or false, a number a number, as the key's default is; a count is positive, a name one text (but
    of the key `several`)."""
    if config_name == "train":  # whose records check themselves
        return
    for key, default in _defaults(config_name).items():
        if key in ("defaults", "hydra"):
            continue
        value = values.get(key)
        is_switch = isinstance(default, bool) or (key in _SWITCHES and value is not None)
        if is_switch and not isinstance(value, bool):
            message, fix = "not true or false", f"{key}=true or {key}=false"
        elif (
            key in _COUNTS
            and not isinstance(default, list)
            and value != default
            and (type(value) is not int or value < 1)
        ):
            message, fix = "must be a positive whole number", f"{key}={default or 64}"
        elif (
            key in _TEXTS
            and isinstance(value, dict if key == several else list | dict)
            and not isinstance(default, list)
        ):
            message, fix = "not text", f"one text: {key}='…'"
        elif isinstance(default, dict) and not isinstance(value, dict):
            message, fix = "a group of keys is meant here, not a value", f"{key}.KEY=VALUE"
        else:
            continue
        raise UserError(message, key=key, value="null" if value is None else value, fix=fix)


def plain(config: Any) -> dict[str, Any]:
    """An OmegaConf configuration as dictionaries, lists and scalars, every interpolation resolved.

    Raises: UserError where a key has no value or an interpolation leads nowhere.
    """
    try:
        content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise explain(error) or error from error
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def readable(override: str) -> str:
    """``override``, its value quoted if it is a path that Hydra cannot read, such as ``epoch=3.ckpt``.

    A key of one of `_OPEN` may be a new one.
    """
    if override.startswith(_OPEN):
        override = f"++{override}"
    key, equals, value = override.partition("=")
    if not equals or value[:1] in ("", "'", '"', "[", "{") or "${" in value:
        return override
    if "=" not in value and not (re.search(r"[^\w./~-]", value) and Path(value).exists()):
        return override
    return f"{key}={QuotedString(text=value, quote=Quote.single).with_quotes()}"


def known_keys(config_name: str, overrides: Sequence[str] = ()) -> list[str]:
    """Every key of the configuration, inner ones too, as far as it composes: ``data``, ``data.limit``."""
    for attempt in (list(overrides), []):
        try:
            return list(_walk(OmegaConf.to_container(_hydra_compose(config_name, attempt))))
        except (HydraException, OmegaConfBaseException, ValueError):
            continue
    return []


def explained(error: Exception, config_name: str, overrides: Sequence[str]) -> UserError | None:
    """`explain`, with suggestions from the configuration that ``overrides`` would have composed."""
    keys: list[str] = []
    if named := re.match(r"Could not override '([^']+)'", str(error)):
        others = [o for o in overrides if o.lstrip("+~").partition("=")[0] != named.group(1)]
        keys = known_keys(config_name, others)
    return explain(error, keys, overrides)


def _compose(config_name: str, overrides: list[str]) -> Any:
    try:
        return _hydra_compose(config_name, overrides)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        found = explained(error, config_name, overrides)
        if found is None:
            raise
        raise found from error


def _hydra_compose(config_name: str, overrides: list[str]) -> Any:
    with hydra.initialize_config_dir(str(_paths.conf_dir()), version_base="1.3"):
        return hydra.compose(config_name, overrides)


def _walk(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for name, child in node.items():
            yield f"{prefix}{name}"
            yield from _walk(child, f"{prefix}{name}.")


def _print_help(config_name: str, usage: str, config: Any) -> None:
    about = leading_comment(_paths.conf_dir() / f"{config_name}.yaml")
    print("\n\n".join(part for part in (usage, about, "keys and their values:") if part))
    print("\n".join(f"  {line}".rstrip() for line in OmegaConf.to_yaml(config).splitlines()))


def leading_comment(file: Path) -> str:
    """The comment at the top of a configuration file, without its signs.

    Args:
        file: of ``conf/``.
    """
    lines = []
    for line in file.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.lstrip("#").removeprefix(" "))
    return "\n".join(lines).strip()
