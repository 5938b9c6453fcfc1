"""Nothing from disk, from a data set or from a configuration runs as code or writes outside its place."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embedlab
from embedlab.backbones.resolve import MOST_BYTES
from embedlab.backbones.weight_files import PACKED, packed
from embedlab.cli.compose import compose
from embedlab.config.data import DataConfig
from embedlab.data.build import build_token_table
from embedlab.encoders.loading import load_checkpoint
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.run.callbacks.checkpoints import find_checkpoint, unreadable

PACKAGE = Path(embedlab.__file__).parent
OVER_A_PIPE = {"data/worker.py", "data/tokenise.py"}
"""Pickles go through a pipe between a process and the one that it started; none comes from a file."""
OF_PARTS = {("parts.py", "exec"), ("parts.py", "compile")}
"""Definitions of an installed package's own files, which are imported right afterwards; no file of a user's."""
FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "pickle.load", "pickle.loads", "joblib.load", "dill.load", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "shutil.unpack_archive", "os.system", "tarfile.open",
}  # fmt: skip


FIT = ("run/run.py", "trainer.fit")


class Bomb:
    """What a pickle can hold: a call that is made when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(file, dotted name, call) of every call in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield path.relative_to(PACKAGE).as_posix(), ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> Any:
    return next((ast.literal_eval(k.value) for k in call.keywords if k.arg == name), None)


def test_the_package_has_no_call_that_runs_what_it_reads() -> None:
    found = [(file, name) for file, name, _ in calls() if name in FORBIDDEN and file not in OVER_A_PIPE]
    assert [call for call in found if call not in OF_PARTS] == []
    extracting = [(f, n) for f, n, _ in calls() if n.rpartition(".")[2] in ("extractall", "extract")]
    assert extracting == [], "archives are read, never unpacked: their paths lead nowhere"


def test_every_checkpoint_is_loaded_as_weights_only() -> None:
    loads = [(file, keyword(call, "weights_only")) for file, name, call in calls() if name == "torch.load"]
    assert len(loads) >= 4
    assert [file for file, safe in loads if safe is not True] == []
    fits = [keyword(call, "weights_only") for file, name, call in calls() if (file, name) == FIT]
    assert fits == [True]


def test_arrays_are_loaded_without_objects() -> None:
    assert [file for file, name, call in calls() if name == "np.load" and keyword(call, "allow_pickle")] == []


