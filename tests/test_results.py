"""`tools/results.py`: the pages of results are those of docs/runs, and say no number that is not there."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import scipy.stats
import yaml
from hypothesis import given
from hypothesis import strategies as st

from embedlab.errors import UserError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
READINGS = sorted((DOCS / "results" / "readings").glob("*.md"))
AVERAGE = "sts7/spearman"
HEADLINES = (AVERAGE, "scifact/ndcg@10")
HUNDREDTHS = st.integers(-9999, 9999).map(lambda n: n / 100)


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_tool", ROOT / "tools" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TOOL = load()


def blocks(reading: Path) -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for text in TOOL.BLOCK.findall(reading.read_text(encoding="utf-8"))]


def test_the_pages_are_those_of_the_readings_and_the_runs() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "results.py"), "--check"]
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("reading", READINGS, ids=lambda path: path.stem)
def test_averages_of_a_page_are_those_of_the_files(reading: Path) -> None:
    """Recounted here from the JSON alone."""
    page = (DOCS / "results" / reading.name).read_text(encoding="utf-8")
    recounted, averaged = 0, 0
    for block in blocks(reading):
        metric = next((key for key in HEADLINES if key in block.get("metrics", {AVERAGE: ""})), None)
        if metric is None or block.keys() & {"pairs", "correlate"}:
            continue
        averaged += 1
        table = page.split(f"**{block['title']}**")[1].split("\n\n")[1]
        for label, patterns in block.get("rows", {}).items():
            values = []
            for place in sorted((DOCS / "runs").glob(patterns.split()[0])):
                names = [place / "scores.json", place / "scores" / "sts.json"] if place.is_dir() else [place]
                found = [json.loads(name.read_text())["scores"] for name in names if name.is_file()]
                values += [scores[metric] for scores in found if metric in scores]
            if values:
                spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
                (row,) = [line for line in table.splitlines() if line.startswith(f"| {label} |")]
                assert f"| {statistics.fmean(values):.2f}{spread} |" in row
                recounted += 1
    assert recounted or not averaged


def test_a_changed_score_changes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOOL, "RUNS", tmp_path)
    for seed in range(2):
        (tmp_path / f"arm-{seed}").mkdir()
        (tmp_path / f"arm-{seed}" / "sts.json").write_text(json.dumps({"scores": {AVERAGE: 50.0 + seed}}))
    reading = tmp_path / "mine.md"
    reading.write_text(
        "# Mine\n\nIt has 50.50.\n\n```table\ntitle: T\nrows: {A: arm-*/sts.json}\ndigits: 2\n"
        "metrics: {sts7/spearman: Avg. 7}\n```\n"
    )
    assert "| A | 50.50 ± 0.71 | 2 |" in TOOL.page(reading)[0]
    (tmp_path / "arm-1" / "sts.json").write_text(json.dumps({"scores": {AVERAGE: 51.04}}))
    with pytest.raises(UserError, match=r"numbers=50\.50"):
        TOOL.page(reading)
    (tmp_path / "arm-1" / "sts.json").write_text(json.dumps({"scores": {"other": 51.0}}))
    (tmp_path / "arm-0" / "sts.json").write_text(json.dumps({"scores": {"other": 51.0}}))
    with pytest.raises(UserError, match="no run has it"):
        TOOL.page(reading)


def test_the_last_weights_stand_beside_the_selected_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TOOL, "RUNS", tmp_path)
    for seed in range(2):
        content = {"scores": {AVERAGE: 50.0 + seed}, "training": {"seed": seed}}
        last = {"last": {"step": 9, "scores": {AVERAGE: 40.0 + seed}}} if seed else {}
        (tmp_path / f"arm-{seed}").mkdir()
        (tmp_path / f"arm-{seed}" / "scores.json").write_text(json.dumps(content | last))
    found = TOOL.group("A", "arm-*")
    assert found.values(AVERAGE) == {0: 50.0, 1: 51.0}
    assert found.values(f"last/{AVERAGE}") == {1: 41.0}


def test_a_start_without_a_seed_is_what_each_seed_is_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TOOL, "RUNS", tmp_path)
    for folder, score in (("start", 50.0), ("arm-0", 51.0), ("arm-1", 53.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sts.json").write_text(json.dumps({"scores": {AVERAGE: score}}))
    rows = {"start": "start/sts.json", "arm": "arm-*/sts.json"}
    shown = TOOL.Block("T", rows, {AVERAGE: "Avg. 7"}, pairs=(("arm", "start"), ("start", "arm")))
    with pytest.raises(UserError, match="no seed in common: start, arm"):
        shown.table()
    (row,) = TOOL.replace(shown, pairs=(("arm", "start"),)).table().rows
    assert row[:5] == ("arm", "start", "Avg. 7", "+2.00 [-10.71, +14.71]", "2")
    (finer,) = TOOL.replace(shown, pairs=(("arm", "start"),), digits=4).table().rows
    assert finer[3] == "+2.0000 [-10.7062, +14.7062]"


def test_the_summary_states_no_other_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a row, where the page that it links to counts, nor in the text."""
    tables = {"a": ["| x | 1.25 |"], "b": ["| x | 2.5 |"]}
    summary = tmp_path / "results.md"
    monkeypatch.setattr(TOOL, "SUMMARY", summary)
    good = (
        "| claim | published | ours | n | verdict |\n| [A](results/a.md) | 7.7 | +1.25 | 3 | |\n\nAlso 2.5.\n"
    )
    summary.write_text(good)
    TOOL.hold_summary(tables)
    for old, new in (("+1.25", "2.5"), ("Also 2.5", "Also 2.6"), ("[A](results/a.md)", "A")):
        summary.write_text(good.replace(old, new))
        with pytest.raises(UserError):
            TOOL.hold_summary(tables)


