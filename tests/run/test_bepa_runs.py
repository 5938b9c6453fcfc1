"""BEPA from its configuration to its export: golden losses, exact resume with a moving average, several pairs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import embedlab
from embedlab.errors import UserError
from embedlab.evaluation.bitext.bitext import bitext_accuracy
from embedlab.run.callbacks.checkpoints import Interrupted
from embedlab.run.run import train
from tests.run.test_resume import StopAt, losses, weights
from tests.tiny_run import WORDS, sentences

GOLDEN = {"mono": [8.7430, 8.7577, 8.8525, 8.5232, 8.6929], "bi": [8.6832, 8.8691, 8.6820, 8.6345, 8.4964]}
BEPA = ("method=bepa", "data=parallel", "pooling=cls", "data.max_length=16", "data.pair_limit=30")


def translated(text: str, mark: str) -> str:
    """The same words, each in a spelling of its own: a language that has to be learned."""
    return " ".join(word[::-1] + mark for word in text.split())


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two tables: English with two languages, and English with a third."""
    folder = tmp_path_factory.mktemp("pairs")
    texts = sentences(80, seed=5)
    rows = [f"{t}\t{translated(t, 'o')}\t{translated(t, 'a')}" for t in texts[:40]]
    (folder / "two.tsv").write_text("\n".join(["en\tox\tax", *rows]) + "\n")
    rows = [f"{translated(t, 'e')}\t{t}" for t in texts[40:]]
    (folder / "one.tsv").write_text("\n".join(["ex\ten", *rows]) + "\n")
    return f"{folder}/*.tsv"


@pytest.fixture
def bepa_run(compose_run: Callable[..., Any], pairs: str) -> Callable[..., Any]:
    def make(*line: str, **arch: Any) -> Any:
        return compose_run(*BEPA, f"data.files='{pairs}'", *line, **arch)

    return make


def test_many_pairs_in_one_stream(bepa_run, tmp_path):  # type: ignore[no-untyped-def]
    from embedlab.run.run import build

    config = bepa_run("data.batch_size=16", "data.pair_seed=7")
    method, data = build(config, tmp_path)
    data.prepare_data()
    table, report = data.table, data.report
    assert set(report["groups"]) == {"en-ex", "en-ox", "en-ax"}
    for values in report["groups"].values():
        assert (values["rows"], values["dropped"]) == (30, {"over pair_limit": 10})
    assert {k: (v["texts"], v["pairs"]) for k, v in report["languages"].items()} == {
        "en": (90, 3), "ex": (30, 1), "ox": (30, 1), "ax": (30, 1)}  # fmt: skip
    assert sum(v["tokens"] for v in report["languages"].values()) == sum(
        v["tokens"] for v in report["fields"].values()
    )
    batches = list(data.train_dataloader())
    assert len(batches) == 90 // 16
    for batch in batches:
        assert len(set(table.group_of[batch["rows"].numpy()].tolist())) > 1, "pairs are mixed in a batch"
    method.losses(batches[0])
    # English is the source wherever its column stands.
    words = method.encoder.tokenizer.decode(table.fields["source"].row(0).tolist(), skip_special_tokens=True)
    assert set(words.split()) <= set(WORDS.split())
    _, other = build(bepa_run("data.pair_seed=8"), tmp_path)
    assert other.report["content"] != report["content"]


@pytest.mark.parametrize("mlm_pack", ["mono", "bi"])
def test_losses_of_five_steps(mlm_pack, bepa_run, tmp_path):  # type: ignore[no-untyped-def]
    config = bepa_run("trainer.max_steps=5", f"method.mlm_pack={mlm_pack}")
    train(config, tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        found = [float(r["train/loss"]) for r in csv.DictReader(file) if r["train/loss"]]
    assert found == pytest.approx(GOLDEN[mlm_pack], abs=2e-3)


@pytest.mark.parametrize(
    "extra", [("method.target=ema", "method.ema=0.5", "method.predictor=mlp", "method.loss=cosine"), ()]
)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(extra, bepa_run, tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    line = ("trainer.max_epochs=9", "trainer.max_steps=7", *extra)
    train(bepa_run(*line), straight)
    with monkeypatch.context() as patch:
        StopAt(4, patch)
        with pytest.raises(Interrupted):
            train(bepa_run(*line), parts)
    train(replace(bepa_run(*line), ckpt_path="last"), parts)
    assert losses(parts) == losses(straight)
    expected, found = weights(straight), weights(parts)
    assert expected.keys() == found.keys()
    assert any(k.startswith("target.") for k in expected) == ("method.target=ema" in extra)
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_translations_find_each_other_afterwards(bepa_run, tmp_path, pairs):  # type: ignore[no-untyped-def]
    """From a fresh encoder and a vocabulary of these texts to accuracy, through the exported encoder."""
    line = (
        "backbone=fresh", "backbone.fresh.layers=2", "backbone.fresh.width=32", "backbone.fresh.heads=4",
        "backbone.fresh.vocab_size=200", "backbone.fresh.max_positions=64", "backbone.fresh.tokenizer.type=bpe",
        "backbone.fresh.tokenizer.lowercase=false", "backbone.fresh.model_type=xlm-roberta", "pooling=mean",
        "data.batch_size=30", "trainer.max_epochs=200", "trainer.max_steps=120", "optimizer.lr=5e-3",
        "data.languages=[en,ox,ax]", f"data.files={Path(pairs).parent}/two.tsv", "data.pair_limit=40",
    )  # fmt: skip
    train(bepa_run(*line), tmp_path)
    encoder = embedlab.load(tmp_path)
    texts = sentences(80, seed=5)[:40]
    other = [translated(t, "o") for t in texts]
    accuracy = bitext_accuracy(encoder.encode(texts), encoder.encode(other))["mean"]
    assert accuracy > 50
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["training"]["steps"] == 120


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (("backbone=mini", "pooling=mask", "template=promptbert_bert"), "template"),
        (("data.languages=[en,zz]",), "data.languages"),
        (("method.mlm_pack=bi", "data.max_length=64"), "data.max_length"),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_line(line, key, bepa_run, tmp_path):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as caught:
        train(bepa_run(*line), tmp_path)
    assert caught.value.key == key
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "export").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("mlm_pack", ["mono", "bi"])
@pytest.mark.parametrize(
    "extra", [("method.target=ema", "method.predictor=mlp"), ("method.align_input=packed_blockmask",)]
)
def test_a_captured_step_is_the_eager_one(mlm_pack, extra, bepa_run, tmp_path):  # type: ignore[no-untyped-def]
    """Without dropout and with one way to mask, in fp32: the alignment loss of both; the masks are drawn anew."""
    found = {}
    for step in ("eager", "graph"):
        line = ("trainer=gpu", "trainer.precision=32-true", f"step={step}", "backbone.dropout=0.0",
                "trainer.max_steps=4", "data.pad_to_multiple=16", f"method.mlm_pack={mlm_pack}",
                "optimizer.lr=1e-5", *extra)  # fmt: skip
        train(bepa_run(*line), tmp_path / step)
        with (tmp_path / step / "metrics.csv").open() as file:
            found[step] = [
                float(r["train/loss/align"]) for r in csv.DictReader(file) if r["train/loss/align"]
            ]
    assert found["graph"] == pytest.approx(found["eager"], rel=2e-2)
