"""Distillation from teachers that read text otherwise than the student, and ensembles with such a member."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import embedlab
from embedlab.config.run import RunConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.twin import ensemble
from embedlab.methods.distil import Distil
from embedlab.pooling import pooling_config
from embedlab.run.run import build, train
from tests.support import SENTENCES

Tiny = Callable[..., Path]
Compose = Callable[..., RunConfig]
TEXTS = list(SENTENCES[:6])


def member(folder: Path) -> SentenceEncoder:
    encoder = embedlab.load(folder)
    assert isinstance(encoder, SentenceEncoder)
    encoder.read_by(pooling_config("cls"))
    return encoder


@pytest.fixture(params=["a twin and a third", "one"])
def teacher(request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Path) -> Path:
    third = member(tiny("roberta"))
    members = [ensemble([member(tiny("bert", seed=s)) for s in (1, 2)], [1, 1]), third]
    (third if request.param == "one" else ensemble(members, [0.3, 0.7])).save(tmp_path / "teacher")
    return tmp_path / "teacher"


def test_the_teacher_reads_its_own_tokens(teacher: Path, compose_run: Compose, tmp_path: Path) -> None:
    config = compose_run("method=distil", "pooling=cls", f"method.teacher={teacher}", "trainer.max_steps=2")
    method, _ = build(config, tmp_path / "run")
    assert isinstance(method, Distil)
    views = method.views(method.fields(config.method, ("sentence",), None), 32)
    batch = {view: tokens.pad(tokens.ids(TEXTS), 8) for view, (_, tokens) in views.items()}
    with torch.no_grad():
        target = method.teachers[0].vectors(batch).numpy()
    np.testing.assert_allclose(target, embedlab.load(teacher).encode(TEXTS), atol=1e-5)
    train(config, tmp_path / "run")
    assert (tmp_path / "run" / "export" / "embedlab.json").is_file()


def test_an_ensemble_reads_a_plain_member_as_it_is_told(
    tiny: Tiny, compose_run: Compose, tmp_path: Path
) -> None:
    first, second = tiny("bert", seed=1), tiny("roberta")
    settings = ("method=ensemble", f"method.first={first}", f"method.second={second}", "method.pooling=cls")
    train(compose_run(*settings), tmp_path / "run")
    expected = 0.3 * member(first).encode(TEXTS) + 0.7 * member(second).encode(TEXTS)
    np.testing.assert_allclose(embedlab.load(tmp_path / "run").encode(TEXTS), expected, atol=1e-5)
