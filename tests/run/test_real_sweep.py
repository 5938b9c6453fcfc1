"""A sweep as its user runs it: processes that train, two ranks each, then the report (pitfall 46)."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from embedlab.cli.report import main as report


@pytest.mark.timeout(300)
def test_two_trials_of_two_ranks_leave_two_whole_runs_and_a_report(
    tiny: Callable[..., Path], text_file: Path, sts_dir: Path, tmp_path: Path
) -> None:
    sweep = tmp_path / "fig6"
    command = [
        sys.executable, "-m", "embedlab", "train", "-m", "experiment=s2sent_fig6", "backbone=local",
        f"backbone.path={tiny('bert', layers=3)}", "pooling.n=1,3", "pooling.m=1", "pooling.r=4", "trainer=cpu",
        "trainer.devices=2", "trainer.max_steps=2", "trainer.log_every_n_steps=1", "data.package=null",
        f"data.files={text_file}", "data.batch_size=4", "data.report=false", "evaluation.final=[]",
        f"evaluation.sts_dir={sts_dir}", "evaluation.every=2", "callbacks.progress=none", f"hydra.sweep.dir={sweep}",
    ]  # fmt: skip
    environment = {**os.environ, "EMBEDLAB_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    # A rank that started the sweep anew would leave folders here, in the sweep, or another start in a trial's log.
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {"cache", "fig6"}
    assert {p.name for p in sweep.iterdir() if p.is_dir()} == {"0", "1"}
    configs = []
    for trial in ("0", "1"):
        output = (sweep / trial / "output.log").read_text()
        assert output.count("Starting 2 processes.") == output.count("devices=2") == 1
        (metrics,) = (sweep / trial).rglob("metrics.csv")
        rows = list(csv.DictReader(metrics.open()))
        steps = [row["step"] for row in rows if row["train/loss"]]
        assert steps == ["1", "2"], "a row a step, whatever the number of ranks"
        configs.append(yaml.safe_load((sweep / trial / "config.yaml").read_text()))
        assert (sweep / trial / "export" / "model.safetensors").is_file()
    assert [c["pooling"].pop("n") for c in configs] == [1, 3]
    assert configs[0] == configs[1]

    assert report([str(sweep), "--metric", "dev/spearman"]) == 0
    assert "| pooling.n=3" in (sweep / "report.md").read_text()
    assert (sweep / "report.png").stat().st_size > 5_000