def test_energy_of_the_last_weights_is_held_against_their_own_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TOOL, "RUNS", tmp_path)
    for seed in range(10):
        scores = {AVERAGE: 50.0 + seed, "cls_energy/E1": seed}
        last = {AVERAGE: 50.0 - seed, "cls_energy/E1": seed}
        (tmp_path / f"arm-{seed}").mkdir()
        content = {"scores": scores, "training": {"seed": seed}, "last": {"step": 9, "scores": last}}
        (tmp_path / f"arm-{seed}" / "scores.json").write_text(json.dumps(content))
    shown = {"cls_energy/E1": "selected", "last/cls_energy/E1": "last"}
    rows = TOOL.Block("T", {"A": "arm-*"}, correlate=shown).table().rows
    assert rows == (("selected", "+1.00", "10"), ("last", "-1.00", "10"))


RATES = DOCS / "runs" / "csesfp_rates"


def curve(run: Path) -> list[dict[str, float]]:
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["dev/spearman"]]
    keys = ("step", "dev/spearman", "dev/uniformity", "dev/alignment")
    return [{key.split("/")[-1]: float(row[key]) for key in keys} for row in rows]


def nearest(points: list[dict[str, float]], uniformity: float) -> dict[str, float]:
    return min(points, key=lambda point: abs(point["uniformity"] - uniformity))


def test_what_has_equal_uniformity_is_recounted() -> None:
    found = json.loads((RATES / "equal_uniformity.json").read_text())
    points = [point for run in RATES.glob("sfp-*") for point in curve(run)]
    assert len(found["dev"]) == 2 * len(list(RATES.glob("eol-*"))) == 8
    for row in found["dev"]:
        rate, which = row["eol"].split(", ")
        training = json.loads((RATES / f"eol-{rate}" / "scores.json").read_text())["training"]
        (own,) = [p for p in curve(RATES / f"eol-{rate}") if p["step"] == row["step"]]
        assert row["step"] == training["steps" if which == "last" else "selected_step"]
        other = nearest(points, own["uniformity"])
        assert [row[k] for k in ("dev", "uniformity", "alignment")] == list(own.values())[1:]
        assert [row[f"sfp_{k}"] for k in ("dev", "uniformity", "alignment")] == list(other.values())[1:]
        assert row["difference"] == other["spearman"] - own["spearman"]
    for row in found["averages"]:
        (own, other) = (
            json.loads((RATES / f"{arm}-{rate}" / "scores.json").read_text())
            for arm, rate in (("eol", row["eol"].split(", ")[0]), ("sfp", row["sfp"].split(", ")[0]))
        )
        pair = [
            (run["last"] if place.endswith("last") else run)["scores"]
            for run, place in ((own, row["eol"]), (other, row["sfp"]))
        ]
        assert [scores[AVERAGE] for scores in pair] == [row["avg"], row["sfp_avg"]]
        assert [scores["dev/uniformity"] for scores in pair] == [row["uniformity"], row["sfp_uniformity"]]
        assert abs(row["uniformity"] - row["sfp_uniformity"]) < 0.05


