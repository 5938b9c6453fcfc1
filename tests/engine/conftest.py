"""The tiny run of `tests.run`."""

from __future__ import annotations

from tests.run.conftest import compose_run, sts_dir, text_file

__all__ = ["compose_run", "sts_dir", "text_file"]
