"""Runs on architectures out of the ordinary: trained, stored and read again, or refused before weights are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import embedlab
from embedlab.config.run import RunConfig
from embedlab.errors import UserError
from embedlab.run.callbacks.checkpoints import LAST
from embedlab.run.check import check_run, resolved_step
from embedlab.run.run import train
from tests.model_zoo import tiny_folder

Compose = Callable[..., RunConfig]
TEXTS = ["w6 w7 w8", "w30", ""]


@pytest.fixture
def folder(model_type: str, tmp_path: Path) -> str:
    return f"backbone.path={tiny_folder(model_type, tmp_path / 'model')}"


@pytest.mark.parametrize("model_type", ["albert", "bart", "bloom", "fnet", "mpnet", "t5", "xlnet"])
def test_a_run_is_stored_and_comes_back(compose_run: Compose, tmp_path: Path, folder: str) -> None:
    run = compose_run(
        folder, "backbone.dropout=0.1", "pooling=mean", "trainer.max_steps=2", "evaluation.select=last"
    )
    train(run, tmp_path / "run")
    vectors = [embedlab.load(tmp_path / "run" / name).encode(TEXTS) for name in ("export", LAST)]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)
    untrained = embedlab.load(folder.partition("=")[2]).encode(TEXTS)
    assert np.abs(untrained - vectors[0]).max() > 1e-4
    again = embedlab.load(tmp_path / "run" / "export")
    again.save(tmp_path / "saved")
    np.testing.assert_array_equal(embedlab.load(tmp_path / "saved").encode(TEXTS), again.encode(TEXTS))


@pytest.mark.parametrize(
    ("model_type", "setting", "words"),
    [
        ("albert", "adapter=lora", "no list of transformer blocks"),
        ("albert", "step=compile", "no list of transformer blocks"),
        ("mamba", "adapter=lora", "no LoRA for mamba"),
        ("canine", "pooling=s2sent", "no hidden state after each layer"),
        ("canine", "pooling=first_last", "no hidden state after each layer"),
    ],
)
def test_what_an_architecture_lacks_is_refused_without_weights(
    compose_run: Compose, tmp_path: Path, folder: str, setting: str, words: str
) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    pooling = () if setting.startswith("pooling") else ("pooling=mean",)
    with pytest.raises(UserError, match=words) as caught:
        check_run(compose_run(folder, "backbone.dropout=0.1", *pooling, setting))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "step"), [("albert", "eager"), ("mpnet", "compile"), ("fnet", "compile")]
)
def test_steps_on_a_card_are_those_that_the_architecture_allows(
    compose_run: Compose, monkeypatch: pytest.MonkeyPatch, folder: str, model_type: str, step: str
) -> None:
    monkeypatch.setattr("embedlab.run.check.on_cuda", lambda trainer: True)
    monkeypatch.setattr("embedlab.run.check.device_count", lambda trainer: 1)
    settings = (folder, "pooling=mean", "trainer.precision=bf16-mixed")
    assert resolved_step(compose_run(*settings)) == step
    with pytest.raises(UserError, match=model_type):
        resolved_step(compose_run(*settings, "step=graph"))
