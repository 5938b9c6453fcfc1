"""tests.markers, run in a pytest of its own on one test of each kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = """
import pytest

@pytest.mark.gpu(64)
def test_many_devices(): ...

@pytest.mark.hub
def test_hub(): ...

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.whole
def test_whole(): ...

def test_plain(): ...
"""


def run(folder: Path, *options: str, **environment: str) -> str:
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    gpu\n    hub\n    slow\n    whole\n", "utf-8"
    )
    (folder / "test_kinds.py").write_text(TESTS, "utf-8")
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.markers",
            "-p",
            "no:cacheprovider",
            "-rs",
            "-q",
            *options,
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(root),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "EMBEDLAB_SLOW": "0",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_skip_gives_its_reason(tmp_path: Path) -> None:
    out = run(tmp_path, HF_HUB_OFFLINE="1")
    assert "1 passed, 3 skipped" in out
    assert f"needs 64 CUDA devices, found {torch.cuda.device_count()}" in out
    assert "HF_HUB_OFFLINE=0" in out
    assert "EMBEDLAB_SLOW=1" in out


def test_an_unreachable_hub_is_said_to_be_so(tmp_path: Path) -> None:
    out = run(tmp_path, "-k", "hub", HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    assert "the model hub cannot be reached" in out


@pytest.mark.parametrize(("option", "variable"), [("--slow", "0"), ("-q", "1")])
def test_slow_tests_run_when_asked_for(tmp_path: Path, option: str, variable: str) -> None:
    out = run(tmp_path, "-k", "slow", option, EMBEDLAB_SLOW=variable)
    assert "skipped" not in out
