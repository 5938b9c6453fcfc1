"""Every method has a test file of its own, in which its five losses are held to those of before."""

from __future__ import annotations

import json
from pathlib import Path

from embedlab.parts import part_names
from tests.methods.golden import GOLDEN

WITHOUT_A_LOSS = {"ensemble", "whitening", "metaeol"}


def test_every_method_has_a_test_with_its_golden_losses() -> None:
    known = json.loads(GOLDEN.read_text(encoding="utf-8"))["losses"]
    for method in part_names("methods"):
        text = (Path(__file__).parent / f"test_{method}.py").read_text(encoding="utf-8")
        if method not in WITHOUT_A_LOSS:
            assert method in known
            assert f'check_golden("{method}"' in text
    tested = "".join(p.read_text(encoding="utf-8") for p in Path(__file__).parent.glob("test_*.py"))
    assert all(f'check_golden("{name}"' in tested for name in known)
