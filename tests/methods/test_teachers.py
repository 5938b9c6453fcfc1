"""Frozen encoders whose vectors are computed once give those that one in the step gives, of every set and view."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import embedlab
from embedlab.config.run import RunConfig
from embedlab.encoders.base import Encoder
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.usage import Usage
from embedlab.engine.step import EagerStep
from embedlab.errors import UserError
from embedlab.methods.supervised import view_names
from embedlab.methods.teachers import TaughtMethod
from embedlab.run.run import build, train
from tests.engine.test_cuda_graph import column
from tests.tiny_run import compose_run as compose_run
from tests.tiny_run import sentences
from tests.tiny_run import text_file as text_file

Tiny = Callable[..., Path]
Compose = Callable[..., RunConfig]


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Path]:
    """With texts that come again, in other roles too, and rows that are left out for one of their texts."""
    texts = sentences(160, seed=4)
    a, b, c, d = (texts[i::4] for i in range(4))
    a[7], b[11], c[3] = a[2], a[5], b[8]
    rated = [(x, y, str(i % 5)) for i, (x, y) in enumerate(zip(c, d, strict=True))]
    rows = {
        "pairs": [["anchor", "positive"], *zip(a, [*b[:4], " ", *b[5:]], strict=True)],
        "triplets": [["anchor", "positive", "negative"], *zip(b, ["", *c[1:]], d, strict=True)],
        "scored": [["first", "second", "score"], *rated],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(map(",".join, lines)) + "\n")
    return {name: tmp_path / f"{name}.csv" for name in rows}


GIST = ("method=supervised", "method.objective=gist", "data.max_length=12", "pooling=mean")
SETS: dict[str, tuple[str, ...]] = {
    "pairs": ("data=pairs", "data.files={pairs}", "+data.prompts.anchor='the old '"),
    "triplets": ("data=triplets", "data.files={triplets}", "data.duplicates=drop"),
    "mix": (
        "data=mix", "data.mix.a={{name: scored, files: {scored}, objective: cosent}}",
        "data.mix.b={{name: triplets, files: {triplets}, prompts: {{negatives: 'red '}}}}",
        "data.mix.c={{name: pairs, files: {pairs}, limit: 30, objective: in_batch}}",
        "data.mix.d={{name: pairs, files: {pairs}}}", "data.no_duplicates=true",
    ),
}  # fmt: skip


@pytest.fixture(params=["alike", "own tokens", "shorter", "with a usage"])
def guide(request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Path) -> Path:
    """The folder of an encoder: of the student's tokens, of others, of fewer, or with prompts and a width."""
    kind = request.param
    found: Any = embedlab.load(tiny("roberta" if kind == "own tokens" else "bert", width=24, heads=2, seed=5))
    if kind == "shorter":
        found.tokenization.max_length = 6
    elif kind == "with a usage":
        found.usage = Usage({"text": "a cat "}, "text", truncate_dim=8)
    found.save(tmp_path / "guide")
    return tmp_path / "guide"


def begun(run: RunConfig, folder: Path) -> tuple[TaughtMethod, Any]:
    """A run's method and data, the teachers as they are before the first step."""
    method, data = build(run, folder)
    assert isinstance(method, TaughtMethod)
    told: Any = SimpleNamespace(
        trainer=SimpleNamespace(datamodule=data), device=torch.device("cpu"), is_taught=method.is_taught,
        runner=EagerStep(),
    )  # fmt: skip
    for teacher in method.teachers:
        teacher.begin(told)
    return method, data


@pytest.mark.parametrize("sets", SETS)
def test_vectors_computed_once_are_those_of_a_guide_in_the_step(
    sets: str, guide: Path, tables: dict[str, Path], compose_run: Compose, tmp_path: Path
) -> None:
    own = [*GIST, f"method.guide={guide}", *(each.format(**tables) for each in SETS[sets])]
    in_step, data = begun(compose_run(*own), tmp_path / "in_step")
    cached, other = begun(compose_run(*own, "method.cached=true"), tmp_path / "cached")
    seen = 0
    for batch, same in zip(data.train_dataloader(), other.train_dataloader(), strict=True):
        assert batch["rows"].tolist() == same["rows"].tolist()
        assert not any("teacher" in view for view in same), "no tokens of its own"
        if batch.get("data_set") in ("a", "c"):
            continue
        names = view_names(batch)
        expected = in_step.teachers[0](batch, names)
        assert expected.shape == (len(names) * 8, 24)
        np.testing.assert_allclose(cached.teachers[0](same, names), expected, rtol=1e-3, atol=1e-3)
        seen += 1
    assert seen >= 4


