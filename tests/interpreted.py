"""Tests of Triton kernels: on a card, or without one under ``TRITON_INTERPRET=1`` (set before triton is loaded).

TRITON_INTERPRET=1 pytest tests/kernels/test_block_triton.py tests/kernels/test_packing_triton.py
"""

from __future__ import annotations

import os

import pytest

from embedlab.kernels.available import has_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton (pip install triton)")
NEEDS = [
    needs_triton,
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
