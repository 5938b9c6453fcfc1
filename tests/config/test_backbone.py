"""What is known of a backbone before its weights are loaded; and that `conf/backbone` says it in the same words."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import yaml

from embedlab.backbones import probe
from embedlab.config.backbone import KNOWN, TOKENIZERS, BackboneConfig, BackboneInfo, known
from embedlab.errors import UserError
from embedlab.files import conf_dir
from tests.support import ENCODERS, MODEL_TYPES

CONF = sorted((conf_dir() / "backbone").glob("*.yaml"))
Tiny = Callable[..., Path]


def local(folder: Path, **more: object) -> BackboneConfig:
    return BackboneConfig(source="local", path=str(folder), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("file", CONF, ids=lambda f: f.stem)
def test_conf_has_the_keys_of_the_dataclass(file: Path) -> None:
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert set(values) == {f.name for f in fields(BackboneConfig)}
    asked = {"local": ("path", r"backbone\.path=DIR"), "hub": ("name", r"backbone\.name=NAME")}
    if file.stem in asked:
        key, fix = asked[file.stem]
        with pytest.raises(UserError, match=fix):
            BackboneConfig(**values)
        values[key] = "somewhere"
    config = BackboneConfig(**values)
    assert (config.attention, config.dtype, config.trust_remote_code) == ("sdpa", "float32", False)


@pytest.mark.parametrize(
    "file", [f for f in CONF if f.stem not in ("mini", "local", "hub")], ids=lambda f: f.stem
)
def test_conf_is_probed_without_a_hub_and_at_once(file: Path) -> None:
    config = BackboneConfig(**yaml.safe_load(file.read_text(encoding="utf-8")))
    probe(config)  # what is imported on first use is not counted
    started = time.perf_counter()
    info = probe(config)
    assert time.perf_counter() - started < 1
    assert info.layers >= 6
    assert (info.kind == "encoder") == info.has_mask_token
    assert probe(replace(config, dropout=0.25)).dropout == 0.25


def test_every_known_checkpoint_is_in_conf_and_has_a_short_name() -> None:
    named = {yaml.safe_load(f.read_text(encoding="utf-8"))["name"] for f in CONF}
    assert set(KNOWN) <= named
    assert known("bert-base-uncased") == known("google-bert/bert-base-uncased")
    assert known("bert-base-uncasd") is None


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_probe_reads_a_folder(tiny: Tiny, model_type: str) -> None:
    info = probe(local(tiny(model_type, layers=3, width=16, heads=2)))
    assert (info.layers, info.width, info.inner_width, info.max_positions) == (3, 16, 16, 64)
    assert info.kind == ("encoder" if model_type in ENCODERS else "decoder")
    assert info.has_mask_token == info.has_mlm_head == (model_type in ENCODERS)
    assert info.model_type == model_type
    assert info.dropout == (0.1 if model_type in (*ENCODERS[:4], "gpt2", "opt") else 0.0)


def test_probe_needs_no_weights(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert probe(local(folder)).layers == 2


def test_a_headless_checkpoint_has_no_head(tiny: Tiny) -> None:
    assert not probe(local(tiny("bert", head=False))).has_mlm_head


def test_opt_that_projects_down_at_the_end(tiny: Tiny) -> None:
    info = probe(local(tiny("opt", word_embed_proj_dim=16)))
    assert (info.width, info.inner_width) == (16, 32)


def test_a_causal_architecture_set_to_look_both_ways_is_an_encoder(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    assert probe(local(folder)).kind == "encoder"


@pytest.mark.parametrize(
    ("values", "key", "part"),
    [
        ({"source": "web", "name": "x"}, "backbone.source", "one of shipped, hub, local, fresh"),
        ({"name": "x", "attention": "flash"}, "backbone.attention", "sdpa"),
        ({"name": "x", "dtype": "int8"}, "backbone.dtype", "float32"),
        ({"name": "x", "dropout": 1.0}, "backbone.dropout", "below 1"),
        ({"name": "x", "dropout": "0.1"}, "backbone.dropout", "not a number"),
        ({"source": "local"}, "backbone.path", "backbone.path=DIR"),
        ({"source": "hub"}, "backbone.name", "backbone.name=NAME"),
        ({"source": "fresh"}, "backbone.fresh", "backbone=fresh"),
    ],
)
def test_bad_values(values: dict[str, object], key: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        BackboneConfig(**values)  # type: ignore[arg-type]
    assert caught.value.key == key
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_places(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        probe(local(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="neither a folder nor a GGUF file"):
        probe(local(tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        probe(local(tmp_path / "empty"))
    with pytest.raises(UserError, match="ships no encoder minni"):
        probe(BackboneConfig(source="shipped", name="minni"))


def test_a_wrong_hub_name_offline_is_one_line_with_the_fix() -> None:
    """HF_HUB_OFFLINE=1 in the tests."""
    with pytest.raises(UserError) as caught:
        probe(BackboneConfig(source="hub", name="bert-base-uncasd"))
    text = str(caught.value)
    assert "\n" not in text
    assert "backbone.name=bert-base-uncasd" in text
    assert "backbone.path=DIR" in text
    assert "backbone=mini" in text


@pytest.mark.parametrize("name", ["a/b/c", "a b", "--", "x" * 200])
def test_what_is_no_name_on_a_hub_is_one_line_offline_too(name: str) -> None:
    with pytest.raises(UserError, match="no name on a hub"):
        probe(BackboneConfig(source="hub", name=name))


def test_broken_configurations(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json:1: is not JSON"):
        probe(local(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with pytest.raises(UserError, match="no_such_type"):
        probe(local(folder))


def test_code_of_a_checkpoint_is_not_run_unasked(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "their_own",
        "auto_map": {"AutoConfig": "configuration.Own", "AutoModel": "modeling.Own"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match=r"backbone\.trust_remote_code=true"):
        probe(local(folder))
    assert not (tmp_path / "ran").exists()


def test_fresh() -> None:
    shape = {"model_type": "distilbert", "layers": 3, "width": 24, "heads": 2, "max_positions": 40}
    info = probe(BackboneConfig(source="fresh", name="x", fresh=shape, dropout=0.3))
    assert info == BackboneInfo("encoder", 3, 24, 40, True, 0.3, "distilbert", True)
    decoder = probe(BackboneConfig(source="fresh", name="x", fresh={**shape, "model_type": "llama"}))
    assert (decoder.kind, decoder.has_mask_token, decoder.has_mlm_head) == ("decoder", False, False)
    for key, value in (
        ("layers", 0),
        ("heads", 5),
        ("model_type", "brt"),
        ("colour", "red"),
        ("tokenizer", {"type": "words"}),
    ):
        with pytest.raises(UserError, match=r"backbone\.fresh\.") as caught:
            probe(BackboneConfig(source="fresh", name="x", fresh={**shape, key: value}))
        assert key in str(caught.value.key)


def test_info_is_plain_and_complete() -> None:
    info = BackboneInfo("encoder", 2, 8, None, True, 0.1, "bert", True)
    assert BackboneInfo(**asdict(info)) == info
    assert info.inner_width == 8
    assert set(TOKENIZERS) == {"wordpiece", "bpe", "unigram"}
