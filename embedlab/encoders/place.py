"""Where an encoder is that somebody names: looked for without torch, so that a wrong name is said at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from embedlab.backbones.hub import snapshot, split_revision
from embedlab.encoders.folder import CARD
from embedlab.errors import UserError
from embedlab.files import SENTENCE_ENCODER, assets_dir, like, shipped_encoders

_OWN = (CARD, "modules.json", "config.json", "adapter_config.json")
"""What a folder is itself goes before what a run left in it."""


class Place(NamedTuple):
    """What `find` found.

    Attributes:
        path: a checkpoint, a .gguf, or the folder of an encoder or a model.
        name: of it, for messages.
        asked: as it was given.
        hub: ``ORG/NAME@COMMIT``; None: it is a file or folder of this machine.
        within: the folder of a run that it was taken from.
    """

    path: Path
    name: str
    asked: str
    hub: str | None = None
    within: Path | None = None


def find(
    path: str | os.PathLike[str] | None = None, revision: str | None = None, code: bool = False
) -> Place:
    """The place of what `embedlab.load` takes; a model of the hub is downloaded.

    Raises:
        UserError: nothing of the kind is there.
    """
    asked = box() if path is None else os.fspath(path)
    return local(asked, revision) or _on_hub(asked, revision, code)


def box(name: str = SENTENCE_ENCODER) -> str:
    """What names an encoder in the box where its user named none: its name, or its folder where something else of this
    name lies in the working folder, and would go before it."""
    return str(assets_dir() / name) if os.path.lexists(name) else name


def recorded(reference: str) -> str:
    """What names the encoder by the `reference` that an index has: paths there are whole, so a name alone is of the box
    or of a hub."""
    return box(reference) if reference in shipped_encoders() else reference


def is_shipped(path: Path) -> bool:
    """Whether a path is the folder of an encoder in the box."""
    return path.is_absolute() and path.parent == assets_dir()


def anywhere(asked: str, hub: str | None = None) -> str:
    """What was asked for so that it means the same in another working folder, and on a `hub` that goes on."""
    path = Path(asked)
    if is_shipped(path):
        return path.name
    return str(path.resolve()) if path.exists() else hub or asked


def local(asked: str, revision: str | None = None) -> Place | None:
    """The place of what is on this machine, or None: a hub may know the name.

    Raises:
        UserError: a file or folder that is no encoder, or the path of one that is not there.
    """
    if not asked.strip():  # which would be the working folder
        fix = f"{SENTENCE_ENCODER}, mini, a folder, or ORG/NAME of a hub"
        raise UserError("an empty name", key="ckpt", value=repr(asked), fix=fix)
    given = Path(asked).expanduser()
    if not given.exists() and (asked in ("mini", SENTENCE_ENCODER) or asked in shipped_encoders()):
        given = _shipped(asked)
    if given.exists() and revision is not None:
        raise UserError(
            "a folder or file has no revisions", key="revision", value=revision, fix="leave it out"
        )
    if given.is_file():
        return Place(_checked(given), str(given), asked)
    if given.is_dir():
        return _inside(given, asked, asked)
    repository, _ = split_revision(asked)  # a revision may have slashes
    if Path(asked).is_absolute() or asked.startswith((".", "~")) or repository.count("/") > 1:
        fix = (
            _meant(repository)
            or f"{SENTENCE_ENCODER}, mini, a run folder, a model folder, or ORG/NAME of a hub"
        )
        raise UserError("no such file or folder", key="ckpt", value=asked, fix=fix)
    return None


def _shipped(name: str) -> Path:
    folder = assets_dir() / name
    if not (folder / CARD).is_file():
        others = ", ".join(shipped_encoders())
        problem = f"this installation ships no encoder {name}" + (f", but {others}" if others else "")
        fix = "reinstall the package, or give a model folder"
        raise UserError(problem, file=folder, key="ckpt", value=name, fix=fix)
    return folder


def _checked(file: Path) -> Path:
    if file.suffix not in (".gguf", ".ckpt"):
        fix = "a .ckpt, a .gguf, or a folder"
        raise UserError("is no checkpoint", file=file, key="ckpt", value=str(file), fix=fix)
    return file


def _inside(path: Path, name: str, asked: str) -> Place:
    """Of a folder, itself or what a run left in it."""
    if any((path / mark).is_file() for mark in _OWN):
        return Place(path, name, asked)
    for inner in (path / "export", path / "best"):
        if (inner / CARD).is_file():
            return Place(inner, name, asked, within=path)
        if inner.is_dir():
            problem = (
                f"its {inner.name}/ holds no {CARD}: half a copy, or a run that was killed while it saved"
            )
            fix = f"the whole folder; or ckpt={inner.parent / 'last.ckpt'}, which holds other weights"
            raise UserError(problem, file=path, key="ckpt", value=name, fix=fix)
    if checkpoint := next(iter(sorted(path.glob("*.ckpt"))), None):
        return Place(checkpoint, str(checkpoint), asked, within=path)
    problem = "holds no encoder: no embedlab.json, export/, best/, modules.json, config.json or .ckpt"
    raise UserError(problem, file=path, key="ckpt", value=name, fix="the folder of a run or of a model")


def _on_hub(asked: str, revision: str | None, code: bool) -> Place:
    repository, pinned = split_revision(asked)
    if pinned and revision:
        raise UserError("is given twice", key="revision", value=revision, fix=f"ckpt={repository}@{revision}")
    try:
        folder = snapshot(repository, revision or pinned, code=code)
    except UserError as error:
        name = repository.rstrip("/")  # as a shell completes the name of a folder
        shipped = "" if "/" in name else f"{' or '.join(shipped_encoders())}, which are in the box; or "
        meant = _meant(name)
        error.fix = f"{meant} Or {error.fix}" if meant else f"{shipped}{error.fix}"
        raise
    return _inside(folder, repository, asked)._replace(hub=f"{repository}@{folder.name}")


def _meant(name: str) -> str:
    return like(Path(name).expanduser(), also=shipped_encoders() if "/" not in name else ())
