"""Two GPUs over NCCL: DDP eager and compiled, FSDP in bf16-mixed; what one process trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.test_ddp import losses, settings
from tests.engine.test_fsdp import MORE, run

GPU = (
    "trainer.accelerator=cuda",
    "data.drop_last=true",
    "evaluation.select=last",
    "trainer.precision=32-true",
)


@pytest.mark.gpu(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", ["eager", "compile"])
def test_two_gpus_are_one_process(
    step: str, tiny: Callable[..., Path], sts_dir: Path, tmp_path: Path
) -> None:
    folder, more = tiny("bert"), (*GPU, f"evaluation.sts_dir={sts_dir}")
    run(settings(folder, tmp_path, 1, *more, "step=eager"), tmp_path / "one", 1)
    run(settings(folder, tmp_path, 2, *more, f"step={step}"), tmp_path / "two", 2)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-2)
    assert two["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=2e-2)
    assert two["dev/spearman"] == pytest.approx(one["dev/spearman"], abs=0.5)


@pytest.mark.gpu(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_two_shards_on_gpus_train_as_one_process(
    precision: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    folder, more = tiny("llama"), (*MORE, *GPU, "step=eager")
    run(settings(folder, tmp_path, 1, *more, "data.batch_size=8"), tmp_path / "one", 1)
    sharded = settings(folder, tmp_path, 2, *more, "trainer.strategy=fsdp", f"trainer.precision={precision}")
    run(sharded, tmp_path / "two", 2)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    close = {"rel": 1e-2} if precision == "32-true" else {"rel": 0.2}
    assert two["train/loss"] == pytest.approx(one["train/loss"], **close)
    assert (tmp_path / "two" / "export").is_dir()
