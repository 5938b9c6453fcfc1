"""Finished parts of a long evaluation, kept in a file until the whole is done, so that a stopped one goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embedlab.evaluation.core import protocol


class Kept:
    """`Kept(path, encoder, mode=...)`: what finished parts gave, by name, on disk after every `put`.

    A part is found again only for the same encoder (weights, pooling, template, dtype, attention, device), the
    same settings (the keywords), the same versions of all that computes, and the same `data`. Nothing is kept
    where `path` is None, or for an encoder that cannot say what it is. A file that cannot be read counts as
    none.
    """

    def __init__(self, path: str | Path | None, encoder: object, **settings: Any) -> None:
        facts = protocol.encoder_facts(encoder)
        known = facts["checkpoint"] != protocol.UNKNOWN
        self._path = Path(path) if path is not None and known else None
        self._identity = {**facts, **settings, "versions": protocol.versions()}
        self._parts: dict[str, Any] = {}
        if self._path is not None:
            try:
                self._parts = dict(json.loads(self._path.read_text(encoding="utf-8"))["parts"])
            except (OSError, ValueError, KeyError, TypeError):
                self._parts = {}

    def get(self, name: str, data: Any) -> dict[str, Any] | None:
        """What `put` was given for `name`; None where there is none, or it was made otherwise."""
        part = self._parts.get(name)
        if not isinstance(part, Mapping) or part.get("key") != self._key(data):
            return None
        return dict(part["result"])

    def put(self, name: str, data: Any, result: Mapping[str, Any]) -> None:
        """Keep the `result` of one part; `data` is what it was computed from, as plain values."""
        self._parts[name] = {"key": self._key(data), "result": dict(result)}
        if self._path is not None:
            protocol.write_json(self._path, {"parts": self._parts})

    def _key(self, data: Any) -> str:
        text = json.dumps([self._identity, data], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()
