"""Files that the code of 3e130d8 wrote (`tests/old/make.py`) mean today what they meant then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedlab
from embedlab.cli.main import main
from embedlab.encoders.folder import same_encoder
from tests.methods.golden import losses
from tests.old.make import BASICS, ENCODERS, HERE, QUERY, RUN

EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
QUERIES = (HERE / "queries.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the old files, as the working folder: their paths are relative to it."""
    shutil.copytree(HERE, tmp_path / "old", ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    monkeypatch.chdir(tmp_path / "old")
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "old"


def assert_same(name: str, vectors: np.ndarray) -> None:
    """Equal to the old vectors of `QUERIES`, to 1e-5 of their length; else how far apart, as cosines."""
    then = np.asarray(EXPECTED["vectors"][name])
    assert vectors.shape == then.shape
    lengths = np.linalg.norm(then, axis=1)
    cosines = (vectors * then).sum(1) / lengths / np.linalg.norm(vectors, axis=1)
    apart = np.abs(vectors - then).max(1) / lengths
    assert (apart <= 1e-5).all(), f"{name}: cosines to the old vectors {cosines}, differences {apart}"


def test_the_old_vectors_tell_encoders_and_sentences_apart() -> None:
    then = {name: np.asarray(rows) for name, rows in EXPECTED["vectors"].items()}
    assert set(then) == set(ENCODERS)
    for rows in then.values():
        assert rows.std(0).max() > 1e-2
    first = {name: rows for name, rows in then.items() if name.endswith("-hf")}
    first |= {name: then[name] for name in ("run", "twin", "lora")}
    one = [rows[0, 0] for rows in first.values()]
    assert len(set(one)) == len(one)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_old_encoder_gives_the_same_vectors(name: str, old: Path) -> None:
    assert_same(name, embedlab.load(name).encode(QUERIES, device="cpu"))


@pytest.mark.parametrize("name", [n for n in ENCODERS if n.endswith("-st")])
def test_sentence_transformers_opens_an_old_export(name: str, old: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model = library.SentenceTransformer(str(old / name), device="cpu", trust_remote_code=True)
    assert_same(name, model.encode(QUERIES, convert_to_numpy=True))


def test_both_kinds_of_sentence_transformers_folders_are_there() -> None:
    kinds = {(HERE / n / "modules.json").read_text().count("EmbedlabModule") for n in ENCODERS if "-st" in n}
    assert kinds == {0, 1}


def test_an_old_checkpoint_goes_on_as_it_would_have(old: Path) -> None:
    given = {a.partition("=")[0]: a for a in (*BASICS, *RUN, "trainer.max_steps=6", "ckpt_path=last")}
    assert main(["train", *given.values(), "hydra.run.dir=run"]) == 0
    then = EXPECTED["resumed_losses"]
    assert len(then) == len(EXPECTED["run_losses"]) + 2
    assert losses(old / "run") == pytest.approx(then, rel=1e-5)


def test_an_old_file_of_lightning_cli_trains_the_same(old: Path) -> None:
    assert main(["fit", "--config", "fit.yaml"]) == 0
    assert losses(old / "fitted") == pytest.approx(EXPECTED["fitted_losses"], rel=1e-5)


def test_evaluate_scores_an_old_run_as_before(old: Path) -> None:
    line = ["ckpt=run", "suite=sts", "tasks=stsb", "data_dir=sts", "device=cpu", "out=now.json"]
    assert main(["evaluate", *line]) == 0
    then, now = (json.loads(Path(p).read_text()) for p in ("run/scores/sts.json", "now.json"))
    assert now["scores"] == pytest.approx(then["scores"], rel=1e-5)
    assert same_encoder(now["protocol"]["checkpoint"], then["protocol"]["checkpoint"])


def test_a_query_of_an_old_index_finds_the_same(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "query", "index", QUERY, "k=5", "device=cpu"]) == 0
    now, then = (
        [(float(score), row, text) for score, row, text in (line.split("\t") for line in out.splitlines())]
        for out in (capsys.readouterr().out, EXPECTED["hits"])
    )
    assert [hit[1:] for hit in now] == [hit[1:] for hit in then]
    assert [hit[0] for hit in now] == pytest.approx([hit[0] for hit in then], abs=1e-4)


def test_encode_reads_an_old_run(old: Path) -> None:
    assert main(["encode", "queries.txt", "out.npy", "ckpt=run", "device=cpu"]) == 0
    assert_same("run", np.load("out.npy"))


@pytest.mark.parametrize("ckpt", ["twin", "lora", "bare.ckpt"])
def test_an_old_encoder_is_exported_today(ckpt: str, old: Path) -> None:
    assert main(["export", f"ckpt={ckpt}", "to=hf", "out=again"]) == 0
    assert_same(ckpt, embedlab.load("again").encode(QUERIES, device="cpu"))


def test_an_old_run_is_reported(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "run"]) == 0
    scores = json.loads(Path("run/scores/sts.json").read_text())["scores"]
    assert f"{scores['stsb/spearman']:.2f}" in capsys.readouterr().out
