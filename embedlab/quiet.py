"""Other packages' loggers, silent for a while, and a warning of theirs that is nobody's to mend here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LEAF_SPEC = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
"""torch to Lightning, in every run: the pattern for `warnings.filterwarnings`."""


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Only the errors of the loggers `names` inside."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
