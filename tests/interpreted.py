"""Tests of Triton kernels: on a card, or without one under ``TRITON_INTERPRET=1`` (set before triton is loaded).

    TRITON_INTERPRET=1 pytest tests/backbones/test_block_kernels.py tests/backbones/test_slots_kernel.py \\
        tests/data/test_gather_kernel.py
"""

from __future__ import annotations

import importlib.util
import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NEEDS = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs triton (pip install triton)"
    ),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
