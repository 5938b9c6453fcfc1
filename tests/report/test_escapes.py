"""What a report prints and writes is data: no file's text becomes mark-up, a formula or a terminal's command."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlab.cli.report import main
from embedlab.console import markdown_text
from embedlab.evaluation.core.table import Table
from embedlab.report.report import csv_cell
from tests.report.test_report import write_run

BAD = (
    "\x1b]0;owned\x07", "<script>alert(1)</script>", "a | b", "![x](http://evil/x.png)", "[x](javascript:alert(1))",
    "`code`", "\\input{/etc/passwd}", "\\immediate\\write18{id}", "x\n\\input{y}", "x\n\n# title", "=cmd()", "+1",
    "-1+2", "@SUM(1)", "\u202egnp", "$\\alpha$ ${x}$", "% comment", "'><img src=x onerror=alert(1)>", "[b]x[/b]", "[/]",
)  # fmt: skip
ANY = st.text(st.characters(exclude_categories=("Cs",)), max_size=30) | st.sampled_from(BAD)


@given(ANY, ANY, ANY, ANY)
def test_every_form_of_a_table(title: str, column: str, cell: str, note: str) -> None:
    table = Table(title, (column, "n"), ((cell, "1"), (cell, "2")), note)
    for text in (table.markdown(), table.latex()):
        assert all(c == "\n" or ord(c) >= 32 for c in text)
        assert not re.search("[\u202a-\u202e\u2066-\u2069\x7f-\x9f]", text)
    lines = table.markdown().split("\n")
    rows = [line for line in lines if line.startswith("| ")]
    assert [len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows] == [3] * 4
    assert not re.search(r"(?<!\\)(?:\\\\)*[<`]", table.markdown())
    commands = set(re.findall(r"\\[a-zA-Z]+", table.latex()))
    own = {
        "begin",
        "end",
        "hline",
        "textbackslash",
        "textasciitilde",
        "textasciicircum",
        "pm",
        "Delta",
        "dots",
    }
    assert commands <= {f"\\{name}" for name in own}


@given(ANY)
def test_text_of_markdown_opens_nothing(text: str) -> None:
    shown = markdown_text(text)
    assert "](" not in shown
    assert not re.search(r"(?<!\\)(?:\\\\)*[|<`]", shown)


@pytest.mark.parametrize("value", [-1.5, 3, "-1", "=1", "+1", "@x", "\t=1", "plain", float("nan"), ["=1"]])
def test_a_cell_is_a_number_or_a_text_that_is_no_formula(value: object) -> None:
    cell = csv_cell(value)
    assert isinstance(cell, int | float) == (isinstance(value, int | float) and value == value)
    if isinstance(cell, str):
        assert cell[:1] not in ("=", "+", "-", "@", "\t", "\r")


def test_a_hostile_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, bad in enumerate(BAD):
        folder = tmp_path / str(i)
        write_run(folder, 0, 70.0 + i, [f"{bad}={bad}"])
        content = json.loads((folder / "scores.json").read_text())
        content["training"]["device"] = bad
        content["config"] |= {bad: bad}
        content["scores"] |= {bad: 1.0}
        content["protocol"] = {"geometry": {"cosines_by_rating": {bad: "0.1 0.2 0.3", "x": "0.5 0.7 0.6"}}}
        (folder / "scores.json").write_text(json.dumps(content))
        (tmp_path / f"dead{i}").mkdir()
        (tmp_path / f"dead{i}" / "trial.yaml").write_text("seed: 1\n")
        (tmp_path / f"dead{i}" / "trial.json").write_text(json.dumps({"status": bad, "overrides": [bad]}))
    assert main([str(tmp_path), "--title", BAD[0], "--metrics", BAD[1]]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    assert "\n\\input" not in (tmp_path / "report.tex").read_text()
    with (tmp_path / "report.csv").open(newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [c for c in cells if c[:1] in ("=", "+", "@") or (c[:1] == "-" and not _is_number(c))]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
