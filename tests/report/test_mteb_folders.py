"""Folders of mteb's results compared: what counts, what is left out, and when a difference is resolved."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wilcoxon

from embedlab.cli.main import main
from embedlab.errors import UserError
from embedlab.report import mteb_folders
from embedlab.report.mteb_folders import compare, paired

STS = ["STS12", "STS13", "STS14", "STS15", "STS16", "STSBenchmark", "SICK-R", "BIOSSES"]


@pytest.fixture(autouse=True)
def types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mteb_folders, "task_type", lambda name: "STS" if name in STS else None)


def write(folder: Path, scores: Mapping[str, Any], revision: str = "r1", version: str = "2.1") -> Path:
    """scores: task -> main score, or split -> subset -> main score."""
    inner = folder / "model" / revision
    inner.mkdir(parents=True, exist_ok=True)
    for task, value in scores.items():
        splits = value if isinstance(value, dict) else {"test": {"default": value}}
        content = {
            "task_name": task, "dataset_revision": revision, "mteb_version": version,
            "scores": {s: [{"main_score": x, "hf_subset": n, "languages": []} for n, x in subsets.items()]
                       for s, subsets in splits.items()},
        }  # fmt: skip
        (inner / f"{task}.json").write_text(json.dumps(content))
    (inner / "model_meta.json").write_text("{}")
    return folder


def test_eight_tasks_all_better(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {task: 0.70 + i / 100 for i, task in enumerate(STS)})
    b = write(tmp_path / "b", {task: 0.72 + i / 90 for i, task in enumerate(STS)})
    found = compare(a, b)
    differences = np.array([100 * (0.02 + i / 90 - i / 100) for i in range(8)])
    row = found.all.paired
    assert row is not None
    assert (row.n, row.wins, row.ties, row.losses, row.verdict) == (8, 8, 0, 0, "better")
    assert row.mean == pytest.approx(differences.mean())
    assert row.p == pytest.approx(wilcoxon(differences).pvalue)
    assert differences.min() <= row.low < row.mean < row.high <= differences.max()
    assert compare(b, a).all.paired.verdict == "worse"  # type: ignore[union-attr]
    assert [one.name for one in found.types] == ["STS"]


def test_few_tasks_and_mixed_ones_are_not_resolved(tmp_path: Path) -> None:
    a = write(tmp_path / "a", dict.fromkeys(STS[:5], 0.5))
    b = write(tmp_path / "b", dict.fromkeys(STS[:5], 0.9))
    few = compare(a, b).all.paired
    assert few is not None
    assert (few.wins, few.verdict) == (5, "not resolved")
    assert math.isnan(few.p)
    c = write(tmp_path / "c", {task: 0.5 + (-1) ** i * 0.1 for i, task in enumerate(STS)})
    d = write(tmp_path / "d", dict.fromkeys(STS, 0.5))
    mixed = compare(d, c).all.paired
    assert mixed is not None
    assert (mixed.wins, mixed.losses, mixed.verdict) == (4, 4, "not resolved")


@pytest.mark.parametrize("other", ["a", "b/../a", "link"])
def test_a_folder_is_not_compared_with_itself(tmp_path: Path, other: str) -> None:
    a = write(tmp_path / "a", dict.fromkeys(STS, 0.5))
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to(a)
    with pytest.raises(UserError, match=r"is compared with itself"):
        compare(a, tmp_path / other)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-100, 100).map(float), min_size=1, max_size=30))
def test_a_comparison_turned_round(values: list[float]) -> None:
    one, other = paired(np.array(values)), paired(-np.array(values))
    assert (one.wins, one.ties, one.losses) == (other.losses, other.ties, other.wins)
    assert one.wins + one.ties + one.losses == len(values)
    assert one.mean == pytest.approx(-other.mean)
    turned = {"better": "worse", "worse": "better", "not resolved": "not resolved"}
    if not any(math.isnan(x) for x in (one.low, other.low)) and min(abs(one.low), abs(one.high)) > 2:
        assert one.verdict == turned[other.verdict]
    if len(values) < 6 or not any(values):
        assert one.verdict == "not resolved"


def test_what_is_not_compared_is_said(tmp_path: Path) -> None:
    subsets = {"test": {"en": 0.5, "de": 0.1}, "dev": {"en": 0.9}}
    a = write(tmp_path / "a", {"STS12": 0.5, "STS13": 0.5, "Multi": subsets, "OnlyA": 0.1})
    b = write(tmp_path / "b", {"STS12": 0.6, "Multi": {"test": {"en": 0.7}}}, version="2.2")
    write(tmp_path / "b", {"STS13": 0.6}, revision="r2")
    found = compare(a, b)
    assert [(row.name, row.kind) for row in found.tasks] == [("Multi", "unknown"), ("STS12", "STS")]
    assert (found.tasks[0].first, found.tasks[0].second) == (50, 70), "of test, en alone"
    assert found.left_out == [f"OnlyA: only in {a}", "STS13: of two data set revisions, r1 and r2"]
    assert "Multi: over the 1 splits and subsets that both have" in found.notes
    assert "STS12: scored by mteb 2.1 and 2.2" in found.notes


@pytest.mark.parametrize("n", [1, 5, 12])
def test_query_by_query(n: int, tmp_path: Path) -> None:
    queries, folders = [f"q{i}" for i in range(n)], {}
    (tmp_path / "qrels").mkdir()
    rows = "".join(f"{q}\tgood\t1\n{q}\tbad\t0\n" for q in queries)
    (tmp_path / "qrels" / "SciFact.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)
    for name, first in (("a", "bad"), ("b", "good")):
        folders[name] = write(tmp_path / name, {"SciFact": 0.5})
        ranking = {q: {first: 2.0, "good" if first == "bad" else "bad": 1.0} for q in queries}
        content = {"mteb_model_meta": {"model_name": "x", "revision": None}, "default": {"test": ranking}}
        (folders[name] / "SciFact_predictions.json").write_text(json.dumps(content))
    found = compare(folders["a"], folders["b"], tmp_path / "qrels")
    (row,) = found.tasks
    assert row.paired is not None
    assert (row.paired.n, row.paired.wins) == (n, n)
    assert row.paired.verdict == ("better" if n == 12 else "not resolved")
    assert "nan" not in found.markdown()
    assert row.paired.mean == pytest.approx(100 * (1 - 1 / math.log2(3)))
    assert compare(folders["a"], folders["b"]).tasks[0].paired is None


def test_the_command_writes_markdown_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write(tmp_path / n, dict.fromkeys(STS[:3], x)) for n, x in (("a", 0.5), ("b", 0.6)))
    assert main(["report", "--mteb", str(a), str(b), f"out={tmp_path / 'out'}"]) == 0
    assert (
        "| all tasks | 3 | 50.00 | 60.00 | +10.00 |  |  | 3/0/0 | not resolved |" in capsys.readouterr().out
    )
    content = json.loads((tmp_path / "out" / "mteb.json").read_text())
    assert content["all"]["paired"] == {
        "n": 3, "mean": pytest.approx(10), "low": None, "high": None, "p": None, "wins": 3, "ties": 0, "losses": 0,
        "verdict": "not resolved",
    }  # fmt: skip
    assert (tmp_path / "out" / "mteb.md").read_text().startswith("# MTEB results compared")


def test_folders_that_mteb_wrote(tmp_path: Path) -> None:
    results = pytest.importorskip("mteb.results")
    for name, score in (("a", 0.5), ("b", 0.6)):
        (tmp_path / name).mkdir()
        entry = {"main_score": score, "hf_subset": "default", "languages": ["eng-Latn"]}
        results.TaskResult(
            dataset_revision="r",
            task_name="STS12",
            mteb_version="2.1",
            scores={"test": [entry]},
            evaluation_time=1.0,
        ).to_disk(tmp_path / name / "STS12.json")
    assert compare(tmp_path / "a", tmp_path / "b").all.paired.mean == pytest.approx(10)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not JSON"),
        ('{"task_name": "X", "scores": []}', "is no result of mteb"),
        ('{"task_name": "X", "scores": {}}', r"is no result of mteb \(no scores\)"),
        (
            '{"task_name": "X", "scores": {"test": [{"main_score": NaN, "hf_subset": "d"}]}}',
            "main_score is nan",
        ),
        ('{"task_name": "X", "scores": {"test": [{"hf_subset": "d"}]}}', "'main_score'"),
        ('{"task_name": "STS12", "scores": {"test": [{"main_score": 1, "hf_subset": "d"}]}}', "STS12 twice"),
        ("null", "is null"),
    ],
)
def test_damaged_results(tmp_path: Path, content: str, message: str) -> None:
    a = write(tmp_path / "a", {"STS12": 0.5})
    (a / "model" / "X.json").write_text(content)
    if message == "is null":
        assert len(mteb_folders.read_results(a)) == 1, "a file of something else"
        return
    with pytest.raises(UserError, match=message):
        compare(a, a)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "wants folders of runs, or --mteb A B"),
        (["--mteb", "nowhere", "nowhere"], "nowhere: no such folder"),
        (["--mteb", "a"], "expected 2 arguments"),
        (["--mteb", "a", "empty"], "empty: holds no results of mteb"),
        (["--mteb", "a", "b"], "has no task of a with the same revision"),
        (["run", "--mteb", "a", "b"], "wants folders of runs, or --mteb A B"),
    ],
)
def test_bad_commands(
    tmp_path: Path,
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", {"STS12": 0.5})
    write(tmp_path / "b", {"STS12": 0.5}, revision="r2")
    (tmp_path / "empty").mkdir()
    assert main(["report", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