@pytest.mark.parametrize("cached", ["true", "false"])
def test_a_run_goes_on_with_its_teacher_and_no_other_at_its_place(
    tiny: Tiny, compose_run: Compose, tmp_path: Path, cached: str, caplog: pytest.LogCaptureFixture
) -> None:
    teacher, other = embedlab.load(tiny("roberta", seed=5)), embedlab.load(tiny("roberta", seed=6))
    teacher.usage = Usage({"text": "a cat "}, "text", truncate_dim=8)
    teacher.save(tmp_path / "teacher")
    own = (
        "method=distil", f"method.teacher={tmp_path / 'teacher'}", "method.k1=null", "method.similarity=1",
        f"method.cached={cached}", "pooling=mean",
    )  # fmt: skip
    train(compose_run(*own, "trainer.max_steps=2"), tmp_path / "run")
    assert "default prompt 'a cat ' is not added" in caplog.text
    assert "keeps 8 features teaches all" in caplog.text
    train(compose_run(*own, "trainer.max_steps=3", "ckpt_path=last"), tmp_path / "run")
    other.save(tmp_path / "teacher")
    with pytest.raises(UserError, match=r"a teacher has changed since.*ckpt_path"):
        train(compose_run(*own, "trainer.max_steps=4", "ckpt_path=last"), tmp_path / "run")


@pytest.mark.parametrize("cached", ["true", "false"])
@pytest.mark.parametrize("sets", ["pairs", "mix"])
def test_a_teachers_weights_are_hashed_once_a_run(
    cached: str, sets: str, tables: dict[str, Path], tiny: Tiny, compose_run: Compose, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whatever its sets and roles, at the beginning and where it goes on; another teacher has another hash."""
    hashed: list[
        SentenceEncoder
    ] = []  # the encoders themselves: the place of one that is gone may be another's
    digest = SentenceEncoder._digest

    def counted(encoder: SentenceEncoder) -> str:
        hashed.append(encoder)
        return digest(encoder)

    monkeypatch.setattr(SentenceEncoder, "_digest", counted)
    own = [*GIST, f"method.cached={cached}", *(each.format(**tables) for each in SETS[sets])]
    guide = f"method.guide={tiny('roberta', width=24, heads=2, seed=5)}"
    keys = lambda path: set((path / "cache" / "vectors").glob("*/vectors.npy"))  # noqa: E731
    for steps, more in ((2, ()), (3, ("ckpt_path=last",))):
        hashed.clear()
        train(compose_run(*own, guide, f"trainer.max_steps={steps}", *more), tmp_path / "run")
        assert [encoder.dim for encoder in hashed].count(24) == 1
    before = keys(tmp_path)
    other = f"method.guide={tiny('roberta', width=24, heads=2, seed=6)}"
    train(compose_run(*own, other, "trainer.max_steps=1"), tmp_path / "other")
    assert len(keys(tmp_path)) == 2 * len(before)
    assert bool(before) == (cached == "true")


def losses(folder: Path) -> list[float]:
    return column(folder, "train/loss")


def test_they_are_computed_once_and_train_alike(
    tables: dict[str, Path], tiny: Tiny, compose_run: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mix, only of the sets that a guide is asked for."""
    own = [*GIST, f"method.guide={tiny('roberta', width=24, heads=2, seed=5)}", "backbone.dropout=0.0",
           *(each.format(**tables) for each in SETS["mix"]), "trainer.max_steps=6", "trainer.max_epochs=3"]  # fmt: skip
    train(compose_run(*own), tmp_path / "in_step")
    train(compose_run(*own, "method.cached=true"), tmp_path / "once")
    assert losses(tmp_path / "once") == pytest.approx(losses(tmp_path / "in_step"), rel=2e-3)
    kept = [np.load(path) for path in (tmp_path / "cache" / "vectors").glob("*/vectors.npy")]
    assert sorted(map(len, kept)) == [39] * 5, "two roles of pairs and three of triplets, of the guided sets"

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(Encoder, "encode", refuse)
    train(compose_run(*own, "method.cached=true", "optimizer.lr=2e-3"), tmp_path / "again")
    assert losses(tmp_path / "again")[0] == losses(tmp_path / "once")[0]


def test_rankcse_has_its_teachers_vectors_once(tiny: Tiny, compose_run: Compose, tmp_path: Path) -> None:
    own = ("method=rankcse", f"method.teacher={tiny('roberta', width=24, heads=2, seed=5)}", "trainer.max_steps=6",
           f"method.teacher2={tiny('bert', seed=7)}", "method.teacher_pooling=mean")  # fmt: skip
    train(compose_run(*own), tmp_path / "in_step")
    train(compose_run(*own, "method.cached=true"), tmp_path / "once")
    assert losses(tmp_path / "once") == pytest.approx(losses(tmp_path / "in_step"), rel=2e-3)
    assert len([*(tmp_path / "cache" / "vectors").glob("*/vectors.npy")]) == 2
