"""What devices exchange, inside a CUDA graph: a connection of one rank over NCCL, on one card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from embedlab.distributed import gather
from embedlab.engine.gradient_sum import GradientSum
from embedlab.engine.whole_step import WholeStep
from embedlab.run.run import train
from tests.engine.test_cuda_graph import FP32, GPU, HALF, column
from tests.ranks import free_port

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("nccl", address, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    torch.cuda.synchronize()
    dist.destroy_process_group()


def test_vectors_are_gathered_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward passes run in a thread of their own, which sends into the same capture."""
    monkeypatch.setattr(gather, "world_size", lambda: 2)  # of one, nothing would be sent
    x = torch.randn(6, 4, device="cuda", requires_grad=True)
    scale = torch.ones((), device="cuda")

    def step() -> torch.Tensor:
        x.grad = None
        out = gather._Gather.apply(x, [6])
        (out * scale).square().sum().backward()
        return out.detach()

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = step()
    for value in (1.0, 3.0):
        scale.fill_(value)
        graph.replay()
        torch.testing.assert_close(out, x.detach())
        torch.testing.assert_close(x.grad, 2 * value**2 * x.detach())


@pytest.mark.parametrize(
    "more", [FP32, HALF, (*FP32, "optimizer.accumulate=2", "trainer.max_epochs=4")], ids=str
)
def test_a_step_that_sums_over_one_device_is_the_step_without(compose_run, tmp_path, monkeypatch, more):  # type: ignore[no-untyped-def]
    settings = (*GPU, *more, "step=graph")
    train(compose_run(*settings), tmp_path / "without")

    def summed(step: WholeStep, fused: bool) -> GradientSum:
        fp32 = step.accumulate > 1 or not fused
        return GradientSum(step.parameters, {} if fp32 else step._twins, fp32, step.device)

    monkeypatch.setattr(WholeStep, "_gradient_sum", summed)
    train(compose_run(*settings), tmp_path / "with")
    for name in ("train/loss", "train/grad_norm"):
        assert column(tmp_path / "with", name) == pytest.approx(
            column(tmp_path / "without", name), rel=1e-3
        ), name
