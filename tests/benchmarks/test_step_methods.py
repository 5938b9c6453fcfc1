"""The table of methods' steps on tiny shapes, and what happens to a case that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import step_kinds, step_methods
from benchmarks.fit import Older


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


def test_an_older_checkout_is_measured_by_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one, as if it were older."""
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    here, out = Path(__file__).parents[2], tmp_path / "out.json"
    line = ["--tiny", "--steps", "1", "--only", "simcse", "--arms", "auto,before", "--json", str(out)]
    assert step_methods.main([*line, "--before", str(here)]) == 0
    arms = json.loads(out.read_text())["methods"]["simcse"]
    assert arms["before"]["seconds"] > 0 < arms["before"]["tokens"] == arms["auto"]["tokens"]


def test_an_older_checkout_says_what_it_cannot_do() -> None:
    older = Older(Path(__file__).parents[2])
    for key in ("pooling=none such", "method=simsce"):  # it goes on after the first
        with pytest.raises(RuntimeError, match=r"^UserError: "):
            older.fit([key], 2)
    older.close()


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


def test_kinds_of_step_on_other_encoders_and_their_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out.json"
    line = "--tiny --cases roberta,promptbert --parts gradients,moving --kinds eager,graph --gradients 2 --moving 2"
    assert step_kinds.main([*line.split(), "--batch", "4", "--json", str(out), "trainer=cpu"]) == 0
    rows = json.loads(out.read_text())["rows"]
    parts = [f"{part} {kind}" for part in ("gradients", "moving") for kind in ("eager", "graph")]
    assert list(rows) == [f"{case} {part}" for case in ("roberta", "promptbert") for part in parts]
    for case in ("roberta", "promptbert"):
        assert 0 < rows[f"{case} gradients eager"]["whole"] < 1e-3  # fp32 against fp64
        assert len(rows[f"{case} gradients eager"]["whole_each"]) == 2
        assert len(rows[f"{case} moving graph"]["losses"]) == 2


def test_errors_of_gradients_are_of_all_parameters_and_of_the_worst_that_counts() -> None:
    exact = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0]), "key bias": torch.tensor([1e-9])}
    other = exact | {"a": torch.tensor([3.0, 9.0]), "key bias": torch.tensor([1e-6])}
    found = step_kinds.errors([other], [exact])
    assert found["whole"] == pytest.approx(5 / 26**0.5)
    assert (found["worst"], found["worst_parameter"]) == (1.0, "a")
