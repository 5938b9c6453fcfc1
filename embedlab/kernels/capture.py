"""Captures of CUDA graphs whose random draws are right from the first replay on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **arguments: Any) -> Iterator[None]:
    """`torch.cuda.graph`, after which the present stream waits for what it left on the stream of the capture.

    Before it records, torch writes the generators' present seeds and offsets to where the graph's kernels read them, on
    the stream of the capture. Each replay writes its own there, on its stream, and neither waits for the other: where
    the card is shared, the older ones may come last, and the first replay's passes draw differently.

    Only calls of the capturing thread can spoil a capture: the loader's thread goes on pinning memory meanwhile.

    Args:
        graph: to record into.
        arguments: of `torch.cuda.graph`, such as ``pool`` and ``stream``.
    """
    capture = torch.cuda.graph(graph, capture_error_mode="thread_local", **arguments)
    assert capture.capture_stream is not None
    with capture:
        yield
    torch.cuda.current_stream().wait_stream(capture.capture_stream)
