"""Scoring while training: rows are padded once, and a captured run encodes them by a graph."""

from __future__ import annotations

import copy
import csv
from pathlib import Path

import pytest
import torch

from embedlab.backbones.backbone import Backbone
from embedlab.engine.dev_encoder import DevEncoder
from embedlab.engine.step import backbones_of
from embedlab.engine.whole_step import packs
from embedlab.run.run import build, train
from tests.engine.test_cuda_graph import DECODER, WIDE

GRAPH = ("method=simcse", "pooling=mean", "trainer=gpu", "data.pad_to_multiple=4", "trainer.max_steps=6", "step=graph",
         "evaluation.every=2")  # fmt: skip
TEXTS = ["a cat", "the dog sees the river", "a small house", "fast", "the red bird runs on the old tree"]


def column(folder: Path, name: str) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(r[name]) for r in csv.DictReader(file) if r.get(name)]


def test_vectors_are_those_of_encode_ids(compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    method, _ = build(compose_run(), tmp_path)
    encoder, padded = method.encoder, []
    method.train()
    rows = encoder.tokenization.ids(TEXTS)
    pad = type(encoder.tokenization).pad
    monkeypatch.setattr(type(encoder.tokenization), "pad", lambda *a: padded.append(1) or pad(*a))
    dev = DevEncoder(method, rows, 16)
    first = dev()
    batches = len(padded)
    assert batches > 1
    assert torch.equal(first, encoder.encode_ids(rows, batch_tokens=16))
    del padded[:]
    with torch.no_grad():
        for p in encoder.parameters():
            p.mul_(1.5)
    again = dev()
    assert not padded
    assert not torch.equal(again, first)
    assert torch.equal(again, encoder.encode_ids(rows, batch_tokens=16))
    assert method.training
    assert encoder.training
    assert len(DevEncoder(method, rows[:2], 16)()) == 2
    assert not again.requires_grad
    dev.device = torch.device("cuda")  # as of a run on a card that is not captured
    assert torch.equal(dev(), again)
    assert padded


def test_the_record_has_the_share_of_scoring(compose_run, sts_dir, tmp_path):  # type: ignore[no-untyped-def]
    scored = (f"evaluation.sts_dir={sts_dir}", "evaluation.every=2", "trainer.max_steps=5")
    train(compose_run(*scored), tmp_path / "run")
    shares = column(tmp_path / "run", "time/dev_share")
    assert shares
    assert all(0 < s < 1 for s in shares)
    assert len(column(tmp_path / "run", "dev/effective_rank")) == 4  # steps 0, 2, 4 and the last


@pytest.mark.parametrize("pooling", ["mean", "cls_mlp"])
def test_without_padding_the_vectors_are_the_same(compose_run, tmp_path, pooling):  # type: ignore[no-untyped-def]
    method, _ = build(compose_run(f"pooling={pooling}"), tmp_path)
    dev = DevEncoder(method, method.encoder.tokenization.ids(TEXTS), 64)
    found = []
    with method.encoder.evaluating(None):
        for packed in (False, True):
            dev._encode(packed)
            found.append(dev._out.clone())
    assert len(dev._batches) < len(TEXTS)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", [{}, {"width": 32, "heads": 2, "ffn": 64}], ids=["padded", "packed"])
@pytest.mark.parametrize("pooling", ["mean", "cls_mlp"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_graph_gives_the_scores_of_eager(  # type: ignore[no-untyped-def]
    compose_run, sts_dir, tmp_path, monkeypatch, caplog, precision, pooling, arch
):
    """Of the weights as they are after each update; heads of 16 are the narrowest that need no padding."""
    seen, encode = [], DevEncoder._encode
    monkeypatch.setattr(DevEncoder, "_encode", lambda self, p=False: (seen.append(p), encode(self, p))[1])
    for name, switch in (("graph", "1"), ("eager", "0")):
        monkeypatch.setenv("EMBEDLAB_KERNELS", f"dev_graph={switch}")
        more = (f"evaluation.sts_dir={sts_dir}", f"trainer.precision={precision}", "backbone.dropout=1e-9")
        train(compose_run(*GRAPH, f"pooling={pooling}", *more, **arch), tmp_path / name)
    assert any(seen) == bool(arch)
    assert "without a CUDA graph" not in caplog.text
    for score in ("mean_cosine", "uniformity", "alignment"):
        graph, eager = (column(tmp_path / n, f"dev/{score}") for n in ("graph", "eager"))
        assert len(graph) == 4
        assert graph == pytest.approx(eager, abs=5e-3 if precision == "32-true" else 3e-2), score


@pytest.mark.gpu
def test_a_graph_scores_a_decoder_with_an_adapter(compose_run, sts_dir, tmp_path, caplog):  # type: ignore[no-untyped-def]
    more = (*DECODER, "method=csesfp", "pooling=rep2", "template=eol_sum", f"evaluation.sts_dir={sts_dir}")
    graph = ("step=graph", "evaluation.every=2", "trainer.precision=bf16-mixed")
    train(compose_run(*more, *graph, model_type="llama", **WIDE), tmp_path / "run")
    assert "without a CUDA graph" not in caplog.text
    assert column(tmp_path / "run", "dev/mean_cosine")


@pytest.mark.gpu
def test_scoring_leaves_dropout_as_it_would_have_been(compose_run, sts_dir, tmp_path):  # type: ignore[no-untyped-def]
    train(compose_run(*GRAPH), tmp_path / "without")
    train(compose_run(*GRAPH, f"evaluation.sts_dir={sts_dir}"), tmp_path / "with")
    losses = (column(tmp_path / n, "train/loss") for n in ("with", "without"))
    assert next(losses) == pytest.approx(next(losses), rel=1e-3)


def test_padding_is_left_out_where_every_backbone_can(compose_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    method, _ = build(compose_run(), tmp_path)
    (own,) = backbones_of(method)
    method.other = copy.deepcopy(own)
    monkeypatch.setattr(Backbone, "unpads", lambda self, longest: longest <= (16 if self is own else 8))
    method.runner.packing = True
    assert [packs(method, longest) for longest in (8, 16, 32)] == [True, False, False]
    method.runner.packing = False
    assert not packs(method, 8)
