"""A suite's data, looked at before anything is encoded: what is missing must not show after hours."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from embedlab.evaluation import SUITES

SUBFOLDERS = {
    "sts": "sts",
    "geometry": "sts",
    "robustness": "sts",
    "cls_energy": "sts",
    "transfer": "transfer",
    "retrieval": "retrieval",
    "bitext": "parallel",
    "languages": "parallel",
    "xretrieval": "retrieval",
    "qa": "retrieval",
    "xnli": "nli",
}
"""Kinds of data in a folder that holds several: a suite takes its own, where there is one."""
_NO_FOLDER = frozenset(("lee", "emoji", "mteb"))
_NO_HUB = frozenset(("retrieval", "languages"))


class _Reached(BaseException):
    """A suite has what it wants to encode. (No `Exception`: no suite's own handlers are for it.)"""


class _Nobody:
    """Stands for the encoder, and is asked for nothing before the data are there."""

    def __getattr__(self, name: str) -> Any:
        raise _Reached


def folder_for(folder: str | Path | None, suite: str) -> str | None:
    """Where a suite's data are: the folder, or its own one in it (``sts/``, ``retrieval/``, ...); None: the hub."""
    if folder is None:
        return None
    inner = Path(folder) / SUBFOLDERS.get(suite, "")
    return str(inner if inner.is_dir() else folder)


def check_data(suite: str, settings: Mapping[str, Any]) -> None:
    """Have a suite read its local data, and leave it before it encodes. Nothing is looked for on the hub.

    Raises:
        UserError: what the suite says of its settings or its files.
    """
    if suite in _NO_FOLDER or (settings.get("data_dir") is None and suite not in _NO_HUB):
        return
    with suppress(_Reached):
        SUITES[suite](_Nobody(), settings)
