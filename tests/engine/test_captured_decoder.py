"""Runs whose decoder is computed by written-out blocks: as those by PEFT's layers, in all that a run keeps.

On a card in a graph, elsewhere with interpreted kernels and without one (`tests.interpreted`). Mostly in fp32, where
both must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import embedlab
from embedlab.engine import whole_step
from embedlab.engine.module import Method
from embedlab.kernels.decoder import fused_decoder
from embedlab.kernels.decoder.fused_decoder import DecoderWeights
from embedlab.run.callbacks.checkpoints import LAST, Interrupted
from embedlab.run.run import train
from tests.engine.test_cuda_graph import column
from tests.interpreted import DEVICE, INTERPRETED, NEEDS
from tests.run.test_resume import StopAt

pytestmark = NEEDS
STEPS = 3
SIZE = {"width": 128, "heads": 4, "ffn": 64, "layers": 2}
BASICS = (
    f"trainer={'gpu' if DEVICE == 'cuda' else 'cpu'}", "data.pad_to_multiple=4", f"trainer.max_steps={STEPS}",
    "adapter=lora", "adapter.r=16", "optimizer.lr=2e-3", "data.max_length=16", "unpad=true", "trainer.max_epochs=4",
    "data.batch_size=4",
)  # fmt: skip
CSESFP = ("method=csesfp", "pooling=rep2", "template=eol_sum")
PROMPTEOL = ("method=prompteol", "pooling=last", "template=eol")
STILL = ("adapter.dropout=1e-9", "trainer.precision=32-true")


@pytest.fixture
def run(compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    """run(name, *overrides, fused=..., stop=...) -> its folder."""
    if INTERPRETED:
        for room in ("check", "run", "finish"):
            monkeypatch.setattr(f"embedlab.run.{room}.resolved_step", lambda run: "graph")
        monkeypatch.setattr("embedlab.backbones.backbone.packed_kernel", lambda config, longest: True)
    monkeypatch.setattr("embedlab.backbones.backbone.Backbone.compile_blocks", lambda self, **k: None)

    def go(
        name: str, *overrides: str, fused: bool = True, runs: bool = True, stop: int | None = None
    ) -> Path:
        step = () if INTERPRETED else ("step=graph",)
        config = compose_run(*BASICS, *step, *overrides, model_type="llama", **SIZE)
        with monkeypatch.context() as patch:
            patch.setenv("EMBEDLAB_KERNELS", f"fused_decoder={int(fused)}")
            ran = _counted(patch)
            if stop is not None:
                StopAt(stop, patch)
                with pytest.raises(Interrupted):
                    train(config, tmp_path / name)
            else:
                train(config, tmp_path / name)
            assert bool(ran) == (fused and runs)
        return tmp_path / name  # type: ignore[no-any-return]

    return go


@pytest.fixture
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_step, "DecoderWeights", partial(DecoderWeights, dtype=torch.float32))
    monkeypatch.setattr(fused_decoder, "applies", lambda weights, device: weights is not None)


def _counted(patch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each pass."""
    ran: list[int] = []
    states = fused_decoder.states

    def counted(*args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        ran.append(1)
        return states(*args, **options)

    patch.setattr(fused_decoder, "states", counted)
    return ran


def kept(folder: Path) -> dict[str, Any]:
    return torch.load(folder / LAST, weights_only=True)  # type: ignore[no-any-return]


def near(one: Path, other: Path) -> None:
    """Losses and norms of the steps, weights, the optimiser's state and vectors of the saved encoder."""
    for name in ("train/loss", "train/grad_norm"):
        assert column(one, name, STEPS) == pytest.approx(column(other, name, STEPS), rel=2e-3, abs=1e-5), name
    a, b = kept(one), kept(other)
    assert a["state_dict"].keys() == b["state_dict"].keys()
    mine, theirs = (torch.cat([v.flatten().cpu() for v in k["state_dict"].values()]) for k in (a, b))
    # AdamW divides by what is next to nothing for some.
    assert (mine - theirs).abs().mean() < 0.01 * STEPS * 2e-3
    one_state, other_state = (k["optimizer_states"][0] for k in (a, b))
    assert one_state["param_groups"] == other_state["param_groups"]
    for i, state in other_state["state"].items():
        found = one_state["state"][i]
        assert found["step"] == state["step"]
        assert all(found[k].shape == v.shape and found[k].dtype == v.dtype for k, v in state.items())
    texts = ["a cat", "two dogs ran"]
    x, y = (embedlab.load(str(folder)).encode(texts) for folder in (one, other))
    assert x == pytest.approx(y, abs=5e-3)


@pytest.mark.usefixtures("in_fp32")
@pytest.mark.parametrize(
    "more",
    [
        CSESFP,
        PROMPTEOL,
        (*CSESFP, "optimizer.accumulate=2"),
        (*CSESFP, "optimizer.clip=0.1", "optimizer.weight_decay=0.1"),
        ("method=simcse", "pooling=mean"),
    ],
    ids=["csesfp", "prompteol", "accumulate", "clip", "mean"],
)
def test_a_run_is_that_by_pefts_layers(run: Callable[..., Path], more: tuple[str, ...]) -> None:
    near(run("with", *STILL, *more), run("without", *STILL, *more, fused=False))


@pytest.mark.usefixtures("in_fp32")
def test_a_resumed_run_is_the_uninterrupted_one(run: Callable[..., Path]) -> None:
    """To the last bit, dropout included."""
    settings = (*CSESFP, "adapter.dropout=0.1", STILL[1])
    whole = run("whole", *settings)
    run("parts", *settings, stop=2)
    parts = run("parts", *settings, "ckpt_path=last")
    assert column(parts, "train/loss", STEPS) == column(whole, "train/loss", STEPS)
    one, other = kept(whole), kept(parts)
    assert all(torch.equal(v, other["state_dict"][k]) for k, v in one["state_dict"].items())


@pytest.mark.usefixtures("in_fp32")
@pytest.mark.parametrize("what", ["lora_", "base_layer", "norm", "embed_tokens"])
def test_weights_written_from_outside_reach_the_next_step(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    step = Method.training_step

    def written(self, batch, batch_idx):  # type: ignore[no-untyped-def]
        if batch_idx == 1:
            with torch.no_grad():
                for name, p in self.named_parameters():
                    if what in name:
                        p.mul_(0.5).add_(0.01)
        return step(self, batch, batch_idx)

    untouched = column(run("untouched", *STILL, *CSESFP), "train/loss", STEPS)
    monkeypatch.setattr(Method, "training_step", written)
    one, other = (
        column(run(f"{fused}", *STILL, *CSESFP, fused=fused), "train/loss", STEPS) for fused in (True, False)
    )
    assert one == pytest.approx(other, rel=2e-3)
    assert one[:1] == pytest.approx(untouched[:1], rel=1e-6)
    assert one[1] != pytest.approx(untouched[1], rel=1e-4)


@pytest.mark.gpu
def test_in_half_precision_losses_are_near(run: Callable[..., Path]) -> None:
    """On a card alone: interpreted products of bf16 have no meaning."""
    settings = (*CSESFP, "adapter.dropout=1e-9", "trainer.precision=bf16-mixed")
    one, other = (
        column(run(f"{fused}", *settings, fused=fused), "train/loss", STEPS) for fused in (True, False)
    )
    assert one == pytest.approx(other, rel=0.05, abs=0.05)


@pytest.mark.usefixtures("in_fp32")
def test_a_decoder_that_looks_both_ways_is_left_alone(run: Callable[..., Path]) -> None:
    more = ("method=simcse", "pooling=mean", "backbone.bidirectional=true", "adapter.dropout=0.1", STILL[1])
    run("both", *more, "unpad=false", runs=False)


@pytest.mark.usefixtures("in_fp32")
def test_a_decoder_that_is_told_positions_is_left_alone(run: Callable[..., Path]) -> None:
    """PromptBERT's templates without a sentence have their own, beside the sentences: no token is read alone."""
    more = (
        "method=promptbert", "pooling=last", "template.text='This {sentence} means'",
        "method.second_template.text='So {sentence} is'", "unpad=true",
    )  # fmt: skip
    near(run("with", *STILL, *more, runs=False), run("without", *STILL, *more, fused=False))