@given(HUNDREDTHS, HUNDREDTHS)
def test_a_number_is_in_a_table_or_says_where_it_is_from(stated: float, known: float) -> None:
    table, number = [f"| x | {known:+.2f} ± 0.123 |"], f"{stated:.2f}"
    if number.lstrip("-") == f"{abs(known):.2f}":
        TOOL.hold(f"It is {number}.", table, Path("a.md"))
    else:
        for text in (f"It is {number}.", f"**{number}**", f"({number}, n=3)"):
            with pytest.raises(UserError, match="no table of the page"):
                TOOL.hold(text, table, Path("a.md"))
    TOOL.hold(f"`{number}`, {number} (no\nJSON), *{number.lstrip('-')}*", table, Path("a.md"))


CHANGES = json.loads((DOCS / "runs" / "same_start_2000" / "interactions.json").read_text())["arms"]
FOLDERS = {"DiffCSE": "diffcse", "RankCSE, ListMLE": "rank_mle", "PromptBERT": "promptbert", "TNCSE": "tncse"} | {
    "JTCSE": "jtcse", "ESimCSE": "esimcse", "MixCSE": "mixcse"
}  # fmt: skip


@pytest.mark.parametrize("row", CHANGES, ids=lambda row: f"{row['arm']}, {row['score']}")
def test_a_change_of_a_gain_is_recounted_from_the_runs(row: dict[str, str]) -> None:
    def gains(page: str) -> list[float]:
        found = []
        for seed in range(3):
            files = [
                DOCS / "runs" / page / f"{arm}-{seed}" / "scores.json"
                for arm in (FOLDERS[row["arm"]], "simcse")
            ]
            content = [json.loads(file.read_text()) for file in files]
            one, other = [c["last"] if row["score"].endswith("last") else c for c in content]
            found.append(one["scores"][AVERAGE] - other["scores"][AVERAGE])
        return found

    short, long = gains("same_start_2000"), gains("same_start")
    change = [one - other for one, other in zip(short, long, strict=True)]
    paired, unpaired = scipy.stats.ttest_1samp(change, 0), scipy.stats.ttest_ind(short, long, equal_var=False)
    for key, values, test in (
        ("short", short, scipy.stats.ttest_1samp(short, 0)),
        ("long", long, scipy.stats.ttest_1samp(long, 0)),
        ("paired", change, paired),
        ("unpaired", change, unpaired),
    ):
        low, high = test.confidence_interval(0.95)
        stated = [float(number) for number in re.findall(r"[-+][\d.]+", row[key])]
        assert stated == pytest.approx([statistics.fmean(values), low, high], abs=0.0051)


@pytest.mark.parametrize("reading", READINGS, ids=lambda path: path.stem)
def test_a_reading_is_short(reading: Path) -> None:
    text = TOOL.BLOCK.sub("", reading.read_text(encoding="utf-8"))
    assert 0 < len([line for line in text.splitlines() if line and line[0] not in "#!"]) <= 15


def slugs(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "page", [DOCS / "results.md", *sorted((DOCS / "results").glob("*.md"))], ids=lambda path: path.stem
)
def test_links_of_the_results_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in slugs(target), link


def test_headings_that_other_pages_name_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *DOCS.rglob("*.md")]
    found = {
        a for page in pages for a in re.findall(r"results\.md#([\w-]+)", page.read_text(encoding="utf-8"))
    }
    assert found <= slugs(DOCS / "results.md")
