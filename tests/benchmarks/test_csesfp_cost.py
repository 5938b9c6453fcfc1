"""The cost comparison on a tiny decoder: five arms, and FLOPs where the prediction has them (T13)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.csesfp_cost import main
from tests.support import SENTENCES


def test_arms_and_ratios(
    tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny("llama", width=128, heads=4, ffn=512, max_positions=256)
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES), encoding="utf-8")
    run = ["trainer=cpu", "backbone=local", f"backbone.path={folder}", "adapter.r=4"]
    run += [f"data.files={tmp_path / 'text.txt'}", "data.max_length=12", "data.pad_to_multiple=1"]
    assert main(["--batch", "4", "--steps", "2", "--out", str(tmp_path / "cost.json"), *run]) == 0
    assert "L2/(2 L1)" in capsys.readouterr().out
    rows = {r["arm"]: r for r in json.loads((tmp_path / "cost.json").read_text())["batch_4"]}
    assert list(rows) == ["A", "B", "C", "C2", "D", "floor"]
    assert [rows[a]["rows"] for a in rows] == [4, 8, 8, 8, 8, 4]
    assert rows["A"]["length"] == rows["B"]["length"] > rows["C"]["length"] >= rows["D"]["length"]
    for arm in ("B", "C", "C2", "D"):
        assert rows[arm]["predicted"] == rows["A"]["length"] / (2 * rows[arm]["length"])
        # Attention is quadratic in the length; at this width it is a few per cent of the whole.
        assert rows[arm]["ratio_flops"] == pytest.approx(rows[arm]["predicted"], rel=0.04)
        assert rows[arm]["ratio_saved"] == pytest.approx(rows[arm]["predicted"], rel=0.04)
    assert rows["B"]["ratio_flops"] == pytest.approx(0.5, rel=0.01)
    assert rows["floor"]["flops"] < rows["A"]["flops"] / 2
    assert all(r["seconds_median"] > 0 for r in rows.values())
