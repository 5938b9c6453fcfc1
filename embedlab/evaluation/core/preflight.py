"""A suite's data, looked at before anything is encoded: what is missing must not show after hours."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedlab.evaluation import FINE_TUNED, SUITES
from embedlab.evaluation.core.packages import require

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo

SUBFOLDERS: dict[str, tuple[str, ...]] = {
    "sts": ("sts",),
    "geometry": ("sts",),
    "robustness": ("sts",),
    "cls_energy": ("sts",),
    "transfer": ("transfer",),
    "retrieval": ("retrieval",),
    "bitext": ("parallel",),
    "languages": ("parallel",),
    "xretrieval": ("retrieval",),
    "qa": ("retrieval",),
    "xnli": ("nli",),
    "pawsx": ("nli",),
    "glue": ("glue", "transfer"),
    "sts_multilingual": ("sts_multilingual",),
}
"""Kinds of data in a folder that holds several, which a suite reads. One that reads a single kind takes its folder."""
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
    kinds = SUBFOLDERS.get(suite, ())
    inner = Path(folder, *kinds) if len(kinds) == 1 else Path(folder)
    return str(inner if inner.is_dir() else folder)


def folder_to_give(folder: str | Path | None, suite: str) -> str:
    """What to give in place of `folder`, or to put into it, where a suite's data are not in it: for a message."""
    kinds = SUBFOLDERS[suite]
    if folder is not None and all(Path(folder, kind).is_dir() for kind in kinds):
        return f"the files of the suite in {' and '.join(str(Path(folder, kind)) for kind in kinds)}"
    return f"a folder that holds {' and '.join(f'{kind}/' for kind in kinds)} beside sts/"


def unfit(suite: str, info: BackboneInfo | None, towers: int) -> str | None:
    """Why a suite cannot score an encoder, which its weights need not be read for; None: it can.

    Args:
        suite: of `SUITES`.
        info: of its backbone; None: not known yet.
        towers: encoders that it is made of.
    """
    if suite in FINE_TUNED and towers > 1:
        return "fine-tuning needs an encoder with one backbone"
    if suite == "cls_energy" and info is not None:
        from embedlab.evaluation.probes.cls_energy import looks_into

        return None if looks_into(info) else f"it cannot look into the blocks of {info.model_type}"
    return None


def check_data(suite: str, settings: Mapping[str, Any]) -> None:
    """Have a suite read its local data, and leave it before it encodes. Nothing is looked for on the hub.

    Raises:
        UserError: what the suite says of its settings, its files or a package that is missing.
    """
    if suite == "mteb":
        require("mteb", "mteb")
    if suite in _NO_FOLDER or (settings.get("data_dir") is None and suite not in _NO_HUB):
        return
    with suppress(_Reached):
        SUITES[suite](_Nobody(), settings)


def check_comparison(settings: Mapping[str, Any]) -> None:
    """The same for `embedlab.evaluation.sts.compare`."""
    from embedlab.evaluation.sts.compare import run

    if settings.get("data_dir") is not None:
        with suppress(_Reached):
            run(_Nobody(), _Nobody(), settings)
