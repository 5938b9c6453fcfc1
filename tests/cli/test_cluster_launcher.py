"""`hydra/launcher=slurm`: submitit's launcher where it is installed, one line where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.utils import instantiate

from embedlab import files as _paths
from embedlab.cli.main import main
from tests.tiny_run import sentences


@pytest.mark.parametrize("name", ["slurm", "submitit_slurm", "submitit_local"])
def test_without_the_extra_it_is_one_line_and_status_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Plugins.instance()  # what is installed has registered itself; it would later, and undo what follows
    launchers: dict[str, Any] = ConfigStore.instance().repo["hydra"]["launcher"]
    for installed in [n for n in launchers if n.startswith("submitit")]:
        monkeypatch.delitem(launchers, installed)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", f"hydra/launcher={name}", "seed=0,1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "hydra/launcher" in error
    assert "Fix: pip install 'embedlab[cluster]'" in error
    assert not list(tmp_path.iterdir())


def test_with_it_our_settings_are_submitits() -> None:
    """Its schema would refuse a key that a new release has renamed."""
    launcher = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    with initialize_config_dir(str(_paths.conf_dir()), version_base="1.3"):
        own = ["hydra/launcher=slurm", "hydra.launcher.partition=gpu"]
        found = compose("train", own, return_hydra_config=True).hydra.launcher
    assert isinstance(instantiate(found), launcher.SlurmLauncher)
    written = yaml.safe_load((_paths.conf_dir() / "hydra/launcher/slurm.yaml").read_text())
    del written["defaults"]
    assert {key: found[key] for key in written} == written
    assert found.partition == "gpu"


def test_a_sweep_of_submitits_jobs_on_this_machine(tiny: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    text = tmp_path / "sentences.txt"
    text.write_text("\n".join(sentences(20)), encoding="utf-8")
    sweep = tmp_path / "sweep"
    command = [
        sys.executable, "-m", "embedlab", "train", "-m", "hydra/launcher=submitit_local", "seed=0,1",
        "backbone=local", f"backbone.path={tiny('bert', layers=1)}", f"data.files={text}", "trainer=cpu",
        "trainer.max_steps=1", "data.batch_size=4", "data.report=false", "evaluation.final=[]",
        "evaluation.before=false", "callbacks.progress=none", f"hydra.sweep.dir={sweep}",
    ]  # fmt: skip
    environment = {**os.environ, "EMBEDLAB_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for seed in (0, 1):
        folder = sweep / str(seed)
        assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == seed
        assert (folder / "export" / "model.safetensors").is_file()
