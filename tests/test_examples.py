"""The example files are whole runs that this version reads."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedlab.cli.lightning_cli import EmbedlabCLI
from embedlab.cli.run_file import from_file
from embedlab.distributed.devices import device_count
from embedlab.run.parse import parse_run

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(("name", "world"), [("one_node_8_gpus", 8), ("slurm_multi_node", 16)])
def test_the_run_files_are_read(name: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def begin(self: EmbedlabCLI, values: dict[str, Any], folder: Path, extra: dict[str, Any]) -> int:
        seen.update(values=values, folder=folder, extra=extra)
        return 0

    monkeypatch.setattr(EmbedlabCLI, "_begin", begin)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    path = EXAMPLES / f"{name}.yaml"
    assert EmbedlabCLI("fit", ["--config", str(path)]).status == 0
    values, extra = from_file(yaml.safe_load(path.read_text()))
    assert (seen["extra"], extra) == ({}, {})
    config = parse_run({k: v for k, v in seen["values"].items() if k not in ("stages", "stages_dir")})
    assert device_count(config.trainer) * config.trainer.num_nodes == world
    assert config.ckpt_path == "auto", "the same command goes on with an interrupted run"
    assert values["method"] == seen["values"]["method"]
    assert str(seen["folder"]) == {8: "runs/simcse-8", 16: "runs/slurm-5-simcse"}[world]


def test_the_job_agrees_with_its_run_file() -> None:
    job = (EXAMPLES / "slurm_multi_node.sbatch").read_text()
    content = yaml.safe_load((EXAMPLES / "slurm_multi_node.yaml").read_text())
    assert f"--nodes={content['trainer']['num_nodes']}\n" in job
    assert f"--ntasks-per-node={content['trainer']['devices']}\n" in job
    assert "--signal=USR1@" in job
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm_multi_node.sbatch")], check=True)
