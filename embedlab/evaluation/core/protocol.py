"""The protocol block: what one needs to know to compare a score with another; and the JSON file that holds
both."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from embedlab.config.read import read_record
from embedlab.errors import UserError
from embedlab.files import write_whole

UNKNOWN = "unknown"
FACTS: dict[str, Any] = {
    "pooling": UNKNOWN,
    "template": None,
    "preparation": None,
    "max_length": None,
    "truncated": None,
    "dtype": UNKNOWN,
    "attention": UNKNOWN,
    "checkpoint": UNKNOWN,
    "seed": None,
    "device": UNKNOWN,
}
"""What an encoder may state, and what stands for it where it does not."""

STATED = ("hub", "backbone_commit", "usage")
"""What stands in a block only where an encoder states it: the commit on a hub, prompts and the width that is kept."""

REQUIRED = (*FACTS, "suite", "name", "aggregation", "text", "versions", "date", "data", "warnings", "notes")
"""Keys of a protocol block."""

KINDS = {"suite": str, "checkpoint": str, "warnings": list}
"""What the values are by which one score is told from another."""

MAY_BE_NULL = frozenset({"text", *(key for key, value in FACTS.items() if value is None)})
"""Keys whose null means something: no template, the model's own length, no seed known, no text variants."""
_PACKAGES = ("embedlab", "torch", "transformers", "tokenizers", "numpy", "scipy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a score."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = UNKNOWN
    return found


def encoder_facts(encoder: object, sentences: Sequence[str] | None = None) -> dict[str, Any]:
    """pooling, template, preparation, max_length, truncated (how many of `sentences` are cut), dtype,
    attention, checkpoint, seed (of training) and device of an encoder; and of `STATED` what it states.

    Read from what an encoder states in a method `provenance(sentences)` (by its former name: `facts`). What nobody
    states is "unknown", never guessed.
    """
    facts = dict(FACTS)
    state = getattr(encoder, "provenance", None) or getattr(encoder, "facts", None)
    if callable(state):
        facts |= {key: value for key, value in state(sentences).items() if key in (*facts, *STATED)}
    return facts


def describe(
    encoder: object,
    *,
    suite: str,
    name: str,
    aggregation: str,
    text: str | None = None,
    sentences: Sequence[str] | None = None,
    data: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
    seed: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The protocol block of one suite run on `encoder`.

    name: the published protocol that this is (sts7_senteval_tok, ...); aggregation: how single numbers become the
    headline; sentences: what was encoded, to count the truncated ones; seed: the scorer's own (classifier,
    bootstrap), stored as `scoring_seed`: `seed` is that of the training run, from the checkpoint's card.
    """
    block: dict[str, Any] = {
        "suite": suite,
        "name": name,
        "aggregation": aggregation,
        **encoder_facts(encoder, sentences),
        "text": text,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": dict(data or {}),
        "warnings": list(warnings),
        "notes": list(notes),
        **more,
    }
    if seed is not None:
        block["scoring_seed"] = seed
    check(block)
    return block


def check(block: Mapping[str, Any]) -> None:
    """Raises ValueError when a protocol block lacks a key of `REQUIRED`, or holds null where it must not or another
    kind of value than `KINDS` says."""
    empty = [key for key in REQUIRED if block.get(key) is None and not (key in block and key in MAY_BE_NULL)]
    if empty:
        raise ValueError(f"incomplete protocol block: {', '.join(empty)} missing or null")
    for key, kind in KINDS.items():
        if not isinstance(block[key], kind):
            raise ValueError(f"odd protocol block: {key} is {block[key]!r}")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` to `path` in one piece: a reader sees the old file or the new one. NaN becomes null.

    Raises:
        UserError: it cannot be written.
    """
    text = json.dumps(_plain(content), indent=2, ensure_ascii=False, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", file=path, fix="write elsewhere") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def plain_hash(value: Any) -> str:
    """Hex hash of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class ScoreFile:
    """What `write_scores` writes; null stands for a score that is no number."""

    scores: dict[str, float | None]
    protocol: dict[str, Any]


def write_scores(path: Path, scores: Mapping[str, float], block: Mapping[str, Any]) -> None:
    """Writes {scores, protocol, created} atomically; ValueError when the protocol block is not complete."""
    check(block)
    write_json(path, {"scores": dict(scores), "protocol": dict(block), "created": block["date"]})


def read_scores(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Scores and protocol of a file that `write_scores` wrote (null reads as NaN).

    Raises UserError when it is no such file or its protocol block is not complete.
    """
    fix = "write it with embedlab evaluate"
    found = read_record(path, ScoreFile, fix)
    try:
        check(found.protocol)
    except ValueError as error:
        raise UserError(f"is not a scores file ({error})", file=path, fix=fix) from error
    return {key: math.nan if v is None else float(v) for key, v in found.scores.items()}, found.protocol


@dataclass(frozen=True)
class _Parts:
    parts: dict[str, dict[str, Any]]


class ResultCache:
    """Finished parts of a long evaluation, on disk until the whole is done, so that a stopped one goes on.

    `ResultCache(path, encoder, mode=...)`: what finished parts gave, by name, on disk after every `put`.

    A part is found again only for the same encoder (weights, pooling, template, dtype, attention, device), the
    same settings (the keywords), the same versions of all that computes, and the same `data`. Nothing is kept
    where `path` is None, or for an encoder that cannot say what it is. A file that cannot be read counts as
    none.
    """

    def __init__(self, path: str | Path | None, encoder: object, **settings: Any) -> None:
        facts = encoder_facts(encoder)
        known = facts["checkpoint"] != UNKNOWN
        self._path = Path(path) if path is not None and known else None
        self._identity = {**facts, **settings, "versions": versions()}
        self._parts: dict[str, Any] = {}
        if self._path is not None:
            try:
                self._parts = dict(read_record(self._path, _Parts).parts)
            except UserError:
                self._parts = {}

    def get(self, name: str, data: Any) -> dict[str, Any] | None:
        """What `put` was given for `name`; None where there is none, or it was made otherwise."""
        part = self._parts.get(name)
        if part is None or part.get("key") != self._key(data) or not isinstance(part.get("result"), dict):
            return None
        return dict(part["result"])

    def put(self, name: str, data: Any, result: Mapping[str, Any]) -> None:
        """Keep the `result` of one part; `data` is what it was computed from, as plain values."""
        self._parts[name] = {"key": self._key(data), "result": dict(result)}
        if self._path is not None:
            write_json(self._path, {"parts": self._parts})

    def _key(self, data: Any) -> str:
        return plain_hash([self._identity, data])
