"""Data: sources of text, the token cache, and the batches of a run.

`DataConfig` says what to read; `build_token_table` tokenises it once; `SentenceDataModule` gives a trainer
the batches; `iter_texts` reads the raw text.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedlab.config.data import DataConfig, data_config
    from embedlab.data.build import build_token_table
    from embedlab.data.loader import BatchLoader
    from embedlab.data.module import SentenceDataModule
    from embedlab.data.packed import PackedTable
    from embedlab.data.plan import BatchPlan
    from embedlab.data.report import print_report
    from embedlab.data.resident import ResidentTable
    from embedlab.data.rows import iter_texts, read_rows
    from embedlab.data.table import FieldView, TokenTable

_HOME = {
    "BatchLoader": "loader",
    "BatchPlan": "plan",
    "DataConfig": "config",
    "FieldView": "table",
    "PackedTable": "packed",
    "ResidentTable": "resident",
    "SentenceDataModule": "module",
    "TokenTable": "table",
    "build_token_table": "build",
    "data_config": "config",
    "iter_texts": "rows",
    "print_report": "report",
    "read_rows": "rows",
}
__all__ = [
    "BatchLoader",
    "BatchPlan",
    "DataConfig",
    "FieldView",
    "PackedTable",
    "ResidentTable",
    "SentenceDataModule",
    "TokenTable",
    "build_token_table",
    "data_config",
    "iter_texts",
    "print_report",
    "read_rows",
]


def __getattr__(name: str) -> Any:
    # Deferred, so that a configuration can be checked, and a worker started, without torch and Lightning.
    if name in _HOME:
        return getattr(importlib.import_module(f"embedlab.data.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
