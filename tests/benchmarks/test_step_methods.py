"""The table of methods' steps on tiny shapes, and what happens to a case that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import step_kinds, step_methods


def test_both_arms_of_each_case_and_a_failing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    wrong = step_methods.Case(("method=simcse", "pooling=none such"), 8)
    monkeypatch.setitem(step_methods.CASES, "wrong", wrong)
    out = tmp_path / "out.json"
    names = "wrong,jtcse n=3,bepa"
    assert step_methods.main(["--tiny", "--steps", "1", "--only", names, "--json", str(out)]) == 1
    found = json.loads(out.read_text())["methods"]
    assert list(found) == ["jtcse n=3", "bepa"]
    for arms in found.values():
        assert [arms[arm]["tier"] for arm in ("false", "auto")] == ["padded", "packed"]
        assert arms["false"]["tokens"] == arms["auto"]["tokens"] > 0
        assert all(arms[arm]["seconds"] > 0 < arms[arm]["flops"] for arm in ("false", "auto"))
    # Eight sentences of 29 tokens and five shares of six layers again, through two views and two towers.
    assert found["jtcse n=3"]["auto"]["tokens"] / (8 * 4 * (1 + 5 / 6)) == pytest.approx(29, rel=0.2)
    assert capsys.readouterr().out.count("failed: ") == 2


def test_kinds_of_step_are_compared_with_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(step_kinds.KINDS, "again", ("step=eager", ""))
    out = tmp_path / "out.json"
    line = [
        "--kinds",
        "eager,again,graph",
        "--still",
        "3",
        "--moving",
        "2",
        "--batch",
        "4",
        "--json",
        str(out),
    ]
    assert step_kinds.main([*line, "trainer=cpu"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == ["cls still eager", "cls still again", "cls moving eager", "cls moving again"]
    assert all(row["loss_mean"] == 0 < row["loss"] for row in rows.values())
    assert capsys.readouterr().out.count("failed: UserError") == 2
