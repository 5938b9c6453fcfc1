from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from embedlab.errors import UserError
from embedlab.evaluation.core.table import Metric
from embedlab.report.jtcse_controls import compare, controls_table, differences_table, main, read_sweep

STS = Metric("sts7/spearman", "Avg", "higher")


def trial(folder: Path, score: float | None, **config: object) -> None:
    folder.mkdir(parents=True)
    if score is not None:
        scores = {"sts7/spearman": score, "x/nan": None}
        training = {"seed": config["seed"]}
        (folder / "scores.json").write_text(
            json.dumps({"scores": scores, "config": config, "training": training})
        )


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    number = 0
    for arm, base in (("b", 70.0), ("f", 71.0), ("h", 71.5)):
        for seed in range(3):
            trial(tmp_path / str(number), base + seed + 0.1 * (seed == 2 and arm == "h"), arm=arm, seed=seed)
            number += 1
    trial(tmp_path / str(number), None, arm="g", seed=0)  # failed: no scores
    trial(tmp_path / "stage1_own" / "seed1" / "stage1_a", 66.0, seed=1001)
    return tmp_path


def test_a_sweep_is_read_by_arm_and_seed(sweep: Path) -> None:
    arms = read_sweep(sweep)
    assert list(arms) == ["a1", "b", "f", "h"]
    assert {s: v["sts7/spearman"] for s, v in arms["b"].items()} == {0: 70.0, 1: 71.0, 2: 72.0}
    assert arms["a1"][1]["sts7/spearman"] == 66.0
    with pytest.raises(UserError, match="jtcse_ablation"):
        read_sweep(sweep / "stage1_own")


def test_differences_are_paired_by_seed(sweep: Path) -> None:
    arms = read_sweep(sweep)
    same = compare(arms["f"], arms["b"], STS.key)
    assert same is not None
    assert (same.mean, same.low, same.high, same.n) == (1.0, 1.0, 1.0, 3)
    more = compare(arms["h"], arms["f"], STS.key)
    assert more is not None
    assert more.mean == pytest.approx(0.5 + 0.1 / 3)
    assert more.low < more.mean < more.high
    assert more.verdict == "better"
    assert more.detectable > more.mean - more.low
    alone = compare(arms["b"], arms["a1"], STS.key)
    assert alone is not None
    assert (alone.mean, alone.n, alone.verdict) == (5.0, 1, "not resolved")
    assert math.isnan(alone.detectable)
    assert compare(arms["b"], {}, STS.key) is None
    assert compare(arms["b"], arms["f"], "x/nan") is None


def test_tables_say_n(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = read_sweep(sweep)
    table = controls_table(arms, (STS,)).markdown()
    assert "| (b) their sum, no stage 2 | 71.00 ± 1.00 | 3 |" in table
    assert "(a) stage-1 tower I | 66.00" in table
    differences = differences_table(arms, STS).markdown()
    assert "+1.00 [+1.00, +1.00] | 3 | 0.00 | better |" in differences
    assert "+5.00 | 1 |  | not resolved |" in differences
    assert main([str(sweep)]) == 0
    assert "(h) all (JTCSE)" in capsys.readouterr().out
