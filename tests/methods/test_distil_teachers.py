"""Distillation from teachers that read text otherwise than the student, and ensembles with such a member."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import embedlab
from embedlab.backbones import Backbone
from embedlab.config.run import RunConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.twin import ensemble
from embedlab.methods.distil import Distil
from embedlab.pooling import pooling_config
from embedlab.run.callbacks.checkpoints import Interrupted
from embedlab.run.run import build, train
from tests.engine.test_cuda_graph import column
from tests.evaluation.helpers import write_sts_folder
from tests.run.test_resume import StopAt
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
        target = method.teachers[0](batch).numpy()
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


TERMS = ("method.k1=null", "method.cosine=1", "method.similarity=5", "method.kl=0.2")


@pytest.fixture
def distilling(compose_run: Compose, tiny: Tiny) -> Callable[..., RunConfig]:
    """A student of two teachers with other tokenizers and widths."""
    teachers = f"method.teacher=[{tiny('roberta', width=48, seed=1)},{tiny('bert', width=64, vocab_size=90)}]"
    still = (
        "method=distil",
        "pooling=mean",
        "backbone.dropout=0.0",
        "trainer.max_steps=6",
        "trainer.max_epochs=4",
    )
    return lambda *more: compose_run(*still, teachers, *TERMS, *more)


def losses(folder: Path) -> list[float]:
    return column(folder, "train/loss")


@pytest.mark.parametrize("unpad", ["true", "false"])
def test_cached_vectors_teach_what_those_of_each_step_do(
    distilling: Callable[..., RunConfig], tmp_path: Path, unpad: str
) -> None:
    train(distilling(), tmp_path / "in_step")
    config = distilling("method.cached=true", f"unpad={unpad}")
    train(config, tmp_path / "cached")
    assert losses(tmp_path / "cached") == pytest.approx(losses(tmp_path / "in_step"), rel=2e-3)
    assert losses(tmp_path / "cached")[-1] < losses(tmp_path / "cached")[0]
    assert (
        "projections.1.weight"
        in torch.load(tmp_path / "cached" / "last.ckpt", weights_only=True)["state_dict"]
    )
    exported = embedlab.load(tmp_path / "cached")
    assert exported.dim == 32
    assert not any("projection" in name for name in exported.state_dict())


def test_the_losses_are_their_terms(distilling: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Each row's against the batch, the teachers' similarities averaged, a text that comes again left out of the KL."""
    method, _ = build(distilling(), tmp_path / "run")
    assert isinstance(method, Distil)
    method.eval()
    texts = [*TEXTS, TEXTS[0]]
    views = method.views(method.fields(method.config, ("sentence",), None), 32)
    batch = {name: tokens.pad(tokens.ids(texts), 8) for name, (_, tokens) in views.items()}
    batch["sentence"]["hash"] = torch.tensor([texts.index(t) for t in texts])
    with torch.no_grad():
        found = method.losses(batch).losses
        student = torch.from_numpy(method.encoder.encode(texts))
        targets = [torch.from_numpy(t.encoder.encode(texts)) for t in method.teachers]
        unit = torch.nn.functional.normalize
        own = unit(student, dim=1) @ unit(student, dim=1).T
        theirs = sum(unit(t, dim=1) @ unit(t, dim=1).T for t in targets) / 2
        near = [
            1 - torch.cosine_similarity(p(student), t).mean()
            for p, t in zip(method.projections, targets, strict=True)
        ]
        kl = 0.0
        for i, text in enumerate(texts):
            others = [j for j, other in enumerate(texts) if other != text]
            p, q = ((x[i, others] / 0.05).softmax(0).double() for x in (theirs, own))
            kl += float((p * (p / q).log()).sum()) / len(texts)
    assert float(found["cosine"]) == pytest.approx(float(sum(near)) / 2, rel=1e-4)
    assert float(found["similarity"]) == pytest.approx(5 * float((own - theirs).square().mean()), rel=1e-4)
    assert float(found["kl"]) == pytest.approx(0.2 * kl, rel=1e-3)


def test_a_resumed_student_is_the_uninterrupted_one(
    distilling: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(distilling("method.cached=true"), tmp_path / "whole")
    with monkeypatch.context() as patch:
        StopAt(3, patch)
        with pytest.raises(Interrupted):
            train(distilling("method.cached=true"), tmp_path / "parts")
    train(distilling("method.cached=true", "ckpt_path=last"), tmp_path / "parts")
    one, other = (torch.load(tmp_path / f / "last.ckpt", weights_only=True) for f in ("whole", "parts"))
    assert [n for n, v in one["state_dict"].items() if not torch.equal(v, other["state_dict"][n])] == []


def test_a_cached_teacher_reads_no_further_than_it_can(
    distilling: Callable[..., RunConfig], tmp_path: Path
) -> None:
    method, _ = build(distilling("method.cached=true", "data.max_length=60"), tmp_path / "run")
    assert isinstance(method, Distil)
    method.teachers[0].encoder.tokenizer.model_max_length = 20
    assert method.views({}, 60) == {}
    assert [t.encoder.tokenization.row_limit for t in method.teachers] == [20, 60]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_off_a_card_a_captured_steps_work_gives_the_same_losses(
    distilling: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    train(distilling("method.cached=true", "unpad=false"), tmp_path / "eager")
    for room in ("check", "run", "finish"):
        monkeypatch.setattr(f"embedlab.run.{room}.resolved_step", lambda run: "graph")
    monkeypatch.setattr(Backbone, "unpads", lambda self, longest: True)
    monkeypatch.setattr(Backbone, "compile_blocks", lambda self, **k: None)
    for unpad in ("false", "true"):
        more = ("method.cached=true", f"trainer.precision={precision}", f"unpad={unpad}")
        train(distilling(*more), tmp_path / unpad)
        tolerance = 1e-4 if precision == "32-true" else 0.03
        assert losses(tmp_path / unpad) == pytest.approx(losses(tmp_path / "eager"), rel=tolerance)


def test_texts_that_stand_in_an_evaluation_set_are_left_out_of_the_vectors_too(
    distilling: Callable[..., RunConfig], text_file: Path, tmp_path: Path
) -> None:
    """The texts are read a second time for the teachers, who must see the same rows."""
    folder = write_sts_folder(tmp_path / "sts")
    table = gzip.decompress((folder / "sts13_test.tsv.gz").read_bytes()).decode()
    text = tmp_path / "text.txt"
    text.write_text(f"{table.splitlines()[1].split(chr(9))[3]}\n{text_file.read_text()}")
    more = (
        f"data.files={text}",
        "data.decontaminate=[sts]",
        f"evaluation.sts_dir={folder}",
        "evaluation.select=last",
    )
    train(distilling("method.cached=true", "trainer.max_steps=2", *more), tmp_path / "run")
    found = [np.load(path) for path in (tmp_path / "cache" / "vectors").glob("*/vectors.npy")]
    assert [len(vectors) for vectors in found] == [len(text_file.read_text().splitlines())] * 2


@pytest.mark.gpu
def test_a_captured_packed_step_gives_the_same_losses(
    distilling: Callable[..., RunConfig], tmp_path: Path
) -> None:
    train(distilling("method.cached=true"), tmp_path / "cpu")
    for unpad in ("false", "true"):
        more = (
            "method.cached=true",
            "trainer=gpu",
            "trainer.precision=bf16-mixed",
            "step=graph",
            f"unpad={unpad}",
        )
        train(distilling(*more), tmp_path / unpad)
        assert losses(tmp_path / unpad) == pytest.approx(losses(tmp_path / "cpu"), rel=0.05)
