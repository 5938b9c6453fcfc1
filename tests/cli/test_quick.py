"""What needs no torch to be refused is refused before torch is loaded: in a second, not in six."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
from embedlab.cli.main import main
status = main(sys.argv[1:])
print(status, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("train no.such.key=1", "no.such.key"),
        ("train method=nonsense", "method"),
        ("train data.batch_size=0", "data.batch_size"),
        ("train data.files=/nowhere.txt data.limit=1", "data.files"),
        ("train data.files=nowhere/*.txt", "data.files"),
        ("train trainer.max_steps=none", "trainer.max_steps"),
        ("train callbacks.early_stopping=0", "callbacks.early_stopping"),
        ("train evaluation.final=[nonsense]", "evaluation.final"),
        ("train backbone.attention=nonsense", "backbone.attention"),
        ("mine none.csv out.csv ckpt=mini", "input"),
        ("mine in.csv out.csv ckpt=mini negatives=0", "negatives"),
        ("quantize in.npy out.npy store=int4", "store"),
        ("benchmark ckpt=mini format=nonsense", "format"),
        ("evaluate ckpt=mini suite=nonsense", "suite"),
        ("evaluate ckpt=mini suite=sts data_dir=/nowhere", "data_dir"),
    ],
)
def test_no_torch_before_the_refusal(arguments: str, key: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    command = [sys.executable, "-c", CODE, *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "2 False", done.stderr
    assert done.stderr.count("\n") == 1
    assert f"({key}" in done.stderr
