"""Whitening as a run: fitted to its text, saved with the encoder, before training or after it, read by others."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import embedlab
from embedlab.errors import UserError
from embedlab.methods import method_config
from embedlab.methods.whitening import WhiteningMethod
from tests.methods.baselines import Tiny, encoder
from tests.methods.golden import BASICS, Inputs, command, sentences, train
from tests.methods.runs import run_of


def whiten(inputs: Inputs, run: Path, *more: str) -> Any:
    line = (*BASICS, "backbone.path={bert}", "data.files={text}", "method=whitening", "method.k=8", *more)
    given = {o.partition("=")[0]: o for o in map(inputs.fill, line)}
    command("train", *given.values(), f"hydra.run.dir={run}")
    return embedlab.load(run)


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    return Inputs(tmp_path / "inputs")


@pytest.mark.parametrize("pooling", ["cls", "first_last"])
def test_the_runs_text_has_unit_covariance(inputs: Inputs, tmp_path: Path, pooling: str) -> None:
    found = whiten(inputs, tmp_path / "run", f"pooling={pooling}", "data.max_length=64")
    y = found.encode(sentences(64))
    assert y.shape == (64, 8)
    torch.testing.assert_close(torch.cov(torch.as_tensor(y).T), torch.eye(8), atol=1e-4, rtol=0)
    scores = (tmp_path / "run" / "scores.json").read_text()
    assert '"steps": 0' in scores


def test_a_text_of_fewer_rows_than_a_batch_will_do(inputs: Inputs, tmp_path: Path) -> None:
    """Nothing is trained on batches: the text needs more rows than directions, and no more."""
    whole = whiten(inputs, tmp_path / "whole", "data.batch_size=8").encode(sentences(5))
    found = whiten(inputs, tmp_path / "run", "data.batch_size=512").encode(sentences(5))
    assert (found == whole).all()


def test_after_training_it_maps_what_the_run_made(inputs: Inputs, tmp_path: Path) -> None:
    train(inputs, tmp_path / "simcse", "simcse", "pooling=mean")
    found = whiten(inputs, tmp_path / "run", f"method.encoder={tmp_path / 'simcse'}", "data.max_length=64")
    x = torch.as_tensor(embedlab.load(tmp_path / "simcse").encode(sentences(64)))
    pooling = found.pooling
    expected = (x - pooling.mean) @ pooling.matrix
    torch.testing.assert_close(torch.as_tensor(found.encode(sentences(64))), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("k", ["null", "0"])
def test_unless_a_width_is_asked_for_it_is_that_in_which_the_vectors_vary(
    inputs: Inputs, tmp_path: Path, k: str
) -> None:
    """A LayerNorm gives vectors of D - 1 directions, which the mean over tokens keeps."""
    train(inputs, tmp_path / "simcse", "simcse", "pooling=mean")
    width = embedlab.load(tmp_path / "simcse").dim
    after = (f"method.encoder={tmp_path / 'simcse'}", "data.max_length=64")
    found = whiten(inputs, tmp_path / "run", *after, f"method.k={k}")
    assert found.dim == width - 1
    assert f"method.k={width - 1}" in (tmp_path / "run" / "train.log").read_text()
    y = torch.as_tensor(found.encode(sentences(64)))
    torch.testing.assert_close(torch.cov(y.T), torch.eye(width - 1), atol=1e-3, rtol=0)
    with pytest.raises(RuntimeError, match="status 2"):
        whiten(inputs, tmp_path / "asked", *after, f"method.k={width}")


@pytest.mark.parametrize("select", ["dev", "loss", "last"])
def test_what_is_exported_is_whitened_however_a_run_selects(
    inputs: Inputs, tmp_path: Path, select: str
) -> None:
    """Weights that are remembered before the fit have no map."""
    dev = tmp_path / "dev.csv"
    rows = [f"{a},{b},{i % 6}\n" for i, (a, b) in enumerate(itertools.pairwise(sentences(12)))]
    dev.write_text("sentence1,sentence2,score\n" + "".join(rows))
    found = whiten(
        inputs, tmp_path / "run", "pooling=mean", f"evaluation.dev={dev}", f"evaluation.select={select}"
    )
    assert found.dim == 8
    assert {"pooling.mean", "pooling.matrix"} <= set(found.state_dict())
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())["scores"]
    assert any(name.startswith("dev/") for name in scores)


def test_sentence_transformers_reads_it_as_its_own_dense_layer(inputs: Inputs, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    found = whiten(inputs, tmp_path / "run", "pooling=mean", "data.max_length=64")
    found.to_sentence_transformers(tmp_path / "st")
    theirs = SentenceTransformer(str(tmp_path / "st"), device="cpu").encode(sentences(16))
    torch.testing.assert_close(
        torch.as_tensor(theirs), torch.as_tensor(found.encode(sentences(16))), rtol=1e-3, atol=1e-3
    )


def test_what_cannot_be_whitened_is_named(inputs: Inputs, tmp_path: Path, tiny: Tiny) -> None:
    info = encoder(tiny).backbone.info
    for k in (-1, 33):
        with pytest.raises(UserError, match=r"method\.k"):
            method_config({"name": "whitening", "k": k}).check(info, run_of())
    wide = run_of(pooling="rep_concat")  # vectors of 64 features, of states of 32
    assert method_config({"name": "whitening", "k": 64}).check(info, wide) == []
    with pytest.raises(UserError, match=r"method\.k=65.*0 to 64"):
        method_config({"name": "whitening", "k": 65}).check(info, wide)
    with pytest.raises(UserError, match=r"data\.pack"):
        method_config({"name": "whitening", "k": 4}).check(info, run_of(pack=16))
    twin = inputs.path("twin")
    cut = encoder(tiny)
    cut.usage = replace(cut.usage, truncate_dim=16)
    cut.save(tmp_path / "cut")
    for path, k, words in (
        (twin, 8, "one tower"),
        (inputs.path("bert"), 99, r"method\.k=99"),
        (tmp_path / "cut", 8, "truncate_dim"),
        ("no/such", 8, "encoder"),
    ):
        run: Any = run_of()
        run.method = method_config({"name": "whitening", "encoder": str(path), "k": k})
        with pytest.raises(UserError, match=words):
            WhiteningMethod.make_encoder(run)
