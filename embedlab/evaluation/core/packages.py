"""Packages that only some suites need."""

from __future__ import annotations

import importlib.util

from embedlab.errors import UserError


def require(module: str, package: str) -> None:
    """UserError where `package`, which holds `module`, is not installed."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the package {package} is missing", fix="pip install 'embedlab[eval]'")
