"""An ensemble: the weighted sum of finished encoders, without a step of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import embedlab
from embedlab.cli.main import main
from embedlab.errors import UserError
from embedlab.methods import method_class, method_config
from embedlab.methods.ensemble import EnsembleConfig
from tests.methods.runs import run_of
from tests.methods.test_distil import encoder

TEXTS = ["a cat", "two dogs ran across the field", ""]


def test_a_run_exports_the_weighted_sum(
    tiny: Callable[..., Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    members = [encoder(tiny, seed) for seed in (0, 1)]
    for name, member in zip(("first", "second"), members, strict=True):
        member.save(tmp_path / name)
    assert not main(
        ["train", "method=ensemble", f"method.first={tmp_path / 'first'}", f"method.second={tmp_path / 'second'}",
         "method.weights=[0.25,-2]", "backbone=local", f"backbone.path={tiny('bert')}", "pooling=cls",
         f"data.files={text_file}", "trainer=cpu", "evaluation.final=[]", "evaluation.before=false",
         "callbacks.progress=none", "data.report=false", "data.batch_size=8", f"hydra.run.dir={tmp_path / 'run'}"]
    )  # fmt: skip
    first, second = (m.eval().encode(TEXTS, normalize=False) for m in members)
    summed = embedlab.load(str(tmp_path / "run")).encode(TEXTS, normalize=False)
    np.testing.assert_allclose(summed, 0.25 * first - 2 * second, rtol=1e-5, atol=1e-5)


def test_there_is_nothing_to_train() -> None:
    config = method_config({"name": "ensemble", "first": "a", "second": "b"})
    assert config.idle
    assert config.towers == 2
    assert config.check(None, run_of()) == []  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError):
        method_class("ensemble").losses(None, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EnsembleConfig(second="b"), "method.first=RUN"),
        (EnsembleConfig(first="a"), "method.second=RUN"),
        (EnsembleConfig(first="a", second="b", weights=(0.0, 0.0)), r"method.weights=\[0.0, 0.0\]"),
    ],
)
def test_a_missing_member_is_named(config: EnsembleConfig, words: str) -> None:
    with pytest.raises(UserError, match=words):
        config.check(None, run_of())  # type: ignore[arg-type]
