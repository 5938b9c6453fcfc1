"""Captured steps of every method by the fused blocks, on a card: with padding and without, resumed; their dropout."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from embedlab.backbones import Backbone
from embedlab.config.run import RunConfig
from embedlab.kernels import fused_block
from embedlab.run.callbacks.checkpoints import LAST, Interrupted
from embedlab.run.run import train
from tests.engine.test_cuda_graph import NO_DROPOUT, column
from tests.engine.test_cuda_graph import fused as fused
from tests.methods.test_unpadded_methods import CASES, extra_settings
from tests.run.test_resume import StopAt

Compose = Callable[..., RunConfig]
STEP = ("data.pad_to_multiple=4", "trainer.max_epochs=4", "optimizer.lr=1e-4")
GPU = ("trainer=gpu", "trainer.precision=bf16-mixed", "step=graph")
DRAWN = ("bepa", "masked_lm", "diffcse", "infocse")
"""Their masks come from the device's generator, which steps with padding move on by another amount."""


def tolerance(name: str) -> dict[str, float]:
    """Of losses in bf16; a template's own vector, which PromptBERT subtracts, leaves little beside its rounding."""
    return {"rel": 0.05, "abs": 0.2 if name.startswith("promptbert") else 0.03}


CAPTURED = sorted(CASES.keys() - {"whitenedcse"})  # which refuses it
OFF_A_CARD = ("tncse", "jtcse", "jtcse_layers", "bepa_bi", "masked_lm", "promptbert_two")
RESUMED = (
    *("simcse", "tncse", "jtcse", "jtcse_mean", "bepa", "masked_lm_long", "promptbert_roberta"),
    *("esimcse", "rankcse", "mixcse", "diffcse", "infocse"),
)


@pytest.fixture
def configured(compose_run: Compose, tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., RunConfig]:
    """configured("jtcse", *GPU, ...) -> the run of a case."""

    def make(name: str, *overrides: str) -> RunConfig:
        case = CASES[name]
        settings = (*case.settings, *extra_settings(case, tiny, tmp_path), *STEP, *overrides)
        return compose_run(*settings, model_type=case.model_type, **case.arch)

    return make


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_losses_without_padding_are_those_with_it(
    configured: Callable[..., RunConfig], name: str, tmp_path: Path, fused: list[int]
) -> None:
    losses, norms = {}, {}
    for unpad in ("false", "true"):
        assert not fused
        config = configured(name, *GPU, f"unpad={unpad}", NO_DROPOUT, "trainer.max_steps=6")
        train(config, tmp_path / unpad)
        losses[unpad], norms[unpad] = (
            column(tmp_path / unpad, f"train/{key}") for key in ("loss", "grad_norm")
        )
    assert bool(fused) == (CASES[name].model_type != "modernbert")
    # A template's vector rounds, and PromptBERT's updates with it: on a card sixth losses are up to .4 apart.
    last = 1 if name.startswith((*DRAWN, "promptbert")) else 6
    assert losses["true"][:last] == pytest.approx(losses["false"][:last], **tolerance(name))
    if not name.startswith((*DRAWN, "promptbert")):
        first = int(name == "jtcse_layers")  # whose first norm bf16 does not hold: 185, and 447 in fp32
        assert norms["true"][first:3] == pytest.approx(norms["false"][first:3], rel=0.2, abs=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(
    configured: Callable[..., RunConfig], name: str, accumulate: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, fused: list[int],
) -> None:  # fmt: skip
    more = ("backbone.dropout=0.1", f"optimizer.accumulate={accumulate}", "trainer.max_steps=6")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(configured(name, *GPU, *more), whole)
    with monkeypatch.context() as patch:
        StopAt(3, patch)
        with pytest.raises(Interrupted):
            train(configured(name, *GPU, *more), parts)
    train(configured(name, *GPU, *more, "ckpt_path=last"), parts)
    assert fused
    assert column(parts, "train/loss") == column(whole, "train/loss")
    one, other = (torch.load(f / LAST, weights_only=True) for f in (whole, parts))
    assert one["state_dict"].keys() == other["state_dict"].keys()
    assert [n for n, v in one["state_dict"].items() if not torch.equal(v, other["state_dict"][n])] == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("step", "precision"), [("compile", "32-true"), ("graph", "32-true"), ("graph", "bf16-mixed")]
)
@pytest.mark.parametrize(
    "name", ["simcse", "simcse_roberta_mean", "tncse", "promptbert", "promptbert_roberta"]
)
def test_dropout_of_any_step_is_eagers(
    configured: Callable[..., RunConfig],
    name: str,
    step: str,
    precision: str,
    tmp_path: Path,
    fused: list[int],
) -> None:
    """With weights that stand still, losses and norms of one batch differ by the masks alone, and are independent.

    Over n batches, the mean of the differences from eager fp32 is 0 within its standard error: five of it err once in
    a million. bf16 rounds vectors that are nearly alike here, and so may move the means by itself.
    """
    more = ("backbone.dropout=0.1", "optimizer.lr=1e-12", "trainer.max_steps=140", "trainer.max_epochs=20")
    for kind, exact in (("eager", "32-true"), (step, precision)):
        train(configured(name, *GPU, *more, f"step={kind}", f"trainer.precision={exact}"), tmp_path / kind)
    half = precision == "bf16-mixed"
    assert bool(fused) == half
    for key in ("train/loss", "train/grad_norm"):
        one, other = (column(tmp_path / kind, key, 140) for kind in ("eager", step))
        apart = [a - b for a, b in zip(other, one, strict=True)]
        mean, error = statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5
        assert abs(mean) < 5 * error + half * 0.05 * statistics.mean(one), (
            key,
            mean,
            error,
            statistics.mean(one),
        )
        ratio = middle_half(other) / middle_half(one)
        assert 0.5 < ratio < 2, (key, ratio)


def middle_half(values: list[float]) -> float:
    """Its width: single norms of TNCSE are thrice the median, and would be all of a standard deviation."""
    first, _, third = statistics.quantiles(values)
    return third - first


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", OFF_A_CARD)
def test_off_a_card_the_step_computes_the_same_losses_without_padding(
    configured: Callable[..., RunConfig], name: str, precision: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, fused: list[int],
) -> None:  # fmt: skip
    """The work of a captured step, from the loader's budgets to the update; in bf16 by the fused blocks' plain form."""
    for room in ("check", "run", "finish"):
        monkeypatch.setattr(f"embedlab.run.{room}.resolved_step", lambda run: "graph")
    monkeypatch.setattr(Backbone, "unpads", lambda self, longest: True)
    monkeypatch.setattr(Backbone, "compile_blocks", lambda self, **k: None)
    monkeypatch.setattr(
        fused_block, "applies", lambda b, device: b.low_precision_weights and fused_block.fusable(b)
    )
    losses = {}
    for unpad in ("false", "true"):
        assert not fused
        more = (
            "step=eager",
            f"trainer.precision={precision}",
            f"unpad={unpad}",
            NO_DROPOUT,
            "trainer.max_steps=3",
        )
        train(configured(name, *more), tmp_path / unpad)
        losses[unpad] = column(tmp_path / unpad, "train/loss", 3)
    assert bool(fused) == (precision == "bf16-mixed")
    exact = precision == "32-true" and not name.startswith(DRAWN)
    last = 3 if exact or not name.startswith((*DRAWN, "promptbert")) else 1
    near = {"rel": 1e-4, "abs": 1e-4} if exact else tolerance(name)
    assert losses["true"][:last] == pytest.approx(losses["false"][:last], **near)
