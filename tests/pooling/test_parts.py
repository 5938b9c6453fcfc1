"""A pooling of another distribution: it is found by its name, its configuration file composes, and it trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

POOLING = """
from dataclasses import dataclass

from embedlab.config.pooling import PoolingConfig
from embedlab.pooling.base import Pooling, mean_tokens


@dataclass(frozen=True)
class ScaledConfig(PoolingConfig):
    name: str = "scaled"
    factor: float = 1.0


class Scaled(Pooling):
    name = "scaled"
    config_class = ScaledConfig

    def forward(self, hidden, attention_mask, marks):
        return self.config.factor * mean_tokens(hidden[-1], attention_mask)
"""

COMPOSE = """
from embedlab.cli.compose import compose
from embedlab.pooling import pooling_config

print(pooling_config(compose("train", ["pooling=scaled", "data.files=text.txt"])["pooling"]))
"""


def test_a_pooling_of_another_distribution_trains(tiny: Callable[..., Path], tmp_path: Path) -> None:
    package, record = tmp_path / "site" / "toy_parts", tmp_path / "site" / "toy_parts-1.0.dist-info"
    for folder in (package / "pooling", package / "conf" / "pooling", record):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pooling" / "__init__.py").touch()
    (package / "pooling" / "scaled.py").write_text(POOLING)
    (package / "conf" / "pooling" / "scaled.yaml").write_text("name: scaled\nfactor: 2.0\n")
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-parts\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text("[embedlab.parts]\ntoy = toy_parts\n")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the cat sees {n} dogs\n" for n in range(16)))
    paths = os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": paths, "EMBEDLAB_CACHE": str(tmp_path / "cache")}

    def output(*arguments: object) -> str:
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert output("-c", COMPOSE).strip() == "ScaledConfig(name='scaled', factor=2.0)"
    output("-m", "embedlab", "train", "pooling=scaled", "backbone=local", f"backbone.path={tiny('bert')}",
           f"data.files={text}", "data.batch_size=4", "trainer=cpu", "trainer.max_steps=2", "evaluation.final=[]",
           "callbacks.progress=none", f"hydra.run.dir={tmp_path / 'run'}")  # fmt: skip
    assert '"scaled"' in (tmp_path / "run" / "export" / "embedlab.json").read_text()
