"""S2Sent's figure 8 as its user makes it: a sweep, then the report that draws it, without an encoder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from embedlab.cli.report import main as report
from tests.evaluation.helpers import write_sts_folder


@pytest.mark.timeout(300)
def test_the_sweep_leaves_what_the_report_draws(
    tiny: Callable[..., Path], text_file: Path, tmp_path: Path
) -> None:
    # The parent of sts/, as the experiments' headers allow.
    write_sts_folder(tmp_path / "data" / "sts")
    sweep = tmp_path / "fig8"
    command = [
        sys.executable, "-m", "embedlab", "train", "-m", "experiment=s2sent_fig8", "arm=last1,last3_s2",
        "backbone=local", f"backbone.path={tiny('bert', layers=3)}", "pooling.r=4", "trainer=cpu",
        "trainer.max_steps=2", "trainer.log_every_n_steps=1", "data.package=null", f"data.files={text_file}",
        "data.batch_size=4", "data.report=false", f"evaluation.sts_dir={tmp_path / 'data'}", "evaluation.every=2",
        "evaluation.before=false", "callbacks.progress=none", f"hydra.sweep.dir={sweep}",
    ]  # fmt: skip
    environment = {**os.environ, "EMBEDLAB_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    for trial in ("0", "1"):
        found = json.loads((sweep / trial / "scores.json").read_text())
        groups = found["protocol"]["geometry"]["cosines_by_rating"]
        assert sum(len(line.split()) for line in groups.values()) == 39
        assert found["scores"]["geometry/separation"] > 0

    assert report([str(sweep), "--metric", "geometry/separation"]) == 0
    table = (sweep / "report.md").read_text()
    assert "geometry/separation" in table
    assert "| arm=last1 |" in table
    assert "| arm=last3_s2 |" in table
    assert (sweep / "density.png").stat().st_size > 10_000
