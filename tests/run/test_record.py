"""What a run that goes on says of settings that it did not begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedlab.config.run import SAME_RECIPE
from embedlab.run.run_folder import Record


@pytest.mark.parametrize(
    ("key", "said"),
    [
        *((key, False) for key in sorted(SAME_RECIPE)),
        ("trainer.max_steps", False),
        ("trainer.devices", False),
        ("stages", False),
        ("trainer.precision", True),
        ("data.limit", True),
        ("seed", True),
    ],
)
def test_another_recipe_is_said(
    key: str, said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section, _, name = key.partition(".")
    was, now = ({section: {name: value} if name else value} for value in (1, 2))
    Record(tmp_path).write(was)
    Record(tmp_path).warn_of_changes(now)
    assert (f"{key}=2 (was 1)" in caplog.text) == said
