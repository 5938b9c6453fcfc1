"""A file that cannot be read is said to be so, without torch's advice to run what it holds."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import embedlab
from embedlab.cli import main as command
from embedlab.errors import UserError
from embedlab.files import corruption
from embedlab.run.callbacks.checkpoints import find_checkpoint
from tests.encoders.test_encoder import build

Tiny = Callable[..., Path]


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


FILES = {
    "x": b"x",
    "empty": b"",
    "text": b"no checkpoint at all",
    "cut": saved({"state_dict": {"w": torch.zeros(1000)}})[:1500],
    "objects": saved({"state_dict": Path}),
    "list": saved([1]),
    "foreign": saved({"state_dict": {}}),
}


def says_what_to_do(error: UserError) -> None:
    text = str(error)
    assert error.fix
    assert "\n" not in text
    assert not any(word in text for word in ("weights_only", "trust", "PyTorch 2.6", "miniz", "KeyError"))
    assert any(word in text for word in ("damaged", "never loaded", "no checkpoint", "weights alone"))


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint(name: str, tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    file.write_bytes(FILES[name])
    with pytest.raises(UserError, match=r"a\.ckpt") as loading:
        embedlab.load(file)
    says_what_to_do(loading.value)
    with pytest.raises(UserError, match=r"a\.ckpt") as resuming:
        find_checkpoint(str(file), tmp_path)
    says_what_to_do(resuming.value)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"x")
    assert command.main(["evaluate", f"ckpt={tmp_path / 'a.ckpt'}", "suite=sts"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "damaged" in error
    assert "weights_only" not in error


def test_no_checkpoint_of_a_folder_is_whole(tmp_path: Path) -> None:
    for name in ("last.ckpt", "previous.ckpt"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"none of last\.ckpt, previous\.ckpt can be read") as error:
        find_checkpoint("auto", tmp_path)
    assert error.value.fix


@pytest.mark.parametrize("name", ["model.safetensors", "pooling.safetensors"])
@pytest.mark.parametrize("left", [0, 4, 0.5, 0.999])
def test_weights_that_are_cut_short(name: str, left: float, tiny: Tiny, tmp_path: Path) -> None:
    build(tiny("bert"), "cls_mlp").save(tmp_path / "e")
    file = tmp_path / "e" / name
    content = file.read_bytes()
    file.write_bytes(content[: int(left if left >= 1 else left * len(content))])
    with pytest.raises(UserError) as error:
        embedlab.load(tmp_path / "e")
    says_what_to_do(error.value)


@pytest.mark.parametrize("name", ["x", "cut", "objects"])
def test_a_pickle_of_hugging_face(name: str, tiny: Tiny, tmp_path: Path) -> None:
    build(tiny("bert"), "mean").save(tmp_path / "e")
    (tmp_path / "e" / "model.safetensors").unlink()
    (tmp_path / "e" / "pytorch_model.bin").write_bytes(FILES[name])
    with pytest.raises(UserError) as error:
        embedlab.load(tmp_path / "e")
    says_what_to_do(error.value)


def test_other_errors_speak_for_themselves() -> None:
    assert corruption(RuntimeError("size mismatch for weight")) is None
    assert corruption(FileNotFoundError(2, "No such file")) is None
