"""Encoders by their names on a hub: the vectors of the folder, pinned, cached; each refusal with its own fix."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embedlab
from embedlab.backbones import load_backbone
from embedlab.backbones.hub import _given_up, _wanted
from embedlab.cli.encoders import reference
from embedlab.config.backbone import BackboneConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.twin import TwinEncoder
from embedlab.encoders.usage import Usage
from embedlab.errors import UserError
from embedlab.evaluation.core.protocol import describe
from embedlab.export.card import model_card
from embedlab.pooling import build_pooling
from tests.encoders.test_encoder import MASKED, build
from tests.hub import REFUSED_TOKEN, RIGHT_TOKEN, Hub, hub, online

__all__ = ["hub", "online"]

Tiny = Callable[..., Path]
TEXTS = ["A Cat sat on the Mat", "dogs", "", "a much longer sentence " * 9]


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def kinds(tiny: Tiny, folder: Path) -> dict[str, Path]:
    """A folder of every kind that can be loaded."""
    build(tiny("bert"), "cls").save(folder / "cls")
    build(tiny("bert"), "mask", MASKED).save(folder / "template")
    build(tiny("gpt2"), "last", max_length=9).save(folder / "decoder")
    twin = TwinEncoder([build(tiny("bert")), build(tiny("bert"))], usage=Usage({"query": "ask: "}, "query"))
    twin.save(folder / "twin")
    build(tiny("roberta"), "mean").to_sentence_transformers(folder / "st")
    (folder / "st" / "embedlab.json").unlink()
    build(tiny("bert"), "first_last").to_sentence_transformers(folder / "st_custom")
    shutil.copytree(tiny("distilbert"), folder / "plain")
    shutil.copytree(tiny("bert"), folder / "bin")
    from transformers import AutoModel

    torch.save(AutoModel.from_pretrained(tiny("bert")).state_dict(), folder / "bin" / "pytorch_model.bin")
    (folder / "bin" / "model.safetensors").unlink()
    build(tiny("bert"), "cls").save(folder / "run" / "export")
    return {path.name: path for path in folder.iterdir()}


def test_an_id_gives_the_vectors_of_its_folder(
    online: Hub, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = kinds(tiny, tmp_path / "kinds")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for name, folder in made.items():
            commit = online.add_model(f"org/{name}", folder)
            (theirs, ours) = embedlab.load(f"org/{name}"), embedlab.load(folder)
            np.testing.assert_array_equal(theirs.encode(TEXTS), ours.encode(TEXTS), err_msg=name)
            assert theirs.fingerprint() == ours.fingerprint()
            assert theirs.provenance()["hub"] == f"org/{name}@{commit}"
    assert not [r for r in caplog.records if not r.name.startswith("embedlab")], "another library's log"
    online.down()
    offline(monkeypatch)
    for name, folder in made.items():
        np.testing.assert_array_equal(
            embedlab.load(f"org/{name}").encode(TEXTS), embedlab.load(folder).encode(TEXTS)
        )


def test_revisions_after_main_has_moved(online: Hub, tiny: Tiny, tmp_path: Path) -> None:
    for pooling in ("cls", "mean", "last"):
        build(tiny("bert"), pooling).save(tmp_path / pooling)
    first = online.add_model("org/name", tmp_path / "cls", tag="v1")
    online.add_model("org/name", tmp_path / "mean", branch="try")
    for slashed in ("feat/mean", "refs/pr/1"):
        online.add_model("org/name", tmp_path / "mean", branch=slashed)
    assert embedlab.load("org/name").pooling.name == "cls"
    online.add_model("org/name", tmp_path / "last")
    for revision, pooling in {
        "main": "last",
        "v1": "cls",
        first: "cls",
        "try": "mean",
        "feat/mean": "mean",
        "refs/pr/1": "mean",
        first[:9]: "cls",
    }.items():
        assert embedlab.load(f"org/name@{revision}").pooling.name == pooling
        assert embedlab.load("org/name", revision=revision).pooling.name == pooling
    with pytest.raises(UserError, match=r"no such revision \(ckpt=org/name@v2\)"):
        embedlab.load("org/name@v2")
    with pytest.raises(UserError, match="given twice"):
        embedlab.load("org/name@v1", revision="v2")
    with pytest.raises(UserError, match="no revisions"):
        embedlab.load(tmp_path / "cls", revision="v1")


def test_the_commit_stands_in_protocols_references_and_cards(online: Hub, tiny: Tiny, tmp_path: Path) -> None:
    made = build(tiny("bert"), "cls")
    made.usage = Usage({"query": "ask: "}, truncate_dim=16)
    made.save(tmp_path / "made")
    commit = online.add_model("org/name", tmp_path / "made", tag="v1")
    shutil.rmtree(tmp_path / "made")
    build(tiny("bert"), "mean").save(tmp_path / "made")
    online.add_model("org/name", tmp_path / "made")  # main goes on
    encoder = embedlab.load("org/name@v1")
    pinned = f"org/name@{commit}"
    block = describe(encoder, suite="sts", name="x", aggregation="mean")
    assert (block["hub"], block["usage"]) == (pinned, made.usage.to_dict())
    assert reference(encoder, "org/name@v1") == pinned
    assert embedlab.load(pinned).fingerprint() == encoder.fingerprint() == made.fingerprint()
    assert pinned in model_card(encoder, "copy")
    encoder.save(tmp_path / "copy")
    assert reference(embedlab.load(tmp_path / "copy"), str(tmp_path / "copy")) == str(tmp_path / "copy")


@pytest.mark.parametrize(
    ("name", "token", "problem", "fix"),
    [
        ("org/none", None, "no public model", "hf auth login"),
        ("org/none", RIGHT_TOKEN, "your token may see", "check the name"),
        ("org/private", None, "no public model", "hf auth login"),
        ("org/gated", None, "is gated", "hf auth login"),
        ("org/gated", REFUSED_TOKEN, "token has no access", "ask for access"),
        ("org/a b", None, "no name on a hub", "ORG/NAME"),
        ("../x", None, "no such file or folder", "mini"),
    ],
)
def test_what_cannot_be_had(
    online: Hub,
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    token: str | None,
    problem: str,
    fix: str,
) -> None:
    online.add_model("org/private", tiny("bert"), private=True)
    online.add_model("org/gated", tiny("bert"), gated=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError) as caught:
        embedlab.load(name)
    assert problem in str(caught.value)
    assert fix in str(caught.value).partition("Fix: ")[2]
    assert "\n" not in str(caught.value)


def test_a_right_token_opens(online: Hub, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", RIGHT_TOKEN)
    for access in ({"private": True}, {"gated": True}):
        online.add_model("org/name", tiny("bert"), **access)
        assert embedlab.load("org/name").dim == 32


def test_a_hub_that_does_not_answer(
    online: Hub, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    online.add_model("org/name", tiny("bert"))
    for break_it in (online.down, lambda: online.down(503), lambda: online.down(429)):
        break_it()
        with pytest.raises(UserError, match=r"neither in the cache nor reachable: .* does not answer"):
            embedlab.load("org/name")
        online.up()
    online.break_downloads()
    with pytest.raises(UserError, match="is missing"):
        embedlab.load("org/name")
    online.break_downloads(False)
    embedlab.load("org/name")
    for status in (None, 500, 429):
        online.down(status)
        caplog.clear()
        _given_up.clear()
        embedlab.load("org/name")
        assert "taking the cached commit" in caplog.text
        online.up()
    online.down()
    offline(monkeypatch)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        embedlab.load("org/other")


def test_a_silent_hub_is_waited_for_once(online: Hub, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def silent(*_: Any, **__: Any) -> None:
        asked.append(1)
        raise ConnectionError("no answer")

    online.add_model("org/name", tiny("bert"))
    embedlab.load("org/name")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", silent)
    for _ in range(3):
        embedlab.load("org/name")
    assert len(asked) == 1


def test_half_a_cache_names_what_is_missing(
    online: Hub, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online.add_model("org/name", tiny("bert"))
    embedlab.load("org/name")
    offline(monkeypatch)
    for file in ("model.safetensors", "config.json"):
        next((tmp_path / "cache").glob(f"**/snapshots/*/{file}")).unlink()
        with pytest.raises(UserError, match=f"only a part of it .*{file} is missing"):
            embedlab.load("org/name")


def test_a_backbone_by_name_is_the_snapshot(online: Hub, tiny: Tiny, tmp_path: Path) -> None:
    commit = online.add_model("org/name", tiny("bert"))
    backbone, tokenizer = load_backbone(BackboneConfig(source="hub", name="org/name"))
    assert backbone.commit == commit
    encoder = SentenceEncoder(backbone, build_pooling("cls", backbone.info), Tokenization(tokenizer))
    assert encoder.provenance()["backbone_commit"] == commit
    local, _ = load_backbone(BackboneConfig(source="local", path=str(tiny("bert"))))
    for (_, theirs), (_, ours) in zip(backbone.named_parameters(), local.named_parameters(), strict=True):
        assert torch.equal(theirs, ours)
    with pytest.raises(UserError, match=r"backbone\.name=org/none"):
        load_backbone(BackboneConfig(source="hub", name="org/none"))


def test_which_files_are_downloaded() -> None:
    files = ["config.json", "pytorch_model.bin", "a/model.safetensors", "a/pytorch_model.bin", "model.h5", "x.onnx",
             "onnx/model.safetensors", "modeling.py", "README.md", "training_args.bin"]  # fmt: skip
    assert _wanted(files, True, False) == ["config.json", "pytorch_model.bin", "a/model.safetensors"]
    assert _wanted(files, True, True)[-1] == "modeling.py"
    assert _wanted(files, False, False) == ["config.json"]


@pytest.mark.parametrize("part", ["export", "best"])
def test_a_broken_part_of_a_run_is_refused(tiny: Tiny, tmp_path: Path, part: str) -> None:
    build(tiny("bert"), "cls").save(tmp_path / "run" / part)
    (tmp_path / "run" / "last.ckpt").write_bytes(b"other weights")
    (tmp_path / "run" / part / "embedlab.json").unlink()
    with pytest.raises(UserError, match=f"{part}/ holds no embedlab.json"):
        embedlab.load(tmp_path / "run")


def test_which_part_of_a_run_was_taken(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tiny("bert"), "cls").save(tmp_path / "run" / "best")
    with caplog.at_level(logging.INFO):
        embedlab.load(tmp_path / "run")
    assert "taking best/" in caplog.text


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def test_an_adapter_alone_says_so(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "org/base"})
    with pytest.raises(UserError, match="holds an adapter, whose base model is elsewhere"):
        embedlab.load(tmp_path)


def test_a_repository_without_weights(online: Hub, tiny: Tiny) -> None:
    config = (tiny("bert") / "config.json").read_bytes()
    for file in ("model.gguf", "onnx/model.onnx", "tf_model.h5"):
        online.add_model("org/other", {"config.json": config, file: b"x"})
        with pytest.raises(UserError, match=rf"holds no weights but \{Path(file).suffix} \(ckpt=org/other\)"):
            embedlab.load("org/other")
    online.add_model("org/empty", {})
    with pytest.raises(UserError, match=r"holds no weights \(ckpt=org/empty\)"):
        embedlab.load("org/empty")