def test_a_checkpoint_with_code_is_refused(tmp_path: Path) -> None:
    path, ran = tmp_path / "last.ckpt", tmp_path / "ran"
    torch.save({"state_dict": {}, "embedlab": Bomb(ran)}, path)
    assert unreadable(path)
    for load in (load_checkpoint, embedlab.load, lambda p: find_checkpoint(str(p), tmp_path)):
        with pytest.raises(UserError) as caught:
            load(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(pickle.dumps(Bomb(ran)))
    with pytest.raises(UserError):
        load_checkpoint(path)
    assert not ran.exists()
    pickle.loads(path.read_bytes())
    assert ran.exists(), "guards the test: the pickle does do what it says"


@pytest.mark.parametrize("how", ["compressed", "overlapping"])
def test_weights_that_are_larger_inside_than_their_file_are_refused(
    how: str, tmp_path: Path, tiny: Callable[..., Path]
) -> None:
    path = tmp_path / "whole.ckpt"
    torch.save({"state_dict": {"a": torch.zeros(64, 64)}, "global_step": 1}, path)
    assert not packed(path)
    large = tmp_path / "last.ckpt"
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(large, "w") as target:
        for part in whole.infolist():
            kind = zipfile.ZIP_DEFLATED if how == "compressed" else zipfile.ZIP_STORED
            target.writestr(part.filename, whole.read(part), kind)
        if how == "overlapping":  # the directory names one part's bytes many times
            target.filelist += [max(target.filelist, key=lambda part: part.file_size)] * 3
    assert packed(large)
    assert unreadable(large) == PACKED
    with pytest.raises(UserError, match="the file is packed"):
        load_checkpoint(large)
    folder = Path(shutil.copytree(tiny("bert"), tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    large.rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="the file is packed"):
        embedlab.load(folder)


def test_files_of_a_tokenizer_are_read_size_first(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    for name in ("tokenizer.json", "vocab.txt", "other.json"):
        folder = Path(shutil.copytree(tiny("bert"), tmp_path / name))
        with (folder / name).open("wb") as file:
            file.truncate(MOST_BYTES + 1)
        with pytest.raises(UserError, match=rf"{name}: is larger than 256 MiB"):
            embedlab.load(folder)


@pytest.mark.parametrize(("name", "values", "part"), [
    ("tokenizer_config.json", {"model_max_length": "many"}, "cannot be read"),
    ("config.json", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantised"),
    ("embedlab.json", {"usage": {"prompts": {"query": 5}}}, r"embedlab\.json: not text \(usage\.prompts\.query"),
    ("embedlab.json", {"usage": {"truncate_dim": 0}}, r"embedlab\.json: must be at least 1"),
    ("embedlab.json", {"tokenization": {"template": {"text": "x"}}}, r"embedlab\.json: no place for the sentence"),
])  # fmt: skip
def test_a_setting_that_cannot_be_names_its_folder(
    name: str, values: dict[str, Any], part: str, tmp_path: Path, tiny: Callable[..., Path]
) -> None:
    embedlab.load(tiny("bert")).save(tmp_path / "encoder")
    file = tmp_path / "encoder" / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    with pytest.raises(UserError, match=part) as caught:
        embedlab.load(tmp_path / "encoder")
    assert str(caught.value).startswith(str(tmp_path / "encoder"))


def test_a_checkpoint_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    files = {"../../escaped.json": "{}", "config.json": "{}"}
    torch.save({"state_dict": {}, "embedlab": {"encoder": {"files": files, "weights": {}}}}, path)
    with pytest.raises(UserError, match="leads out of its folder"):
        load_checkpoint(path)
    path = tmp_path / "weights.ckpt"
    record = {"files": {"config.json": "{}"}, "weights": {f"{tmp_path}/escaped.safetensors": "x."}}
    torch.save({"state_dict": {}, "embedlab": {"encoder": record}}, path)
    with pytest.raises(UserError, match="leads out of its folder"):
        load_checkpoint(path)
    assert not (tmp_path / "escaped.safetensors").exists()


def test_an_index_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    from embedlab.corpus.search import Index

    ran = tmp_path / "ran"
    np.save(tmp_path / "vectors.npy", np.array([Bomb(ran)], dtype=object), allow_pickle=True)
    np.save(tmp_path / "offsets.npy", np.zeros(2, np.int64))
    (tmp_path / "texts.txt").write_text("x")
    info = '{"encoder": "x", "fingerprint": "x", "dim": 1, "rows": 1, "source": "x", "created": "x"}'
    (tmp_path / "index.json").write_text(info)
    with pytest.raises(UserError, match="damaged"):
        Index(tmp_path)
    assert not ran.exists()


def test_code_beside_a_checkpoint_is_not_run_unasked(tiny: Any, tmp_path: Path) -> None:
    """Of a folder that is read as an encoder (`BackboneConfig` has the same test for training)."""
    import json

    folder = shutil.copytree(tiny("bert"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "their_own", "auto_map": {"AutoConfig": "theirs.Own", "AutoModel": "theirs.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError):
        embedlab.load(folder)
    assert not (tmp_path / "ran").exists()
    assert not compose("train", [])["backbone"]["trust_remote_code"]


@pytest.mark.parametrize(
    "value", ["__import__('os').mkdir('ran')", "${oc.eval:1}", "!!python/object/apply:os.mkdir [ran]"]
)
def test_a_configuration_value_is_a_value(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if value.startswith("$"):
        with pytest.raises(UserError):
            compose("train", [f"backbone.name='{value}'"])
    else:
        assert compose("train", [f"backbone.name={quoted(value)}"])["backbone"]["name"] == value
    assert not (tmp_path / "ran").exists()


def quoted(value: str) -> str:
    return "'" + value.replace("'", "\\'") + "'"


def test_a_run_file_holds_no_python(tmp_path: Path) -> None:
    from embedlab.cli import fit

    path = tmp_path / "run.yaml"
    path.write_text(f"seed_everything: !!python/object/apply:os.mkdir ['{tmp_path / 'ran'}']\n")
    with pytest.raises(UserError):
        fit.main("fit", ["--config", str(path)])
    assert not (tmp_path / "ran").exists()


def test_data_stays_in_the_cache_folder(tiny: Any, tmp_path: Path) -> None:
    """Names that lead upwards, of a file, of a column and within an archive, make no path."""
    from transformers import AutoTokenizer

    tokenization = Tokenization(AutoTokenizer.from_pretrained(tiny("bert")))
    source = tmp_path / "in" / ".." / "in" / "..rows.csv"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("../../escaped\na cat\nthe dog\n")
    outside = {p for p in tmp_path.rglob("*") if "cache" not in p.parts}
    config = DataConfig(
        files=str(source),
        columns={"sentence": "../../escaped"},
        cache_dir=str(tmp_path / "cache"),
        report=False,
    )
    table = build_token_table(config, {"sentence": ("sentence", tokenization)}, progress=False)
    assert table.n_rows == 2
    assert table.folder.resolve().is_relative_to((tmp_path / "cache").resolve())
    assert {p for p in tmp_path.rglob("*") if "cache" not in p.parts} == outside


def test_an_archive_is_no_source(tmp_path: Path) -> None:
    """It is not unpacked: there is no path in it that could lead anywhere."""
    from embedlab.data.sources import open_source

    inner = tmp_path / "x.txt"
    inner.write_text("a cat\n")
    with tarfile.open(tmp_path / "rows.tar", "w") as archive:
        archive.add(inner, "../../escaped.txt")
    with pytest.raises(UserError, match=r"rows\.tar"):
        open_source(DataConfig(files=str(tmp_path / "rows.tar")))
    assert not list(tmp_path.parent.parent.glob("escaped*"))
