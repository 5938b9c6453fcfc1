"""Reading a suite's settings, each checked in one way: numbers, names, folders, the device, packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedlab.errors import UserError, one_of
from embedlab.evaluation.core.files import inner
from embedlab.files import existing_folder


def row_limit(settings: Mapping[str, Any], default: int | None = None) -> int | None:
    """The key `limit`: rows of each file or split; None: `default`.

    Raises UserError when it is no positive whole number.
    """
    return default if settings.get("limit") is None else whole(settings, "limit", 100)


def whole(settings: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    """A key that is a whole number from `least` up; None: `default`. Raises UserError for any other."""
    value = settings.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(
            f"must be a whole number from {least} up", key=key, value=value, fix=f"{key}={default}"
        )
    return value


def names(settings: Mapping[str, Any], key: str) -> list[str] | None:
    """A key that names one or several things: a list, "a,b", or None where it is not given."""
    value = settings.get(key)
    if value is None:
        return None
    several = value if isinstance(value, list | tuple) else str(value).split(",")
    return list(dict.fromkeys(map(str, several)))


def chosen(
    wanted: Sequence[str] | None, there: Sequence[str], key: str, unknown: str = "is not there"
) -> list[str]:
    """`wanted` in the order of `there`, or all of it. UserError with the message `unknown` for one not there."""
    for name in wanted or ():
        if name not in there:
            raise UserError(unknown, key=key, value=name, fix=one_of(name, there))
    return [name for name in there if wanted is None or name in wanted]


def task_names(settings: Mapping[str, Any], known: Sequence[str], kind: str) -> list[str]:
    """The key `tasks` in the order given, or all that are `known`. UserError for one that is not."""
    wanted = names(settings, "tasks") or list(known)
    chosen(wanted, known, "tasks", f"no such {kind} task")
    return wanted


def folder_of(settings: Mapping[str, Any], kind: str) -> Path | None:
    """`data_dir`, or its folder `kind` where it has one; None: no data_dir, so the hub."""
    data_dir = settings.get("data_dir")
    if data_dir is None:
        return None
    return inner(existing_folder(data_dir, f"give the folder of {kind}/", "data_dir"), kind)


def limit_note(limit: int | None) -> list[str]:
    """A warning for the protocol when rows were left out."""
    if limit is None:
        return []
    return [f"limit={limit}: only the first rows of each set were used, not comparable with published scores"]


def require(module: str, package: str) -> None:
    """UserError where `package`, which holds `module`, is not installed."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the package {package} is missing", fix="pip install 'embedlab[eval]'")


def scoring_device(name: str | None) -> str:
    """Where a scorer's own arithmetic runs: `name`, else CUDA if there is one, else the CPU.

    Never mps: it has no float64, and what a scorer computes is too small to gain from it.
    """
    import torch

    if name in (None, "auto"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu" if str(name).startswith("mps") else str(name)
