"""The model card says what is known, with n and protocol, and does not guess the rest."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import embedlab
from embedlab.cli.export import main
from embedlab.encoders.folder import same_encoder
from embedlab.encoders.usage import Usage
from embedlab.errors import UserError
from embedlab.export.card import model_card, model_name
from embedlab.files import assets_dir
from tests.encoders.test_encoder import build
from tests.hub import REFUSED_TOKEN, RIGHT_TOKEN, Hub, hub, online

__all__ = ["hub", "online"]

TEXTS = ["a cat", "", "A longer sentence, with (some) marks."]


@pytest.fixture
def encoder(tiny: Callable[..., Path]) -> embedlab.SentenceEncoder:
    return embedlab.load(tiny("bert"))


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_nothing_known_is_said_so(encoder: embedlab.SentenceEncoder) -> None:
    encoder.card = {}
    card = model_card(encoder, "m")
    assert "Not known: the encoder was not trained by a run of embedlab." in card
    assert "Not scored." in card
    assert "license" not in front_matter(card)


def test_scores_stand_with_their_n_and_protocol(encoder: embedlab.SentenceEncoder) -> None:
    encoder.card = {
        "training": {"seed": 7, "device": "cpu", "steps": 3},
        "config": {
            "method": {"name": "simcse", "tau": 0.05},
            "data": {"name": "wikipedia", "files": "a.txt"},
        },
        "scores": {"stsb/spearman": 70.125, "sts7/spearman": 69.5, "lee/spearman": float("nan")},
        "protocol": {"sts": {"name": "sts7_raw", "aggregation": "all", "text": "raw"}},
    }
    card = model_card(encoder, "m", "apache-2.0")
    assert card.index("| sts7/spearman | 69.50 |") < card.index("| stsb/spearman | 70.12 |")
    assert "One seed (7): n=1." in card
    assert "- aggregation: all" in card
    assert "nan" not in card
    assert "tau: 0.05" in card
    assert front_matter(card)["license"] == "apache-2.0"


def test_scores_of_other_bytes_are_said_to_be_so(encoder: embedlab.SentenceEncoder, tmp_path: Path) -> None:
    def card(checkpoint: str, folder: Path | None = None) -> str:
        block = {"name": "sts7_raw", "checkpoint": checkpoint}
        encoder.card = {"scores": {"sts7/spearman": 70.0}, "protocol": {"sts": block}}
        return model_card(encoder, "m", folder=folder).split("## Scores")[1]

    own = encoder.fingerprint()
    assert "not scored" not in card(own)
    assert f"Scores of checkpoint another; this one, {own}, was not scored." in card("another")
    (tmp_path / "model.onnx").touch()
    (tmp_path / "embedlab.json").write_text('{"precision": "int8"}')
    assert "Scores of the weights in float32; these, in int8, were not scored." in card(own, tmp_path)


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ({"name": "mini-sentence", "hub": "org/other@1"}, "mini-sentence"),
        ({"hub": "org/small-model@0123abcd"}, "small-model"),
        (
            {"config": {"backbone": {"name": "org/bert"}, "method": {"name": "simcse"}}},
            "bert trained with simcse",
        ),
        (
            {"config": {"backbone": {"path": "models/mine"}, "method": {"name": "pcl"}}},
            "mine trained with pcl",
        ),
        ({"config": {"backbone": {"source": "fresh", "name": ""}, "method": {"name": "pcl"}}}, None),
        ({}, None),
    ],
)
def test_a_name_says_what_it_is(
    card: dict[str, Any], name: str | None, encoder: embedlab.SentenceEncoder
) -> None:
    encoder.card = card
    assert model_name(encoder) == name


def test_a_card_is_not_named_by_its_folder(tiny: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(tiny("bert"), tmp_path / "small-bert")
    assert main([f"ckpt={tmp_path / 'small-bert'}", "to=hf", f"out={tmp_path / 'out'}"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "\n# small-bert\n\nA sentence encoder with 32-dimensional vectors, exported by embedlab.\n" in card


def test_the_scores_of_the_shipped_sentence_encoder_are_of_its_bytes() -> None:
    shipped = embedlab.load("mini-sentence")
    own = shipped.fingerprint()
    assert all(same_encoder(block["checkpoint"], own) for block in shipped.card["protocol"].values())
    assert "not scored" not in model_card(shipped, "mini-sentence")
    made = (assets_dir() / "mini-sentence" / "README.md").read_text(encoding="utf-8")
    assert made.startswith(model_card(shipped, "mini-sentence"))


def test_the_shipped_encoder_has_a_card() -> None:
    card = model_card(embedlab.load("mini"), "mini")
    assert "| sts7/spearman | 51.88 |" in card
    assert "One seed (42): n=1." in card
    assert "- hardware: one NVIDIA H100" in card
    assert "CC BY-SA" in card.split("## Licence")[1]


@pytest.mark.parametrize("pooling", ["cls", "s2sent"])
@pytest.mark.parametrize("target", ["hf", "sentence-transformers", "onnx"])
def test_the_snippet_of_a_card_gives_the_vectors(
    target: str, pooling: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip({"onnx": "onnxruntime", "hf": "torch"}.get(target, "sentence_transformers"))
    made = build(tiny("bert"), pooling)
    made.usage = Usage({"query": "ask: ", "text": "this: "}, "text", truncate_dim=16)
    made.save(tmp_path / "made")
    out = tmp_path / "out"
    assert (
        main([f"ckpt={tmp_path / 'made'}", f"to={target}", f"out={out}", "licence=mit", "normalize=false"])
        == 0
    )
    card = (out / "README.md").read_text()
    assert front_matter(card)["license"] == "mit"
    code = card.split("```python")[1].split("```")[0].replace("FOLDER", str(out))
    told: dict[str, Any] = {}
    exec(code, told)
    np.testing.assert_allclose(told["vectors"], made.encode(["a cat", "a dog"]), atol=1e-5)
    if "queries" in told:
        np.testing.assert_allclose(told["queries"], made.encode_query(["which animal purrs?"]), atol=1e-5)


@pytest.mark.parametrize("target", ["hf", "sentence-transformers"])
def test_the_snippet_knows_the_widths_that_were_trained(
    target: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("sentence_transformers")
    made = build(tiny("bert"), "mean")
    made.card = {"config": {"method": {"name": "supervised", "matryoshka": {"dims": [32, 8, 16]}}}}
    made.save(tmp_path / "made")
    out = tmp_path / "out"
    assert main([f"ckpt={tmp_path / 'made'}", f"to={target}", f"out={out}"]) == 0
    code = (out / "README.md").read_text().split("```python")[1].split("```")[0].replace("FOLDER", str(out))
    told: dict[str, Any] = {}
    exec(code, told)
    np.testing.assert_allclose(told["narrower"], made.encode(["a cat", "a dog"], dim=16), atol=1e-5)
    assert "[16, 8]" in code


POOLINGS = ["cls", "mean", "last", "first_last", "cls_mlp", "s2sent", "last_n", "modules"]


@pytest.mark.parametrize("target", ["hf", "sentence-transformers"])
def test_pushed_and_loaded_again(
    target: str, online: Hub, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("sentence_transformers")
    monkeypatch.setenv("HF_TOKEN", RIGHT_TOKEN)
    for pooling in POOLINGS:
        made, name = build(tiny("bert"), pooling), f"tester/{pooling.replace('_', '-')}-{target}"
        made.save(tmp_path / pooling)
        arguments = [f"ckpt={tmp_path / pooling}", f"to={target}", f"out={tmp_path / name}", f"push={name}"]
        assert main(arguments) == 0
        commit = capsys.readouterr().out.rpartition("commit ")[2].strip()
        np.testing.assert_array_equal(embedlab.load(f"{name}@{commit}").encode(TEXTS), made.encode(TEXTS))
        assert b"library_name: sentence-transformers" in online.files(name)["README.md"]
    main([*arguments, "overwrite=true", "push_revision=next"])
    assert embedlab.load(f"{name}@next").dim == made.dim


@pytest.mark.parametrize(
    ("token", "offline", "part"),
    [(None, False, "does not let you write"), (REFUSED_TOKEN, False, "does not let you write"),
     (RIGHT_TOKEN, True, "cannot be reached")],
)  # fmt: skip
def test_a_push_that_is_not_taken_keeps_the_folder(
    online: Hub, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str | None,
    offline: bool, part: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=f"{part}.*push=someone/model"):
        main([f"ckpt={tiny('bert')}", "to=hf", f"out={tmp_path / 'out'}", "push=someone/model"])
    assert (tmp_path / "out" / "config.json").is_file()
    with pytest.raises(UserError, match="nothing is pushed"):
        main([f"ckpt={tiny('bert')}", "to=hf", f"out={tmp_path / 'other'}", "push_revision=x"])


@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
def test_the_card_says_what_becomes_of_an_empty_text(
    tiny: Callable[..., Path], tmp_path: Path, model_type: str
) -> None:
    main([f"ckpt={tiny(model_type)}", "to=sentence-transformers", f"out={tmp_path / 'out'}"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("An empty text has no token" in card) == (model_type == "gpt2")


def test_from_the_command_line(hub: Hub, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Training text from the hub, a push, and the encoder back by its commit; no other library says a word."""
    texts = "\n".join(json.dumps({"text": f"sentence number {i} of many"}) for i in range(64))
    hub.add_dataset("tester/texts", {"train.jsonl": texts.encode()})

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "embedlab", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env=hub.environment(tmp_path, RIGHT_TOKEN) | {"EMBEDLAB_CACHE": str(tmp_path / "cache")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not re.search(r"httpx|huggingface_hub|HTTP Request|unauthenticated", done.stdout + done.stderr)
        return done.stdout

    run(
        "train", "data.hub=tester/texts", "data.package=null", f"backbone.path={tiny('bert')}", "backbone=local",
        "trainer=cpu", "trainer.max_steps=2", "data.batch_size=8", "hydra.run.dir=run", "evaluation.select=last",
        "evaluation.final=[]", "logger=csv",
    )  # fmt: skip
    said = run("export", "ckpt=run", "to=hf", "out=out", "push=tester/mine")
    commit = said.rpartition("commit ")[2].strip()
    (tmp_path / "in.txt").write_text("a cat\na dog\n")
    for output, ckpt in (("folder.npy", "out"), ("hub.npy", f"tester/mine@{commit}")):
        run("encode", "in.txt", output, f"ckpt={ckpt}")
    np.testing.assert_array_equal(np.load(tmp_path / "hub.npy"), np.load(tmp_path / "folder.npy"))
