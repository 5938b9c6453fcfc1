"""Methods are found by their names: each has its test file, and another distribution adds one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from embedlab.errors import UserError
from embedlab.methods import method_class, method_config
from embedlab.parts import part_names

METHOD = """
from dataclasses import dataclass

from embedlab.config.run import MethodConfig
from embedlab.engine.module import LossOutput, Method


@dataclass(frozen=True)
class ToyConfig(MethodConfig):
    name: str = "toy"
    scale: float = 1.0


class Toy(Method):
    name = "toy"
    config_class = ToyConfig

    def losses(self, batch):
        view = batch["sentence"]
        vectors = self.encoder(view["input_ids"], view["attention_mask"])
        return LossOutput({"size": self.config.scale * vectors.square().mean()})
"""

RUN = """
import sys
from pathlib import Path

from embedlab.cli.compose import compose
from embedlab.run.parse import parse_run
from embedlab.config.run import RunConfig
from embedlab.run.run import Run

backbone, text, folder = sys.argv[1:]
values = compose("train", ["backbone=local", f"backbone.path={backbone}", f"data.files={text}", "trainer=cpu",
    "data.batch_size=4", "trainer.max_steps=2", "callbacks.progress=none", "data.report=false",
    "evaluation.final=[]", "evaluation.before=false", "trainer.log_every_n_steps=1"])
values["method"] = {"name": "toy", "scale": 2.0}
try:
    from embedlab.run.parse import parse_run as parse
except ImportError:
    parse = parse_run
run = Run(parse(values), Path(folder))
run.fit()
assert run.trainer.global_step == 2
print(type(run.method).__module__)
"""


def test_a_method_of_another_distribution_trains(tiny: Callable[..., Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "toy_parts" / "methods").mkdir(parents=True)
    (site / "toy_parts" / "__init__.py").touch()
    (site / "toy_parts" / "methods" / "__init__.py").touch()
    (site / "toy_parts" / "methods" / "toy.py").write_text(METHOD)
    record = site / "toy_parts-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-parts\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text("[embedlab.parts]\ntoy = toy_parts\n")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the cat sees {n} dogs\n" for n in range(16)))
    script = tmp_path / "train.py"
    script.write_text(RUN)
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": f"{site}{os.pathsep}{root}",
        "EMBEDLAB_CACHE": str(tmp_path / "cache"),
    }
    arguments = [sys.executable, script, tiny("bert"), text, tmp_path / "run"]
    done = subprocess.run(list(map(str, arguments)), env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == "toy_parts.methods.toy"


@pytest.mark.parametrize("name", part_names("methods"))
def test_the_record_and_the_module_stand_in_one_file(name: str) -> None:
    cls = method_class(name)
    assert cls.config_class.__module__ == cls.__module__
    assert method_config({"name": name}).name == name


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"method\.name=simcs.*simcse"):
        method_class("simcs")
