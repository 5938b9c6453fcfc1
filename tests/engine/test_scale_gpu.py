"""Several GPUs over NCCL: DDP eager, compiled and captured, FSDP in bf16-mixed; what one process trains.

Parts by ``-k``: ``exact``, ``epochs`` and ``fused`` train their captured runs at their first test; ``two_gpus``,
``killed`` and ``shards``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.distributed.captured_ranks import Spec, train_each
from tests.distributed.captured_runs import (
    EPOCHS,
    EXACT,
    ON_A_CARD,
    WORLD,
    check_norms,
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
"""The first test of a group waits for all of its runs."""
CAPTURED = ("trainer=gpu", "step=graph", "evaluation.select=last")
GROUPS = {"exact": EXACT, "epochs": EPOCHS, "fused": ("fused", "parts", "fp32_sums")}
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
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("captured") / "inputs")


def on_one_and_two(inputs: Inputs, group: str, runs: Callable[[int], dict[str, Spec]]) -> Path:
    """Captured runs on one card (``one/NAME``) and on two (``two/NAME``)."""
    root = inputs.folder.parent / group
    for place, world in (("one", 1), ("two", WORLD)):
        (root / place).mkdir(parents=True)
        train_each({str(root / place / name): spec for name, spec in runs(world).items()}, world, root)
    return root


@pytest.fixture(scope="module")
def exact(inputs: Inputs) -> Path:
    return on_one_and_two(inputs, "exact", lambda world: whole(inputs, world, EXACT))


@pytest.fixture(scope="module")
def epochs(inputs: Inputs) -> Path:
    return on_one_and_two(inputs, "epochs", lambda world: whole(inputs, world, EPOCHS))


def whole(inputs: Inputs, world: int, names: Iterable[str]) -> dict[str, Spec]:
    runs = compared(inputs, world, *CAPTURED, precision="32-true")
    return {name: runs[name] for name in names}


@pytest.fixture(scope="module")
def fused(inputs: Inputs) -> Path:
    """With heads that the kernels take."""
    wide = tiny_backbone("bert", inputs.folder.parent / "wide", width=32, heads=2, ffn=64)

    def run(world: int, *more: str) -> list[str]:
        path = f"backbone.path={wide}"
        return line(inputs, "simcse", world, path, *CAPTURED, *FUSED, "trainer.max_steps=60", *more)

    def runs(world: int) -> dict[str, Spec]:
        if world == 1:
            return {"fused": Spec(run(1))}
        sums = Spec(run(world, "optimizer.reduce_dtype=fp32"))
        return {"fused": Spec(run(world)), "parts": Spec(run(world), stop=3), "fp32_sums": sums}

    root = on_one_and_two(inputs, "fused", runs)
    if not list((root / "two" / "parts").glob("rank*.txt")):
        train_each({str(root / "two" / "parts"): Spec(run(WORLD, "ckpt_path=last"))}, WORLD, root)
    return root


@pytest.mark.parametrize("name", EXACT, ids="exact-{}".format)
def test_the_captured_gradient_is_that_of_the_whole_batch(name: str, exact: Path) -> None:
    bound = ON_A_CARD.get(name, 1e-4)
    assert gradient_error(exact / "one" / name, exact / "two" / name) < bound


@pytest.mark.parametrize("name", EPOCHS, ids="epochs-{}".format)
def test_a_captured_run_on_two_cards_is_the_run_on_one(name: str, epochs: Path) -> None:
    one, two = (column(epochs / w / name, "train/grad_norm") for w in ("one", "two"))
    check_norms(name, one, two, near=5e-3)


@pytest.mark.parametrize(
    "run",
    [f"{group}-{name}" for group, names in GROUPS.items() for name in names],
)
def test_cards_stay_the_same_and_draw_differently(run: str, request: pytest.FixtureRequest) -> None:
    group, _, name = run.partition("-")
    first, second = ranks(request.getfixturevalue(group) / "two" / name)
    assert first["weights"] == second["weights"]
    assert first["seed"] != second["seed"]


@pytest.mark.parametrize("name", ["fused", "fp32_sums"])
def test_fused_steps_on_two_cards_learn_as_on_one(name: str, fused: Path) -> None:
    """With dropout, whose draws differ: by the mean of the last 20 losses."""
    one, two = (column(fused / w, "train/loss")[-20:] for w in ("one/fused", f"two/{name}"))
    assert sum(two) / 20 == pytest.approx(sum(one) / 20, rel=0.2, abs=0.05)


def test_a_resumed_fused_run_on_two_cards_is_the_uninterrupted_one(fused: Path) -> None:
    unbroken, parts = (ranks(fused / "two" / name)[0] for name in ("fused", "parts"))
    assert parts["step"] == unbroken["step"] == 60
    assert parts["weights"] == unbroken["weights"]


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
