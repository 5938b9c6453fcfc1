"""A small configuration, in the place of the project's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from embedlab import files as _paths

FILES = {
    "demo.yaml": """\
# Scores a demonstration.
# ckpt: what to score
defaults:
  - _self_
  - method: alpha
  - extra: null

ckpt: ???
limit: 10
suite: sts
input: ???
output: ???
tags: [a, b]
label: ${suite}-${limit}
folder: ${oc.env:EMBEDLAB_NOT_SET,here}
hydra:
  run:
    dir: runs/demo
  sweep:
    dir: runs/sweep
    subdir: ${hydra.job.num}
""",
    "method/alpha.yaml": "name: alpha\ntau: 0.05\nlambda_c: 1\n",
    "method/beta.yaml": "name: beta\ntau: 0.07\n",
    "extra/more.yaml": "x: 1\n",
}


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "conf"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    monkeypatch.setattr(_paths, "conf_dir", lambda: folder)
    return folder


@pytest.fixture
def ckpt(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """The folder of an encoder, which may be written to."""
    return Path(shutil.copytree(tiny("bert"), tmp_path / "my_encoder"))
