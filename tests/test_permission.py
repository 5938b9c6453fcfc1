"""No file grants itself anything: a planted script beside each kind of file makes a mark when it runs."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import embedlab
from embedlab.cli import main as command
from embedlab.cli.compose import compose
from embedlab.cli.permission import check_permission
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.errors import UserError
from tests.encoders.test_encoder import build
from tests.test_safety import Bomb

Tiny = Callable[..., Path]
THEIRS = {
    "AutoConfig": "theirs.Own",
    "AutoModel": "theirs.Own",
    "AutoTokenizer": ["theirs.Own", "theirs.Own"],
}


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """The mark that a planted script makes."""
    return tmp_path / "ran"


def plant(folder: Path, ran: Path, **config: Any) -> None:
    """Code of the folder's own, named by its configuration and its tokenizer."""
    (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\n")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"auto_map": THEIRS} | config))


@pytest.fixture
def hostile(tiny: Tiny, tmp_path: Path, ran: Path) -> Path:
    """A backbone that only code of its own could load."""
    folder = Path(shutil.copytree(tiny("bert"), tmp_path / "hostile"))
    plant(folder, ran, model_type="their_own")
    return folder


@pytest.fixture
def adapter_folder(tiny: Tiny, tmp_path: Path, hostile: Path) -> Path:
    """An encoder whose adapter names the hostile base, and says that it may be trusted."""
    folder = tmp_path / "adapter"
    build(tiny("bert"), "mean").save(folder)
    card = json.loads((folder / "embedlab.json").read_text())
    base = {"source": "local", "name": "x", "path": str(hostile), "trust_remote_code": True}
    card["adapter"] = {"config": {"name": "lora", "r": 2, "targets": []}, "base": base, "digest": "x"}
    (folder / "embedlab.json").write_text(json.dumps(card))
    return folder


def refused(*argv: str | Path) -> None:
    assert command.main([str(a) for a in argv]) == 2


def test_the_planted_script_would_run(hostile: Path, ran: Path) -> None:
    from embedlab.backbones import load_backbone
    from embedlab.config.backbone import BackboneConfig

    config = BackboneConfig("local", "x", str(hostile), trust_remote_code=True)
    with pytest.raises(UserError):  # the script makes its mark and has no class
        load_backbone(config)
    assert ran.exists()


def test_an_adapter_does_not_grant_it(adapter_folder: Path, ran: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a cat\n")
    refused("encode", tmp_path / "in.txt", tmp_path / "out.npy", f"ckpt={adapter_folder}")
    refused("evaluate", f"ckpt={adapter_folder}", "suite=lee")
    refused("export", f"ckpt={adapter_folder}", "to=hf", f"out={tmp_path / 'export'}")
    assert not ran.exists()
    with pytest.raises(UserError):
        SentenceEncoder.load(adapter_folder, trust_remote_code=True)
    assert ran.exists(), "the caller may"


def test_a_checkpoint_does_not_grant_it(adapter_folder: Path, ran: Path, tmp_path: Path) -> None:
    files = {p.name: p.read_text() for p in adapter_folder.iterdir() if p.suffix in (".json", ".py")}
    record = {"files": files, "weights": {}}
    torch.save({"state_dict": {}, "embedlab": {"encoder": record}}, tmp_path / "a.ckpt")
    with pytest.raises(UserError):
        embedlab.load(tmp_path / "a.ckpt")
    assert not ran.exists()


def test_an_index_loads_its_encoder_as_data(
    adapter_folder: Path, hostile: Path, ran: Path, tiny: Tiny, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("a cat\na dog\n")
    index = tmp_path / "index"
    assert (
        command.main(["search", "index", str(tmp_path / "in.txt"), str(index), f"ckpt={tiny('bert')}"]) == 0
    )
    content = json.loads((index / "index.json").read_text())
    pickled = tmp_path / "pickled"
    shutil.copytree(tiny("bert"), pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(ran)))
    for encoder in (adapter_folder, hostile, pickled):
        (index / "index.json").write_text(json.dumps(content | {"encoder": str(encoder)}))
        refused("search", "query", index, "a cat")
    assert not ran.exists()


def test_exports_carry_no_code(tiny: Tiny, tmp_path: Path, ran: Path) -> None:
    """An architecture of transformers' own, with a foreign map beside it."""
    folder = Path(shutil.copytree(tiny("bert"), tmp_path / "foreign"))
    plant(folder, ran)
    pytest.importorskip("sentence_transformers")
    for target in ("hf", "sentence-transformers"):
        out = tmp_path / target
        assert command.main(["export", f"ckpt={folder}", f"to={target}", f"out={out}"]) == 0
        for file in out.rglob("*.json"):
            assert "theirs" not in file.read_text(), file
        assert not list(out.rglob("*.py"))
    texts = embedlab.load(folder).manifest()["files"]
    assert not [name for name, text in texts.items() if "theirs" in text], "a checkpoint's files neither"
    assert not ran.exists()


def test_the_round_trip_trusts_this_package_only(tmp_path: Path) -> None:
    from embedlab.cli.export import _is_own
    from embedlab.encoders.sentence_transformers import CUSTOM, write_index

    write_index(tmp_path)
    assert _is_own(tmp_path)
    for kinds in ([CUSTOM, "theirs.Module"], ["theirs.Module"], [f"{CUSTOM}x"], []):
        write_index(tmp_path, [("", kind) for kind in kinds])
        assert not _is_own(tmp_path)


@pytest.mark.parametrize("command_line", [[], ["backbone=local"], ["trust_remote_code=true"]])
def test_a_configuration_file_does_not_grant_it(command_line: list[str]) -> None:
    values = compose("train", ["backbone=mini"])
    check_permission(values, command_line)
    values["backbone"]["trust_remote_code"] = True
    with pytest.raises(UserError, match=r"backbone\.trust_remote_code=true"):
        check_permission(values, command_line)
    with pytest.raises(UserError, match=r"stages\.one\.backbone"):
        check_permission({"stages": {"one": {"backbone": values["backbone"]}}}, command_line)
    check_permission(values, [*command_line, "backbone.trust_remote_code=true"])


def test_neither_an_experiment_nor_a_run_file_grants_it(
    hostile: Path, ran: Path, tmp_path: Path, text_file: Path
) -> None:
    conf = tmp_path / "conf"
    (conf / "experiment").mkdir(parents=True)
    backbone = {"source": "local", "path": str(hostile), "trust_remote_code": True}
    (conf / "experiment" / "theirs.yaml").write_text(
        "# @package _global_\n" + yaml.safe_dump({"backbone": backbone})
    )
    wanted = ["backbone=local", "experiment=theirs", f"data.files={text_file}"]
    refused("train", "--config-dir", conf, *wanted, f"hydra.run.dir={tmp_path / 'run'}")
    assert not (tmp_path / "run" / "config.yaml").exists()
    run_file = tmp_path / "run.yaml"
    sections = {"backbone": backbone, "method": {"name": "simcse"}, "pooling": {"name": "cls"}}
    run_file.write_text(
        yaml.safe_dump({"model": sections, "data": {"name": "wikipedia", "files": str(text_file)}})
    )
    refused("fit", "--config", run_file, f"--trainer.default_root_dir={tmp_path / 'fit'}")
    assert not ran.exists()


def test_the_tokenizer_of_a_run_that_goes_on_brings_no_code(
    tmp_path: Path, ran: Path, compose_run: Any
) -> None:
    from embedlab.run.run import _fresh_tokenizer

    config = compose_run("backbone=fresh", "backbone.path=null")
    _fresh_tokenizer(config, tmp_path)
    file = tmp_path / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": THEIRS}))
    (file.parent / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\n")
    _fresh_tokenizer(config, tmp_path)
    assert not ran.exists()
