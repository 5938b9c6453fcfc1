"""A tiny tokenizer, and a cache folder of each test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedlab.encoders.tokenization import Tokenization
from tests.support import SENTENCES, tiny_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tokenization() -> Tokenization:
    return Tokenization(tiny_tokenizer("bert"), None, 24)


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    """A text file of 16 sentences."""
    path = tmp_path / "sentences.txt"
    path.write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
    return path
