"""MetaEOL: the mean over prompts of what PromptEOL reads in each, whatever their order, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import embedlab
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig
from embedlab.config.template import Template
from embedlab.encoders.base import Encoder
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.evaluation.sts.dev import DevSet
from embedlab.evaluation.sts.sts import load_sts
from embedlab.methods.metaeol import MetaEOL, MetaEOLConfig
from embedlab.pooling import pooling_config
from embedlab.run.callbacks.scoring import copied_weights
from tests.methods.baselines import Tiny, encoder
from tests.methods.golden import BASICS, Inputs, command, sentences
from tests.methods.runs import run_of

EOL = 'This sentence : "{sentence}" means in one word:"'
TOPIC = 'The topic of "{sentence}" is in one word:"'


def make(tiny: Tiny, *templates: str) -> Encoder:
    run: Any = SimpleNamespace(
        method=MetaEOLConfig(templates=templates),
        backbone=BackboneConfig(source="local", path=str(tiny("llama"))),
        adapter=AdapterConfig(),
        pooling=pooling_config("last"),
        trainer=SimpleNamespace(accelerator="cpu", devices=1),
    )
    return MetaEOL.make_encoder(run).eval()


def test_it_is_the_mean_of_prompteols(tiny: Tiny) -> None:
    texts = ["A man is playing", "The girl reads a book."]
    plain = encoder(tiny, "llama", "last")
    ways = [Tokenization(plain.tokenizer, Template(t, "text"), preparation="closed") for t in (EOL, TOPIC)]
    each = [SentenceEncoder(plain.backbone, plain.pooling, way).eval().encode_texts(texts) for way in ways]
    torch.testing.assert_close(make(tiny, EOL).encode_texts(texts), each[0])
    both = make(tiny, EOL, TOPIC).encode_texts(texts)
    torch.testing.assert_close(both, (each[0] + each[1]) / 2)
    torch.testing.assert_close(make(tiny, TOPIC, EOL).encode_texts(texts), both)


def test_its_folder_has_the_weights_once_and_every_prompt(tiny: Tiny, tmp_path: Path) -> None:
    texts = ["A man is playing", "The girl reads a book.", ""]
    made = make(tiny, EOL, TOPIC)
    made.save(tmp_path / "made")
    assert [p.parent.name for p in (tmp_path / "made").rglob("*.safetensors")] == ["tower1"]
    again = embedlab.load(tmp_path / "made")
    assert torch.equal(again.encode_texts(texts), made.encode_texts(texts))
    assert again.fingerprint() == made.fingerprint()
    assert again.towers[0].backbone is again.towers[1].backbone
    assert [t.tokenization.template.text for t in again.towers] == [EOL, TOPIC]
    state = {f"encoder.{name}": value for name, value in made.state_dict().items()}
    torch.save({"embedlab": {"encoder": made.manifest()}, "state_dict": state}, tmp_path / "made.ckpt")
    assert torch.equal(embedlab.load(tmp_path / "made.ckpt").encode_texts(texts), made.encode_texts(texts))
    file = tmp_path / "made" / "embedlab.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["format"] == 3  # versions that would read one prompt for all refuse it
    file.write_text(json.dumps(content | {"tokenizations": content["tokenizations"][:1]}), encoding="utf-8")
    with pytest.raises(UserError, match=r"one for each tower.*tokenizations"):
        embedlab.load(tmp_path / "made")
    with pytest.raises(UserError, match="one tokenizer a model"):
        made.to_sentence_transformers(tmp_path / "st")


def test_a_run_makes_it_with_the_prompts_that_are_shipped(
    sts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scoring while training, of which there is none, encodes texts: there are no token ids in common."""
    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    inputs = Inputs(tmp_path / "inputs")
    line = (*BASICS, "backbone.path={decoder}", "data.files={text}", "method=metaeol", "pooling=last",
            f"evaluation.sts_dir={sts_dir}")  # fmt: skip
    given = {o.partition("=")[0]: o for o in map(inputs.fill, line)}
    command("train", *given.values(), f"hydra.run.dir={tmp_path / 'run'}")
    found = embedlab.load(tmp_path / "run")
    assert len(found.towers) == 8
    assert len(list((tmp_path / "run" / "export").rglob("*.safetensors"))) == 1
    assert not (tmp_path / "run" / "best").exists()  # nothing is trained, so nothing is selected
    copies = {value.data_ptr() for value in copied_weights(found).values()}
    assert len(copies) == len(found.towers[0].state_dict())
    assert found.encode(sentences(3)).shape == (3, 32)
    dev = DevSet(load_sts("stsb", str(sts_dir), "raw", split="dev"))
    expected = dev.score(found.encode_texts(dev.sentences))["spearman"]
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        scored = [float(row["dev/spearman"]) for row in csv.DictReader(file) if row["dev/spearman"]]
    assert scored == pytest.approx([expected])


def test_what_cannot_be_is_named(tiny: Tiny) -> None:
    info, run = encoder(tiny, "llama").backbone.info, run_of(pooling="last")
    assert MetaEOLConfig(templates=(EOL, TOPIC)).check(info, run) == []
    for change, words in (
        ({"templates": ()}, r"method\.templates"), ({"templates": (EOL, EOL)}, "twice"),
        ({"templates": ("no place",)}, r"sentence .method\.templates=no place"),
        ({"templates": (EOL,), "text": "loud"}, r"method\.text"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            MetaEOLConfig(**change).check(info, run)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="template=none"):
        MetaEOLConfig(templates=(EOL,)).check(info, run_of(pooling="last", template=Template("{sentence}")))
