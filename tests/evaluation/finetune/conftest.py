"""A tiny random encoder whose classifications can be learned in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import embedlab
from embedlab.encoders.encoder import SentenceEncoder


@pytest.fixture(scope="session")
def encoder(tiny: Callable[..., Path]) -> SentenceEncoder:
    return embedlab.load(str(tiny("bert")))
