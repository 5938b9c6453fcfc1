"""Every precision: losses in fp32, the fused update with clipping at the true norm."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import MethodConfig, RunConfig
from embedlab.engine.module import Method
from embedlab.engine.optimizer import build_optimizer
from embedlab.errors import UserError
from embedlab.run.check import check_run
from embedlab.run.run import Run

FULL = ("trainer.max_steps=4", "optimizer.warmup_steps=1")
LORA = ("adapter=lora", "adapter.r=4", "pooling=last")
FAST = ("optimizer.clip=0.05",)  # far below the norms of these runs, so that each update is clipped


def trained(
    config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, list[float]], set[torch.dtype], Run]:
    """Metrics, the types of the losses, and the run."""
    seen: set[torch.dtype] = set()
    original = Method.total

    def total(self: Method, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        outcome = self.losses(batch)
        seen.update(v.dtype for v in outcome.losses.values())
        loss, logged = original(self, batch)
        seen.add(loss.dtype)
        return loss, logged

    with monkeypatch.context() as patch:
        patch.setattr(Method, "total", total)
        run = Run(config, folder)
        run.fit()
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {k: [float(r[k]) for r in rows if r.get(k)] for k in ("train/loss", "train/grad_norm")}, seen, run


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_losses_are_fp32(precision, compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    config = compose_run(*FULL, f"trainer.precision={precision}")
    found, types, _ = trained(config, tmp_path, monkeypatch)
    assert types == {torch.float32}
    assert len(found["train/loss"]) == 4
    assert all(0.1 < loss < 4 for loss in found["train/loss"])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_adapters_are_trained_in_fp32(precision, compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    config = compose_run(*FULL, *LORA, f"trainer.precision={precision}", model_type="llama")
    found, types, run = trained(config, tmp_path, monkeypatch)
    assert types == {torch.float32}
    frozen = {p.dtype for p in run.method.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
    assert {p.dtype for p in run.method.trained()} == {torch.float32}
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    assert {s["exp_avg"].dtype for s in state.values()} == {torch.float32}
    assert all(norm > 0 for norm in found["train/grad_norm"])


def test_bf16_weights_are_not_trained(compose_run):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"trainer.precision=bf16-true.*adapter=lora"):
        check_run(compose_run("trainer.precision=bf16-true"))
    check_run(compose_run(*LORA, "trainer.precision=bf16-true", model_type="llama"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_loss_scaling_on_a_cpu_is_refused(compose_run):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"trainer.precision=16-mixed.*bf16-mixed"):
        check_run(compose_run("trainer.precision=16-mixed"))


class Bare(Method):
    """The base's clipping around one weight."""

    def __init__(self, clip: float) -> None:
        encoder: Any = nn.Module()
        super().__init__(encoder, MethodConfig("bare"), OptimizerConfig(clip=clip, lr=0.1))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))


@pytest.mark.parametrize("fused", [True, False])
def test_scaled_gradients_are_clipped_at_their_true_norm(fused: bool) -> None:
    """The fused update divides by the scale itself, after clipping; clipping must not see scaled gradients."""

    def step(scaler: torch.amp.GradScaler | None) -> tuple[Tensor, float]:
        method = Bare(clip=0.5)
        method._trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler))  # type: ignore[assignment]
        optimizer, _ = build_optimizer(method.optimizer_config, [method.weight], 10, torch.device("cpu"))
        optimizer = type(optimizer)(
            [method.weight], lr=0.1, eps=1.0, fused=fused
        )  # a large eps: Adam's own scaling would hide the norm
        loss = (method.weight * torch.arange(1.0, 7)).sum()
        if scaler is None:
            loss.backward()
            method.configure_gradient_clipping(optimizer)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            if not fused:  # what Lightning does before it asks for clipping
                scaler.unscale_(optimizer)
            method.configure_gradient_clipping(optimizer)
            scaler.step(optimizer)
            scaler.update()
        method.meter.flush(1)
        ((_, means),) = method.meter.arrived()
        return method.weight.detach().clone(), means["grad_norm"]

    plain, norm = step(None)
    scaled, scaled_norm = step(torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert norm == pytest.approx(91**0.5)
    assert scaled_norm == pytest.approx(norm)
    torch.testing.assert_close(scaled, plain)
    assert not torch.allclose(plain, torch.linspace(-1, 1, 6), atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_fused_updates_with_clipping_on_a_gpu(precision, compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    common = (*FULL, *FAST, "trainer=gpu", "step=eager", "backbone.dropout=0.01")
    base, _, _ = trained(compose_run(*common, "trainer.precision=32-true"), tmp_path / "fp32", monkeypatch)
    config = compose_run(*common, f"trainer.precision={precision}")
    found, types, run = trained(config, tmp_path / "run", monkeypatch)
    assert types == {torch.float32}
    assert all(g["fused"] for g in run.trainer.optimizers[0].param_groups)
    assert found["train/loss"] == pytest.approx(base["train/loss"], rel=0.2)
    assert found["train/grad_norm"] == pytest.approx(base["train/grad_norm"], rel=0.5)


@pytest.mark.gpu
def test_half_base_with_adapters_on_a_gpu(compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    config = compose_run(
        *FULL, *LORA, "trainer=gpu", "trainer.precision=bf16-true", "step=eager", model_type="llama"
    )
    found, types, run = trained(config, tmp_path, monkeypatch)
    assert types == {torch.float32}
    assert {p.dtype for p in run.method.trained()} == {torch.float32}
    assert all(norm > 0 for norm in found["train/grad_norm"])
