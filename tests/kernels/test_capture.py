"""Graphs draw from the first replay on what it is told to, whatever the card was late with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import embedlab
from embedlab.encoders.grad_cache import RepeatedDraws, cached
from embedlab.kernels.capture import capturing


def test_the_present_stream_waits_for_the_one_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Recording:
        def __init__(self, graph: object, stream: str, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            self.capture_stream = stream

        def __enter__(self) -> None:
            done.append("begun")

        def __exit__(self, *error: Any) -> None:
            done.append("recorded")

    monkeypatch.setattr(torch.cuda, "graph", Recording)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=done.append))
    with capturing(object(), stream="of the capture"):  # type: ignore[arg-type]
        done.append("body")
    assert done == ["begun", "body", "recorded", "of the capture"]


def test_no_graph_is_captured_otherwise() -> None:
    sources = Path(embedlab.__file__).parent.rglob("*.py")
    assert [s.name for s in sources if "torch.cuda.graph(" in s.read_text("utf-8")] == ["capture.py"]


@pytest.mark.gpu
def test_passes_drop_alike_where_the_stream_of_the_capture_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The older seeds would come between the two passes of the first replay."""
    late, begin = 400_000_000, torch.cuda.CUDAGraph.capture_begin  # clock cycles, a fifth of a second

    def begun(graph: torch.cuda.CUDAGraph, *pool: Any, **arguments: Any) -> None:
        torch.cuda._sleep(late)
        begin(graph, *pool, **arguments)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begun)
    device = torch.device("cuda", torch.cuda.current_device())
    draws, rows = RepeatedDraws(device), torch.eye(12, device=device)
    weight = torch.nn.Parameter(torch.ones(12, 64, device=device))

    def encode(part: Tensor) -> Tensor:
        torch.cuda._sleep(late * 3 // 4)
        return torch.nn.functional.dropout(part @ weight, 0.5)

    def step() -> Tensor:
        weight.grad = None
        with draws.on():
            out = cached(encode, rows, chunk=12)
        out.sum().backward()
        return out.detach()

    graph, out = draws.captured(step)
    draws.renew()
    graph.replay()
    assert weight.grad is not None
    assert torch.equal(out != 0, weight.grad != 0)
