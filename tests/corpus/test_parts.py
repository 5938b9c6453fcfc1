"""A folder of parts: what its manifest may hold."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from embedlab.corpus.parts import Manifest
from embedlab.errors import UserError


@pytest.mark.parametrize("bad", [None, 3, -1, "x", [], {}, [1], True, 0.5])
def test_a_manifest_of_other_types_is_damaged(bad: Any, tmp_path: Path) -> None:
    ours = Manifest("mini", None, 8, "", 32, {"name": "mean"}, None, False, "float32", None, ".npy", "error", 32, 64, 1,
                    10, [{"path": "a.txt", "bytes": 3, "sha256": "0"}], "f")  # fmt: skip
    values = asdict(ours)
    for key in values:
        (tmp_path / "manifest.json").write_text(json.dumps(values | {key: bad}))
        try:
            found = Manifest.read(tmp_path)
        except UserError:
            continue
        if found._compared() != ours._compared():
            with pytest.raises(UserError, match="this run has"):
                ours.check(found, tmp_path / "manifest.json")
