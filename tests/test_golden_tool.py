"""`tools/golden.py`: a commit equals itself, and a small difference between two is seen."""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "golden.py"))
LOSSES = st.lists(st.floats(-9, 9), min_size=5, max_size=5)


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(*arguments: str) -> tuple[int, dict[str, str]]:
        monkeypatch.setattr(sys, "argv", ["golden.py", *arguments])
        status = TOOL["main"]()
        rows = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:]]
        return status, {row[:36].rstrip(): told for row, told in rows}

    return run


@pytest.fixture
def altered(tmp_path: Path) -> Path:
    """A checkout whose temperature differs in its seventh digit, with a pooling that this one has not."""
    no_weights = shutil.ignore_patterns("assets", "__pycache__")
    for name in ("embedlab", "conf"):
        shutil.copytree(ROOT / name, tmp_path / "altered" / name, ignore=no_weights)
    simcse = tmp_path / "altered" / "conf" / "method" / "simcse.yaml"
    text = simcse.read_text()
    assert "tau: 0.05\n" in text
    simcse.write_text(text.replace("tau: 0.05\n", "tau: 0.05000001\n"))
    shutil.copy(simcse.parents[1] / "pooling" / "mean.yaml", simcse.parents[1] / "pooling" / "average.yaml")
    return tmp_path / "altered"


@pytest.mark.timeout(900)
def test_a_commit_equals_itself(compare: Callable[..., Any]) -> None:
    parts = "--only=losses,old_runs,exports,vectors"
    status, told = compare(str(ROOT), str(ROOT), parts, "--names=promptbert,mean")
    assert status == 0
    assert list(told) == [
        "losses promptbert eager",
        "old_runs promptbert vectors",
        "old_runs promptbert goes on",
        "exports promptbert",
        "vectors mean",
    ]
    assert set(told.values()) == {"equal"}


@pytest.mark.timeout(900)
def test_a_planted_difference_is_seen(compare: Callable[..., Any], altered: Path) -> None:
    status, told = compare(
        str(ROOT), str(altered), "--only=vectors,exports", "--names=masked_lm,mean,average,mask"
    )
    assert status == 1
    assert told.pop("vectors average") == "one"
    assert 0 < float(told.pop("vectors mean")) < 1e-3
    assert told == {"vectors mask": "equal", "exports masked_lm": "equal"}


@given(LOSSES, LOSSES)
def test_only_equal_numbers_are_equal(old: list[float], new: list[float]) -> None:
    told = TOOL["difference"](old, new)
    assert (told == "equal") == (old == new)
    assert TOOL["difference"](old, old) == "equal"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (None, [1.0], "only one"),
        (None, "failed: no such key", "failed"),
        ("failed: no such key", "failed: no such key", "differs"),
        ([1.0, 2.0], [1.0], "differs"),
        ("6abc", "6abd", "differs"),
        ([[1.0, 2.0]], [[1.0, 2.5]], "0.5"),
    ],
)
def test_what_is_told_of_two_values(old: Any, new: Any, told: str) -> None:
    assert TOOL["difference"](old, new) == told
