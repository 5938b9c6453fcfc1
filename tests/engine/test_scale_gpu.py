"""Several GPUs over NCCL: DDP eager, compiled and captured, FSDP in bf16-mixed; what one process trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.captured_ranks import Spec, train_each
from tests.distributed.captured_runs import (
    EPOCHS,
    EXACT,
    WORLD,
    column,
    compared,
    gradient_error,
    line,
    ranks,
)
from tests.distributed.test_captured import kill_one_rank
from tests.distributed.test_ddp import losses, settings
from tests.engine.test_fsdp import MORE, run
from tests.methods.golden import Inputs
from tests.support import tiny_backbone

GPU = (
    "trainer.accelerator=cuda",
    "data.drop_last=true",
    "evaluation.select=last",
    "trainer.precision=32-true",
)
pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(1800)]
"""The test that comes first waits for all runs of `trained`, whichever it is."""
CAPTURED = ("trainer=gpu", "step=graph", "evaluation.select=last")
FUSED = ("trainer.precision=bf16-mixed", "backbone.dropout=0.1", "trainer.max_epochs=99")


@pytest.mark.parametrize("step", ["eager", "compile", "graph"])
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captured runs on one card (``one/NAME``) and on two (``two/NAME``); blocks are compiled in the last three."""
    root = tmp_path_factory.mktemp("captured")
    inputs = Inputs(root / "inputs")
    wide = tiny_backbone("bert", root / "wide", width=32, heads=2, ffn=64)  # heads that the kernels take

    def fused(world: int, *more: str) -> list[str]:
        path = f"backbone.path={wide}"
        return line(inputs, "simcse", world, path, *CAPTURED, *FUSED, "trainer.max_steps=60", *more)

    one = compared(inputs, 1, *CAPTURED, precision="32-true") | {"fused": Spec(fused(1))}
    train_each({str(root / "one" / name): spec for name, spec in one.items()}, 1, root)
    two = compared(inputs, WORLD, *CAPTURED, precision="32-true")
    two |= {"fused": Spec(fused(WORLD)), "parts": Spec(fused(WORLD), stop=3)}
    two["fp32_sums"] = Spec(fused(WORLD, "optimizer.reduce_dtype=fp32"))
    train_each({str(root / "two" / name): spec for name, spec in two.items()}, WORLD, root)
    train_each({str(root / "two" / "parts"): Spec(fused(WORLD, "ckpt_path=last"))}, WORLD, root)
    return root


@pytest.mark.parametrize("name", EXACT)
def test_the_captured_gradient_is_that_of_the_whole_batch(name: str, trained: Path) -> None:
    assert gradient_error(trained / "one" / name, trained / "two" / name) < 1e-4


@pytest.mark.parametrize("name", EPOCHS)
def test_a_captured_run_on_two_cards_is_the_run_on_one(name: str, trained: Path) -> None:
    one, two = (column(trained / w / name, "train/grad_norm") for w in ("one", "two"))
    assert len(one) == EPOCHS[name]
    assert two == pytest.approx(one, rel=2e-2 if name.startswith("half") else 5e-3)


def test_cards_stay_the_same_and_draw_differently(trained: Path) -> None:
    for folder in (trained / "two").iterdir():
        first, second = ranks(folder)
        assert first["weights"] == second["weights"], folder.name
        assert first["seed"] != second["seed"]


@pytest.mark.parametrize("name", ["fused", "fp32_sums"])
def test_fused_steps_on_two_cards_learn_as_on_one(name: str, trained: Path) -> None:
    """With dropout, whose draws differ: by the mean of the last 20 losses."""
    one, two = (column(trained / w, "train/loss")[-20:] for w in ("one/fused", f"two/{name}"))
    assert sum(two) / 20 == pytest.approx(sum(one) / 20, rel=0.2, abs=0.05)


def test_a_resumed_run_on_two_cards_is_the_uninterrupted_one(trained: Path) -> None:
    whole, parts = (ranks(trained / "two" / name)[0] for name in ("fused", "parts"))
    assert parts["step"] == whole["step"] == 60
    assert parts["weights"] == whole["weights"]


def test_a_killed_card_ends_the_run_and_leaves_its_checkpoint(tmp_path: Path) -> None:
    kill_one_rank(tmp_path, *CAPTURED)


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
