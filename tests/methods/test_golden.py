"""Five losses of every method, as the code of 3e130d8 had them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embedlab.parts import part_names
from tests.methods.golden import GOLDEN, expected, golden_losses

WITHOUT_A_LOSS = {"ensemble"}
METHODS = sorted(json.loads(GOLDEN.read_text(encoding="utf-8"))["losses"])


@pytest.mark.parametrize("method", METHODS)
def test_losses_are_those_of_before(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    assert golden_losses(method, tmp_path) == pytest.approx(expected(method), rel=1e-5)


def test_every_method_has_golden_losses() -> None:
    assert set(part_names("methods")) - WITHOUT_A_LOSS <= set(METHODS)
