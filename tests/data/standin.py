"""A tokenisation of words, quick to import: for tests of what surrounds tokenising, worker processes included."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class WordTokenization:
    """[2] words [3]; a word is its checksum. `seconds` is what a call takes, `poison` a word that it fails on."""

    max_length: int = 12
    vocabulary: int = 60_000
    seconds: float = 0.0
    poison: str = ""
    pad_id: int = 0
    preparation: str = "raw"
    special: dict[str, int | None] = field(default_factory=lambda: {"cls": 2, "sep": 3, "eos": None})

    @property
    def tokenizer(self) -> Any:
        ids = {f"{name}_token_id": value for name, value in self.special.items()}
        return SimpleNamespace(get_vocab=lambda: {"a": 0, "z": self.vocabulary - 1}, **ids)

    @property
    def fingerprint(self) -> str:
        return f"words {self.max_length} {self.vocabulary}"

    def ids_and_cut(self, texts: list[str]) -> tuple[list[list[int]], list[bool]]:
        time.sleep(self.seconds)
        if any(self.poison and self.poison in text for text in texts):
            raise ValueError(f"cannot read {self.poison}")
        words = [[4 + zlib.crc32(w.encode()) % (self.vocabulary - 4) for w in text.split()] for text in texts]
        room = self.max_length - 2
        return [[2, *row[:room], 3] for row in words], [len(row) > room for row in words]
