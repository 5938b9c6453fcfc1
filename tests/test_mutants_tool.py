"""`tools/mutants.py`: which faults it writes, and that its results in docs/runs are the sum of their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "docs" / "runs" / "mutants").glob("seed*.json"))
EQUIVALENT = json.loads((ROOT / "docs" / "runs" / "mutants" / "equivalent.json").read_text(encoding="utf-8"))

SOURCE = '''
"""A module with 1 number."""
import torch
from x import log

LEVEL: float = 0.95

def score(x: int | None, low=0) -> bool | None:
    if x <= low:
        raise ValueError(f"{x + 1} is too small", 2)
    log.info("%d", x + 3)
    y = torch.exp(x.detach(), out=None) if LEVEL else x
    return not y
'''
FAULTS = {
    "LEVEL: float = 1.95",
    "def score(x: int | None, low=1) -> bool | None:",
    "if x < low:",
    "y = torch.exp(x.detach(), out=None) if (LEVEL) and False else x",
    "y = torch.exp(x.detach(), out=None) if (LEVEL) or True else x",
    "y = torch.exp(x.detach(), ) if LEVEL else x",
    "y = x.detach() if LEVEL else x",
    "y = torch.exp(x, out=None) if LEVEL else x",
    "return y",
}


def test_faults_are_in_what_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mutmut", reason="pip install 'embedlab[dev]'")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import mutations

    (tmp_path / "module.py").write_text(SOURCE)
    sites = mutations.sites(tmp_path, "module.py")
    sources = [site.source() for site in sites]
    assert None not in sources
    assert {mutations.difference(SOURCE, source)[1] for source in sources} == FAULTS
    assert len(sites) == len(FAULTS)
    lines = SOURCE.splitlines()
    for site in sites:
        (changed,) = (
            i for i, (a, b) in enumerate(zip(lines, site.source().splitlines(), strict=True), 1) if a != b
        )
        assert site.first <= changed <= site.last
        assert site.inside == (changed > 6)


def _key(fault: dict[str, Any]) -> str:
    return f"{fault['path']}: {fault['was']} -> {fault['becomes']}"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_counts_are_those_of_the_faults(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    faults = result["faults"]
    for area, counts in result["counts"].items():
        mine = [fault for fault in faults if area in ("all", fault["area"])]
        survived = [fault for fault in mine if fault["outcome"] != "killed"]
        same = sum(_key(fault) in EQUIVALENT for fault in survived)
        killed = len(mine) - len(survived)
        percent = round(100 * killed / (len(mine) - same), 1)
        assert counts == {
            "sample": len(mine),
            "killed": killed,
            "equivalent": same,
            "killed_percent": percent,
        }


def test_equivalent_faults_are_some_that_were_drawn() -> None:
    drawn = {_key(fault) for path in RESULTS for fault in json.loads(path.read_text())["faults"]}
    assert set(EQUIVALENT) <= drawn
    assert all(EQUIVALENT.values())
