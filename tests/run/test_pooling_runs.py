"""Whole runs of S2Sent, its controls and PromptBERT on a tiny backbone."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

import embedlab
from embedlab.run.callbacks.checkpoints import LAST
from embedlab.run.run import train

S2 = ("pooling=s2sent", "pooling.n=2", "pooling.r=4", "method.mlp=none", "trainer.max_steps=2")


def metrics(folder: Path) -> dict[str, list[float]]:
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {k: [float(r[k]) for r in rows if r[k]] for k in rows[0]}


def test_the_gate_is_trained_exported_and_shown(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    config = compose_run(*S2, "pooling.lr_mult=20")
    train(config, tmp_path)
    shown = metrics(tmp_path)
    assert shown["train/s2sent/weight_mean"] == pytest.approx([0.5, 0.5])
    assert len(shown["train/s2sent/weight_std"]) == len(shown["train/s2sent/gate_saturated"]) == 2
    encoder = embedlab.load(str(tmp_path / "export"))
    gate = encoder.pooling.gate.excite.weight
    groups = torch.load(tmp_path / LAST, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert [g["initial_lr"] for g in groups] == pytest.approx([1e-3, 2e-2])
    # Two AdamW steps at twenty times the rate move a weight by up to 0.03, from a spread of 0.02.
    assert gate.std() > 0.023
    again = embedlab.load(str(tmp_path / "export"))
    texts = ["a cat runs", "the old house on the red tree"]
    assert np.array_equal(encoder.encode(texts), again.encode(texts))
    gate.data.zero_()
    assert not np.allclose(encoder.encode(texts), again.encode(texts))


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", ("pooling=s2sent", "pooling.r=4", "data=nli")),
        ("roberta", ("pooling=s2_official", "pooling.r=4")),
        ("bert", ("pooling=feature_mix",)),
    ],
)
def test_other_backbones_and_poolings(compose_run, tmp_path, model_type, overrides):  # type: ignore[no-untyped-def]
    settings = ["pooling.n=2", "method.mlp=none", "trainer.max_steps=1", *overrides]
    if "data=nli" in overrides:
        triples = tmp_path / "triples.csv"
        rows = [
            f"a cat {w},the cat {w},a dog {w}"
            for w in ("sees", "runs", "likes", "is", "was", "has", "eats", "hears")
        ]
        triples.write_text("\n".join(["sent0,sent1,hard_neg", *rows]) + "\n")
        settings.append(f"data.files={triples}")
    train(compose_run(*settings, model_type=model_type), tmp_path / "run")
    assert embedlab.load(str(tmp_path / "run" / "export")).encode(["a cat"]).shape == (1, 32)


@pytest.mark.parametrize(
    "pooling", [("pooling=mask",), ("pooling=s2sent", "pooling.n=2", "pooling.r=4", "pooling.pool=mean")]
)
def test_promptbert_runs_and_scores(compose_run, sts_dir, tmp_path, pooling):  # type: ignore[no-untyped-def]
    config = compose_run(
        "method=promptbert", "template=promptbert_bert", *pooling, "trainer.max_steps=2", "method.denoise_dev=true",
        f"evaluation.sts_dir={sts_dir}", "evaluation.every=1",
    )  # fmt: skip
    train(config, tmp_path)
    shown = metrics(tmp_path)
    assert len(shown["train/loss"]) == 2
    assert len(shown["dev/spearman"]) == 3
    encoder = embedlab.load(str(tmp_path / "export"))
    assert encoder.tokenization.template.text == config.template.text
    assert encoder.tokenization.preparation == "stopped"
    assert np.array_equal(encoder.encode(["a cat"]), encoder.encode(["a cat."]))
    assert encoder.encode(["a cat", ""]).shape == (2, 32)


PROMPTED = ("method=promptbert", "template=promptbert_bert", "backbone.dropout=0.0", "trainer.max_steps=4")
GATED = ("pooling=s2sent", "pooling.n=2", "pooling.r=4", "pooling.pool=mask", "pooling.lr_mult=10")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pooling",
    [
        ("pooling=mask",),
        GATED,
        (*GATED, "pooling.squeeze=none"),
        (*GATED, "pooling.fs_tokens=sentence", "pooling.m=8"),
        (*GATED, "pooling.invalid=grid6", "pooling.block_norm=global_exp", "pooling.block_offset=1"),
    ],
)
def test_a_captured_step_is_the_eager_one(compose_run, tmp_path, pooling):  # type: ignore[no-untyped-def]
    losses = {}
    for step in ("eager", "graph"):
        config = compose_run(
            *PROMPTED,
            *pooling,
            f"step={step}",
            "trainer=gpu",
            "trainer.precision=32-true",
            "data.pad_to_multiple=4",
        )
        train(config, tmp_path / step)
        losses[step] = metrics(tmp_path / step)["train/loss"]
    assert losses["graph"] == pytest.approx(losses["eager"], rel=1e-3)
    assert losses["eager"][0] != pytest.approx(losses["eager"][-1], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pooling", ["s2sent", "s2_official", "s2_ss_only", "s2_frozen", "scalar_mix", "last_n"]
)
def test_every_form_is_captured_in_half_precision(compose_run, tmp_path, pooling):  # type: ignore[no-untyped-def]
    config = compose_run(
        f"pooling={pooling}", "pooling.n=2", "trainer=gpu", "trainer.max_steps=3", "step=graph"
    )
    train(config, tmp_path)
    assert np.isfinite(metrics(tmp_path)["train/loss"]).all()
