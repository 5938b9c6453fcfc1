"""Captured steps of every method by the fused blocks, on a card: with padding and without, resumed; their dropout."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from embedlab.config.run import RunConfig
from embedlab.run.callbacks.checkpoints import LAST, Interrupted
from embedlab.run.run import train
from tests.engine.test_cuda_graph import NO_DROPOUT, WIDE, column
from tests.engine.test_cuda_graph import fused as fused
from tests.methods.test_unpadded_methods import CASES, extra_settings
from tests.run.test_resume import StopAt

pytestmark = pytest.mark.gpu
Compose = Callable[..., RunConfig]
GPU = (
    "trainer=gpu",
    "trainer.precision=bf16-mixed",
    "data.pad_to_multiple=4",
    "trainer.max_epochs=4",
    "step=graph",
)
DRAWN = ("bepa", "masked_lm")
"""Their masks come from the device's generator, which steps with padding move on by another amount."""
RESUMED = ("simcse", "tncse", "jtcse", "jtcse_mean", "bepa", "masked_lm", "promptbert_roberta")


@pytest.fixture
def configured(compose_run: Compose, tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., RunConfig]:
    """configured("jtcse", "optimizer.lr=1e-4", ...) -> a captured run of a case."""

    def make(name: str, *overrides: str) -> RunConfig:
        case = CASES[name]
        settings = (
            *case.settings,
            *extra_settings(case, tiny, tmp_path),
            *GPU,
            "optimizer.lr=1e-4",
            *overrides,
        )
        return compose_run(*settings, model_type=case.model_type, layers=4, **WIDE)

    return make


@pytest.mark.parametrize("name", CASES)
def test_losses_without_padding_are_those_with_it(
    configured: Callable[..., RunConfig], name: str, tmp_path: Path, fused: list[int]
) -> None:
    losses, norms = {}, {}
    for unpad in ("false", "true"):
        assert not fused
        config = configured(name, f"unpad={unpad}", NO_DROPOUT, "trainer.max_steps=6")
        train(config, tmp_path / unpad)
        losses[unpad], norms[unpad] = (
            column(tmp_path / unpad, f"train/{key}") for key in ("loss", "grad_norm")
        )
    assert bool(fused) == (CASES[name].model_type != "modernbert")
    last = 1 if name.startswith(DRAWN) else 6
    assert losses["true"][:last] == pytest.approx(losses["false"][:last], rel=0.05, abs=0.03)
    assert norms["true"][:last] == pytest.approx(norms["false"][:last], rel=0.1, abs=0.05)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(
    configured: Callable[..., RunConfig], name: str, accumulate: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, fused: list[int],
) -> None:  # fmt: skip
    more = ("backbone.dropout=0.1", f"optimizer.accumulate={accumulate}", "trainer.max_steps=6")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(configured(name, *more), whole)
    with monkeypatch.context() as patch:
        StopAt(3, patch)
        with pytest.raises(Interrupted):
            train(configured(name, *more), parts)
    train(configured(name, *more, "ckpt_path=last"), parts)
    assert fused
    assert column(parts, "train/loss") == column(whole, "train/loss")
    one, other = (torch.load(f / LAST, weights_only=True) for f in (whole, parts))
    assert one["state_dict"].keys() == other["state_dict"].keys()
    assert [n for n, v in one["state_dict"].items() if not torch.equal(v, other["state_dict"][n])] == []


@pytest.mark.parametrize("step", ["graph", "compile"])
@pytest.mark.parametrize(
    "name", ["simcse", "simcse_roberta_mean", "tncse", "promptbert", "promptbert_roberta"]
)
def test_dropout_of_any_step_is_eagers(
    configured: Callable[..., RunConfig], name: str, step: str, tmp_path: Path, fused: list[int]
) -> None:
    """With weights that stand still, losses and norms of one batch differ by the masks alone, and are independent.

    Over n batches, the mean of the differences is 0 within its standard error: five of it err once in a million.
    """
    more = ("backbone.dropout=0.1", "optimizer.lr=1e-12", "trainer.max_steps=210", "trainer.max_epochs=30")
    for kind in ("eager", step):
        train(configured(name, *more, f"step={kind}"), tmp_path / kind)
    assert bool(fused) == (step == "graph")
    for key in ("train/loss", "train/grad_norm"):
        one, other = (column(tmp_path / kind, key, 210) for kind in ("eager", step))
        apart = [a - b for a, b in zip(other, one, strict=True)]
        assert abs(statistics.mean(apart)) < 5 * statistics.stdev(apart) / len(apart) ** 0.5, key
        assert 0.7 < statistics.stdev(other) / statistics.stdev(one) < 1.4, key
