"""A model's name on a hub to the folder of its files, in the cache that Hugging Face's own libraries share."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from embedlab.config.read import read_record
from embedlab.console import quiet
from embedlab.errors import UserError, one_line

log = logging.getLogger(__name__)

_TIMEOUT = 10  # seconds for the first answer
_given_up: dict[tuple[str, str, bool], Path] = {}
"""Cached folders that were taken because the hub did not answer: it is not waited for twice."""
TEXT = {".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab", ".bpe", ".spm"}
"""Files that configure a model and its tokenizer."""
_OTHER_WEIGHTS = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"}
_OTHER_FORMATS = {"onnx", "openvino", "original", "coreml", "tflite"}


def split_revision(name: str) -> tuple[str, str | None]:
    """``ORG/NAME@REVISION`` to its two parts; the revision is None where none is given."""
    name, _, revision = name.partition("@")
    return name, revision or None


def snapshot(
    name: str,
    revision: str | None = None,
    *,
    key: str = "ckpt",
    weights: bool = True,
    code: bool = False,
) -> Path:
    """The folder of a model's files, downloaded where the cache lacks them; its name is the commit.

    ``HF_ENDPOINT``, ``HF_HOME``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` are obeyed. Where the hub does not answer,
    what is cached is taken, with a warning.

    Args:
        name: ``ORG/NAME``.
        revision: a branch, tag or commit; None: ``main``.
        key: of the configuration, for messages.
        weights: or only what configures the model and its tokenizer.
        code: also the model's own Python files.

    Raises:
        UserError: an unknown name or revision, no access, no network, or a part of the files only.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils._validators import validate_repo_id

    asked = name if revision is None else f"{name}@{revision}"
    memory = (constants.ENDPOINT, asked, weights)
    if memory in _given_up:
        return _given_up[memory]
    try:
        with quiet_hub():
            validate_repo_id(name)
            if constants.HF_HUB_OFFLINE:
                raise ConnectionError("HF_HUB_OFFLINE is set")
            where = constants.ENDPOINT
            info = HfApi(endpoint=where).model_info(name, revision=revision, timeout=_TIMEOUT)
            there = [s.rfilename for s in info.siblings or ()]
            files = _wanted(there, weights, code)
            if weights and files == _wanted(there, False, code):
                others = sorted({PurePosixPath(f).suffix for f in there} & _OTHER_WEIGHTS)
                told = f"holds no weights{' but ' + ', '.join(others) if others else ''}"
                raise UserError(
                    told, key=key, value=asked, fix="a model with .safetensors, or pytorch_model.bin"
                )
            return Path(snapshot_download(name, revision=revision, allow_patterns=files, endpoint=where))
    except Exception as error:
        if not _unreachable(error):
            _refuse(name, asked, key, error)
        folder = _given_up[memory] = _cached(name, revision, asked, key, weights, error)
        return folder


def push(folder: Path, name: str, revision: str | None = None) -> str:
    """Upload a folder to a hub, as the user who is logged in there; a new repository is private.

    Args:
        folder: with all files.
        name: ``ORG/NAME``.
        revision: a branch, made if it is not there; None: ``main``.

    Returns:
        The commit.

    Raises:
        UserError: the hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        with quiet_hub():
            if constants.HF_HUB_OFFLINE:
                raise ConnectionError("HF_HUB_OFFLINE is set")
            name = api.create_repo(name, private=True, exist_ok=True).repo_id
            if revision is not None:
                api.create_branch(name, branch=revision, exist_ok=True)
            return str(api.upload_folder(repo_id=name, folder_path=folder, revision=revision).oid)
    except Exception as error:
        text = one_line(str(error))[:200] or type(error).__name__
        code = getattr(getattr(error, "response", None), "status_code", None)
        if _unreachable(error):
            problem, fix = (
                f"{constants.ENDPOINT} cannot be reached: {text}",
                "check the network, or HF_HUB_OFFLINE",
            )
        elif code in (401, 403):
            problem, fix = "the hub does not let you write there", "hf auth login with a token that may write"
        else:
            problem, fix = f"the hub did not take it: {text}", "ORG/NAME that you may write to"
        raise UserError(problem, key="push", value=name, fix=f"{fix}; {folder} is written") from error


def _wanted(files: Sequence[str], weights: bool, code: bool) -> list[str]:
    """The files that a model is read from: `.bin` weights only beside no safetensors."""
    wanted = []
    safe = {str(PurePosixPath(f).parent) for f in files if f.endswith(".safetensors")}
    for file in files:
        path = PurePosixPath(file)
        if _OTHER_FORMATS & set(path.parts[:-1]):
            continue
        is_weight = path.suffix == ".safetensors" or (
            path.suffix == ".bin"
            and path.name.startswith(("pytorch_model", "adapter_model"))
            and str(path.parent) not in safe
        )
        if path.suffix in TEXT or (weights and is_weight) or (code and path.suffix == ".py"):
            wanted.append(file)
    return wanted


def _unreachable(error: Exception) -> bool:
    """Whether the hub gave no answer, or none of its own making; a refusal is an answer."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):
        return True
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code if error.response is not None else 0
        return status >= 500 or status in (408, 429)  # too slow, too many requests
    module = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | TimeoutError) or module.startswith(
        ("httpx", "httpcore", "requests")
    )


def _cached(name: str, revision: str | None, asked: str, key: str, weights: bool, error: Exception) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    offline = bool(constants.HF_HUB_OFFLINE)
    reason = "HF_HUB_OFFLINE is set" if offline else f"{constants.ENDPOINT} does not answer"
    fix = "unset HF_HUB_OFFLINE once" if offline else "check the network, or HF_ENDPOINT"
    # `snapshot_download` would also miss the files that nothing here reads.
    repository = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
    ref = repository / "refs" / (revision or "main")
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    folder = repository / "snapshots" / str(commit)
    folder_fix = (
        "or give a folder" if key == "ckpt" else "or backbone=local backbone.path=DIR; or backbone=mini"
    )
    if commit is None or not folder.is_dir():
        raise UserError(
            f"no such file or folder, and as a name on a hub neither in the cache nor reachable: {reason}",
            key=key, value=asked, fix=f"{fix}; {folder_fix}",
        ) from error  # fmt: skip
    if lacking := _lacking(folder, weights):
        raise UserError(
            f"only a part of it is in the hub's cache ({lacking} is missing), and {reason}",
            key=key, value=asked, fix=fix,
        ) from error  # fmt: skip
    if not offline:
        log.warning("%s: taking the cached commit %s of %s.", reason, folder.name[:12], asked)
    return folder


@dataclass(frozen=True)
class _Index:
    """Which file holds each weight."""

    weight_map: dict[str, str]


def _lacking(folder: Path, weights: bool) -> str | None:
    """The first file that a cached snapshot says of itself to have and has not."""
    configurations = [p for p in folder.glob("**/config.json") if "Pooling" not in p.parent.name]
    if not configurations and not (folder / "adapter_config.json").is_file():
        return "config.json"
    for index in folder.glob("**/*.index.json"):
        try:
            shards = sorted(set(read_record(index, _Index).weight_map.values()))
        except UserError:
            continue  # said by what reads the weights
        if weights and (missing := [s for s in shards if not (index.parent / s).is_file()]):
            return str((index.parent / missing[0]).relative_to(folder))
    holds_any = any(folder.glob("**/*.safetensors")) or any(folder.glob("**/*.bin"))
    if weights and not holds_any:
        return "model.safetensors"
    return None if any(folder.glob("**/tokenizer*")) or any(folder.glob("**/vocab*")) else "tokenizer.json"


def _refuse(name: str, asked: str, key: str, error: Exception) -> NoReturn:
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{name}"
    token = get_token() is not None
    login = "hf auth login, or set HF_TOKEN"
    if isinstance(error, UserError):
        raise error
    if isinstance(error, HFValidationError):
        problem, fix = "no such file or folder, and no name on a hub", "mini, a folder, or ORG/NAME"
    elif isinstance(error, GatedRepoError) and token:
        problem, fix = (
            "is gated, and your token has no access",
            f"ask for access at {page}, or use another token",
        )
    elif isinstance(error, GatedRepoError):
        problem, fix = "is gated: access has to be asked for", f"ask for it at {page}, then {login}"
    elif isinstance(error, RevisionNotFoundError):
        problem, fix = "no such revision", f"a branch, tag or commit of {page}"
    elif isinstance(error, RepositoryNotFoundError) and token:
        problem = f"no such file or folder, and no model of this name on {constants.ENDPOINT} that your token may see"
        fix = "check the name; for a private model, a token with access"
    elif isinstance(error, RepositoryNotFoundError):
        problem = f"no such file or folder, and no public model of this name on {constants.ENDPOINT}"
        fix = f"check the name; for a private model {login}"
    elif (
        isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code == 401
    ):
        problem, fix = "the hub refuses your token", "hf auth login with a valid one, or unset HF_TOKEN"
    else:
        text = one_line(str(error)) or type(error).__name__
        problem, fix = f"cannot be had from {constants.ENDPOINT}: {text[:200]}", "try again, or give a folder"
    raise UserError(problem, key=key, value=asked, fix=fix) from error


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Without the log lines of the hub's client and of what it talks HTTP with; bars stay on a terminal."""
    import sys

    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    names = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock")
    silence = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        with quiet(*names, level=logging.CRITICAL):
            yield
    finally:
        if silence:
            enable_progress_bars()
