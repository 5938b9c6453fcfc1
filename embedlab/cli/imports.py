"""Imports that take seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_import(module: str) -> Iterator[None]:
    """For the block that imports `module`, where nothing has yet: the garbage collector is off, and takes what was
    made for something that stays.

    Of the 8 s to a training's first step more than 1 s was collections, which walk ever more modules again and again,
    and 1 s the last one, when the process ends.
    """
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
