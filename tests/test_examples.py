"""The example files are whole runs that this version reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import embedlab
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


SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_fits_on_a_screen() -> None:
    assert len(SCRIPTS) == 5
    assert all(len(script.read_text().splitlines()) <= 60 for script in SCRIPTS)
    text = (EXAMPLES / "plain_method.py").read_text()
    assert not re.search(r"^(?:import|from) (?:hydra|lightning)", text, re.MULTILINE)


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text(
        "\n".join(f"the {a} {b}" for a in ("old cat", "new boat", "red sun") for b in ("sleeps", "sinks"))
    )
    return path


def test_search_finds_a_line_by_itself(sentences: Path) -> None:
    first = run("semantic_search", sentences, "the old cat sleeps").splitlines()[0]
    assert first == "1.000  the old cat sleeps"


def test_a_method_in_plain_python_learns_and_is_loaded_again(sentences: Path, tmp_path: Path) -> None:
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)\n", run("plain_method", sentences, tmp_path / "out", 3))
    assert found
    assert embedlab.load(tmp_path / "out").encode(["a cat"]).shape == (1, 256)


def test_poolings_are_compared() -> None:
    pytest.importorskip("gensim")
    lines = run("compare_poolings").splitlines()
    values = [float(line.split()[0]) for line in lines]
    assert len(values) == 5
    assert values == sorted(values, reverse=True)


def test_an_encoder_that_counts_words_is_scored(tmp_path: Path) -> None:
    rows = [(5, "a cat sat", "a cat sat"), (3, "a cat sat", "a dog sat"), (0, "a cat sat", "stocks fell")]
    lines = ["score\tsentence1\tsentence2", *("\t".join(map(str, row)) for row in rows)]
    (tmp_path / "stsb_test.tsv").write_text("\n".join(lines) + "\n")
    assert re.search(r"stsb/spearman +100\.00", run("score_any_encoder", tmp_path))


def test_recipes_are_paired_by_seed() -> None:
    lines = run("paired_seeds", EXAMPLES.parent / "docs/runs/s2sent_mini12", "last3").splitlines()
    (s2,) = [line for line in lines if line.startswith("s2: ")]
    assert "-0.11 [-0.59, +0.38] sts7/spearman, not resolved; 3 seeds would have shown 0.60" in s2
