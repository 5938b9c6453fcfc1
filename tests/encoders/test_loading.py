"""embedlab.load takes whatever names an encoder, and says in one line what it does not take."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import embedlab
from embedlab.errors import UserError
from embedlab.files import assets_dir
from tests.encoders.test_encoder import MASKED, TEXTS, build

Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "encoder"
    build(tiny("bert"), "mask", MASKED).save(folder)
    return folder


def test_an_encoder_folder(saved: Path) -> None:
    for path in (saved, str(saved)):
        encoder = embedlab.load(path)
        assert encoder.pooling.name == "mask"
        assert encoder.tokenization.template == MASKED


def test_a_run_gives_its_export_else_its_best(tiny: Tiny, saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run / "best")
    assert embedlab.load(run).pooling.name == "mask"
    build(tiny("bert"), "cls").save(run / "export")
    assert embedlab.load(run).pooling.name == "cls"


def test_what_cannot_be_loaded_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(UserError, match="neither in the cache nor reachable"),
    ):
        embedlab.load("no-such-owner/no-such-model")
    assert caplog.text == "", "of its pooling nothing is said"


def test_a_plain_folder_is_pooled_by_the_mean_and_says_so(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        encoder = embedlab.load(tiny("bert"))
    assert "taking the mean" in caplog.text
    np.testing.assert_array_equal(encoder.encode(TEXTS), build(tiny("bert")).encode(TEXTS))


@pytest.mark.parametrize("name", ["mini", "mini-sentence", "another"])
def test_what_is_in_the_box_is_loaded_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved: Path, name: str
) -> None:
    for module in ("embedlab.files", "embedlab.encoders.place"):
        monkeypatch.setattr(f"{module}.assets_dir", lambda: tmp_path)
    with pytest.raises(UserError, match=r"no encoder|neither in the cache nor reachable"):
        embedlab.load(name)
    shutil.copytree(saved, tmp_path / name)
    assert embedlab.load(name).pooling.name == "mask"
    if name == "another":
        with pytest.raises(UserError, match="ships no encoder mini-sentence, but another"):
            embedlab.load("mini-sentence")


def test_the_shipped_encoder() -> None:
    if not (assets_dir() / "mini").is_dir():
        pytest.skip("assets/mini is not trained yet")
    assert embedlab.load("mini").encode(["a cat", "a dog"]).shape == (2, 256)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/nowhere/at/all", "no such file or folder"),
        ("./runs/x", "no such file or folder"),
        ("runs/2025/x", "no such file or folder"),
        ("no-such/model", "neither in the cache nor reachable"),
        ("EMPTY", "holds no encoder"),
        ("EMPTY/text.txt", "is no checkpoint"),
    ],
)
def test_what_is_no_encoder(tmp_path: Path, path: str, part: str) -> None:
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "EMPTY" / "text.txt").write_text("x")
    with pytest.raises(UserError, match=part) as caught:
        embedlab.load(path.replace("EMPTY", str(tmp_path / "EMPTY")))
    assert "\n" not in str(caught.value)
    assert caught.value.fix
    if caught.value.file is None:
        assert caught.value.key == "ckpt", "the key that the commands have"
        assert caught.value.value == path


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("mini_sentence", "did you mean mini-sentence? Or "),
        ("mini-sentense", "did you mean mini-sentence? Or "),
        ("minisentence", "did you mean mini-sentence? Or "),
        ("mini-sentence/", "did you mean mini-sentence? Or "),
        ("mini_multi", "mini or mini-sentence, which are in the box; or "),
        ("runs/frist", "did you mean runs/first? Or "),
        ("./runs/frist", "did you mean runs/first?"),
        ("ORG/mini_sentence", "unset HF_HUB_OFFLINE"),
    ],
)
def test_a_slip_of_the_pen_is_answered(
    name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(UserError, match="no such file or folder") as caught:
        embedlab.load(name)
    assert caught.value.fix.startswith(fix)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_working_folder(
    name: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved)
    with pytest.raises(UserError, match=r"an empty name \(ckpt="):
        embedlab.load(name)


def test_a_folder_named_like_the_shipped_encoder_wins(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(saved, tmp_path / "mini")
    monkeypatch.chdir(tmp_path)
    assert embedlab.load("mini").pooling.name == "mask"


def test_a_checkpoint_without_embedlab_json_is_not_read_as_a_plain_model(tiny: Tiny, tmp_path: Path) -> None:
    encoder = build(tiny("bert"), "cls")
    record = encoder.manifest()
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": state, "embedlab": {"encoder": record}}, path)
    assert embedlab.load(path).fingerprint() == encoder.fingerprint()
    del record["files"]["embedlab.json"]
    torch.save({"state_dict": state, "embedlab": {"encoder": record}}, path)
    with pytest.raises(UserError, match="is no encoder"):
        embedlab.load(path)


def test_a_checkpoint_whose_base_is_gone_names_the_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    """Not the temporary folder that it is unpacked to."""
    encoder = build(tiny("bert"), "cls")
    record = encoder.manifest()
    record["files"]["embedlab.json"] = record["files"]["embedlab.json"].replace('"pooling"', '"poolings"')
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    torch.save({"embedlab": {"encoder": record}, "state_dict": state}, tmp_path / "last.ckpt")
    with pytest.raises(UserError) as caught:
        embedlab.load(tmp_path / "last.ckpt")
    assert str(caught.value).startswith(str(tmp_path / "last.ckpt"))
    assert str(caught.value).count("/tmp") == 1


def test_what_is_wrong_inside_a_folder_names_what_was_given(tiny: Tiny, tmp_path: Path) -> None:
    """Not a key of training, and no key of the tokenization is skipped."""
    build(tiny("bert"), "cls").save(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError) as caught:
        embedlab.load(tmp_path / "a")
    assert caught.value.key == "ckpt"
    build(tiny("bert"), "cls").save(tmp_path / "b")
    text = (tmp_path / "b" / "embedlab.json").read_text()
    (tmp_path / "b" / "embedlab.json").write_text(
        text.replace('"preparation"', '"a_new_key": 1, "preparation"')
    )
    with pytest.raises(UserError, match=r"tokenization\.a_new_key"):
        embedlab.load(tmp_path / "b")


def test_the_commit_of_the_backbone_is_kept(tiny: Tiny, tmp_path: Path) -> None:
    encoder = build(tiny("bert"), "cls")
    encoder.backbone.commit = "0123abc"
    encoder.save(tmp_path / "a")
    embedlab.load(tmp_path / "a").save(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "embedlab.json").read_text())["backbone"]["commit"] == "0123abc"
