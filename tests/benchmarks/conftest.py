"""What the benchmarks of training steps run on in the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_run import sentences


@pytest.fixture
def tiny_run(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[list[str], Path]]:
    """``tiny_run("dev_scoring")``: arguments for a tiny run of that script, and the JSON that it writes."""

    def make(script: str) -> tuple[list[str], Path]:
        folder, text, out = (
            tiny("bert", width=32, heads=2, ffn=64),
            tmp_path / "text.txt",
            tmp_path / "out.json",
        )
        monkeypatch.setattr(f"benchmarks.{script}.architecture", lambda *_: folder)
        text.write_text("\n".join(sentences(80)), encoding="utf-8")
        return ["--backbone", str(folder), "--sentences", str(text), "--json", str(out)], out

    return make
